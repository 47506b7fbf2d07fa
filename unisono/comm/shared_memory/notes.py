"""Notes: what each rank of one machine does, in words, in memory that all of them map.

A transport pairs whatever arrives, so ranks compare what they are about to do. A rank notes its announcements, one line
each, and then its collective; the notes of a collective end when all have met in it. Equal notes mean equal operations.

*Threads:* the rank's own thread.

Invariants:

1. The notes of collective n are on page n modulo 2. A rank turns to page n + 1 after all have arrived at n, so nobody
   reads what stood there for n - 1.
2. A page only grows, and its length is written after its text: a reader finds whole lines (on processors that keep the
   order of stores, see `futex.SUPPORTED`).
"""

from __future__ import annotations

from functools import lru_cache

from unisono.comm.operations import fitted
from unisono.comm.shared_memory.mapping import Mapping

_PAGES_AT, _PAGE, _TEXT_AT = 64, 2000, 8  # offsets in a rank's header, and in a page: its number, its length, its text
_LINE = 480  # the most bytes of a line; the last one on a page always has room
_WORD = 2**32


class Notes:
    """The notes of all ranks; this rank writes its own."""

    def __init__(self, mapping: Mapping) -> None:
        self._rank, self._size = mapping.rank, mapping.size
        self._memory = mapping.memory
        self._words = memoryview(mapping.memory).cast("I")
        self._starts = [mapping.header_of(rank) + _PAGES_AT for rank in range(mapping.size)]
        self._number = 0
        self.turn_page()

    def turn_page(self) -> None:
        """Begin the notes of the next collective."""
        self._number += 1
        at = self._page_of(self._rank, self._number) // 4
        # The length first: under the new number, nothing of the old notes may be read.
        self._words[at + 1] = 0
        self._words[at] = self._number % _WORD

    @property
    def is_full(self) -> bool:
        """Whether there is room for one line only, that of the collective."""
        return len(self._read(self._rank)) > _PAGE - _TEXT_AT - 2 * _LINE

    def add(self, action: str) -> None:
        """Note what this rank does next."""
        line, at = _line_of(action), self._page_of(self._rank, self._number)
        length = self._words[at // 4 + 1]
        start = at + _TEXT_AT + length
        self._memory[start : start + len(line)] = line
        self._words[at // 4 + 1] = length + len(line)

    def find_difference(self) -> dict[int, str]:
        """The first line by which the notes of ranks differ, as far as they go, by rank; empty if none does."""
        own = self._read(self._rank)
        found = {rank: self._read(rank) for rank in range(self._size)}
        if all(own.startswith(text[: len(own)]) for text in found.values()):
            return {}
        lines = {rank: text.decode(errors="replace").splitlines() for rank, text in found.items()}
        for number in range(max(map(len, lines.values()))):
            row = {rank: each[number] for rank, each in lines.items() if number < len(each)}
            if len(set(row.values())) > 1:
                return row
        return {}

    def last_action(self, rank: int) -> str:
        """What that rank has noted last; "" if nothing."""
        pages = [self._page_of(rank, number) for number in range(2)]
        newest, older = sorted(pages, key=lambda at: -self._words[at // 4])
        text = self._text_at(newest) or self._text_at(older)
        return text.decode(errors="replace").splitlines()[-1] if text else ""

    def _read(self, rank: int) -> bytes:
        """What that rank has noted for this rank's next collective so far."""
        at = self._page_of(rank, self._number)
        return self._text_at(at) if self._words[at // 4] == self._number % _WORD else b""

    def _text_at(self, at: int) -> bytes:
        length = self._words[at // 4 + 1]
        return self._memory[at + _TEXT_AT : at + _TEXT_AT + length]

    def _page_of(self, rank: int, number: int) -> int:
        return self._starts[rank] + number % 2 * _PAGE


@lru_cache(1024)
def _line_of(action: str) -> bytes:
    return fitted(action.replace("\n", " "), _LINE - 1) + b"\n"
