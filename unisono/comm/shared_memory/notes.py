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

from unisono.comm.operations import fitted
from unisono.comm.shared_memory.mapping import Mapping

_PAGES_AT, _PAGE = 64, 2016  # the offset in a rank's header, and the bytes of each of its two pages
_TEXT_AT = 8  # in a page, after its number and its length
_LINE = 480  # the most bytes of a line; the last one on a page always has room
_WORD = 2**32


class Notes:
    """The notes of all ranks; this rank writes its own. `is_full`: its page has room for the collective's line only."""

    def __init__(self, mapping: Mapping) -> None:
        self._rank, self._size = mapping.rank, mapping.size
        self._memory = mapping.memory
        self._words = memoryview(mapping.memory).cast("I")
        # For each of the two pages, where it begins in the memory of each rank.
        first = [mapping.header_of(rank) + _PAGES_AT for rank in range(mapping.size)]
        self._pages = first, [at + _PAGE for at in first]
        self._number = 0
        self.turn_page()

    def turn_page(self) -> None:
        """Begin the notes of the next collective."""
        self._number += 1
        self._starts = self._pages[self._number % 2]
        at = self._starts[self._rank] // 4
        self._length, self.is_full = 0, False
        # The length first: under the new number, none of the old notes may be read.
        self._words[at + 1] = 0
        self._words[at] = self._number % _WORD

    def add(self, action: str) -> None:
        """Note what this rank does next."""
        line, at = action.encode(), self._starts[self._rank]
        if len(line) >= _LINE or b"\n" in line:
            line = fitted(action.replace("\n", " "), _LINE - 1)
        line += b"\n"
        start = at + _TEXT_AT + self._length
        self._memory[start : start + len(line)] = line
        self._length += len(line)
        self._words[at // 4 + 1] = self._length
        self.is_full = self._length > _PAGE - _TEXT_AT - 2 * _LINE

    def find_difference(self) -> dict[int, str]:
        """The first line in which the ranks' notes so far differ, by rank; empty if none does."""
        memory, words, starts = self._memory, self._words, self._starts
        at = starts[self._rank] + _TEXT_AT
        own = memory[at : at + self._length]
        for start in starts:
            if words[start // 4] != self._number % _WORD:  # first: it has not begun this page
                continue
            length = min(words[start // 4 + 1], len(own))
            if memory[start + _TEXT_AT : start + _TEXT_AT + length] != own[:length]:
                break
        else:
            return {}
        lines = {rank: self.lines(rank) for rank in range(self._size)}
        for number in range(max(map(len, lines.values()))):
            row = {rank: each[number] for rank, each in lines.items() if number < len(each)}
            if len(set(row.values())) > 1:
                return row
        return {}

    def lines(self, rank: int) -> list[str]:
        """What that rank has noted for this rank's next collective so far, line by line."""
        at = self._starts[rank]
        if self._words[at // 4] != self._number % _WORD:
            return []
        text = self._memory[at + _TEXT_AT : at + _TEXT_AT + self._words[at // 4 + 1]]
        return text.decode(errors="replace").split("\n")[:-1]
