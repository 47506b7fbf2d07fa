"""Arrivals: which rank has arrived at which collective, and what it does there.

The transport only reports that nothing arrived, and pairs whatever does: different shapes end the process. So each rank
notes what it is about to do, by number, and checks what its peers have noted under that number: in memory shared by the
ranks of one machine, next to the file of their store, which costs a few microseconds and no message.

*Threads:* the rank's own thread.

Invariants:

1. A rank writes its own note before it reads the others'. So of two ranks that arrive at different calls, the later one
   reads what the earlier has noted, before it uses the transport.
2. A note's text is written before its number.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Protocol

import torch.distributed as dist

from unisono.comm.operations import fitted

_KEY = "unisono/arrived/{}"
_KEPT = 32  # notes of a rank: a broadcasting root may be that far ahead
_NOTE = 512  # bytes, of which the first 16 are the number and the length of the text
_HEAD = 16
_SETTLING_S = 0.001


class Arrivals(Protocol):
    """Where the ranks of a group note how many collectives they have entered."""

    def note(self, number: int, action: str) -> dict[int, str]:
        """Note that this rank enters its `number`-th collective with that action; return those of ranks that differ
        there."""

    def missing(self, number: int) -> list[int]:
        """The ranks that have not yet entered their `number`-th."""

    def last_action(self, rank: int) -> str:
        """What that rank did last; "" if it is not known."""


class SharedArrivals:
    """Arrivals in a small file that the ranks of one machine map into their memory."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._starts = {peer: peer * _KEPT * _NOTE for peer in range(size)}
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            length = size * _KEPT * _NOTE
            os.ftruncate(file, length)  # the first rank to arrive creates it, zero-filled
            self._bytes = mmap.mmap(file, length)
        finally:
            os.close(file)
        self._words = memoryview(self._bytes).cast("q")  # one aligned write, one aligned read

    def note(self, number: int, action: str) -> dict[int, str]:
        own = fitted(action, _NOTE - _HEAD)
        start = self._starts[self._rank] + number % _KEPT * _NOTE
        # While the text is rewritten, the note belongs to no call.
        self._words[start // 8] = 0
        self._bytes[start + _HEAD : start + _HEAD + len(own)] = own
        self._words[start // 8 + 1] = len(own)
        self._words[start // 8] = number
        found = self._others(number, own)
        if not found:
            return {}
        # On machines that reorder writes, a text may become visible after its number.
        time.sleep(_SETTLING_S)
        found = self._others(number, own)
        return {peer: text.decode(errors="replace") for peer, text in found.items()}

    def missing(self, number: int) -> list[int]:
        return [rank for rank in range(self._size) if self._newest_entry(rank) < number]

    def last_action(self, rank: int) -> str:
        return self._text(self._starts[rank] + self._newest_entry(rank) % _KEPT * _NOTE).decode(errors="replace")

    def _others(self, number: int, own: bytes) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        at = number % _KEPT * _NOTE
        for peer, first in self._starts.items():
            if peer != self._rank and self._words[(first + at) // 8] == number:
                text = self._text(first + at)
                if text != own:
                    found[peer] = text
        return found

    def _text(self, start: int) -> bytes:
        return self._bytes[start + _HEAD : start + _HEAD + self._words[start // 8 + 1]]

    def _newest_entry(self, rank: int) -> int:
        return max(self._words[(self._starts[rank] + place * _NOTE) // 8] for place in range(_KEPT))


class StoredArrivals:
    """Arrivals in the store of the group, one key per rank: they only show which ranks are missing."""

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def note(self, number: int, action: str) -> dict[int, str]:
        self._store.set(_KEY.format(self._rank), f"{number} {action}")
        return {}

    def missing(self, number: int) -> list[int]:
        return [rank for rank in range(self._size) if int(self._read_entry(rank)[0]) < number]

    def last_action(self, rank: int) -> str:
        return self._read_entry(rank)[2]

    def _read_entry(self, rank: int) -> tuple[str, str, str]:
        key = _KEY.format(rank)
        return self._store.get(key).decode().partition(" ") if self._store.check([key]) else ("0", "", "")


def arrivals_in(store: dist.distributed_c10d.Store | None, rank: int, size: int, is_checked: bool) -> Arrivals | None:
    """Where this group notes its arrivals; None if that would cost more than was asked for."""
    if isinstance(store, dist.FileStore):  # type: ignore[attr-defined] # torch re-exports it silently
        return SharedArrivals(f"{store.path}.arrived", rank, size)  # type: ignore[attr-defined] # and annotates no path
    return StoredArrivals(store, rank, size) if store is not None and is_checked else None
