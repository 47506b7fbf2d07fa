"""Arrivals: which ranks have come to which collective, so that a time-out can name those who have not.

The transport only says that nothing came. So each rank notes the number of a call before it enters it, where its peers
can read it without asking: in memory that the ranks of one machine share, beside the file of their store, which costs
next to nothing; or in a store that is a server, which costs a message and is done for checked calls only.

*Threads:* the rank's own thread.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import torch.distributed as dist

_KEY = "unisono/arrived/{}"
_BYTES = 8  # of a number


class Arrivals(Protocol):
    """Where the ranks of a group note how many collectives they have entered."""

    def note(self, number: int) -> None:
        """This rank enters its `number`-th collective."""

    def missing(self, number: int) -> list[int]:
        """The ranks that have not yet entered their `number`-th."""


class SharedArrivals:
    """In a small file that the ranks of one machine map into their memory."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        self._rank = rank
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size * _BYTES)  # whoever comes first makes it, of zeros
            self._numbers = memoryview(mmap.mmap(file, size * _BYTES)).cast("q")
        finally:
            os.close(file)

    def note(self, number: int) -> None:
        self._numbers[self._rank] = number

    def missing(self, number: int) -> list[int]:
        return [rank for rank, entered in enumerate(self._numbers) if entered < number]


class StoredArrivals:
    """In the store of the group, one key per rank."""

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def note(self, number: int) -> None:
        self._store.set(_KEY.format(self._rank), str(number))

    def missing(self, number: int) -> list[int]:
        return [rank for rank in range(self._size) if self._entered(rank) < number]

    def _entered(self, rank: int) -> int:
        key = _KEY.format(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0


def arrivals_in(store: dist.distributed_c10d.Store | None, rank: int, size: int, is_checked: bool) -> Arrivals | None:
    """Where this group notes its arrivals; None where that would cost more than it was asked to."""
    if isinstance(store, dist.FileStore):  # type: ignore[attr-defined] # torch re-exports it silently
        return SharedArrivals(f"{store.path}.arrived", rank, size)  # type: ignore[attr-defined] # and annotates no path
    return StoredArrivals(store, rank, size) if store is not None and is_checked else None
