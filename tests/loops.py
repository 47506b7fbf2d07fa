"""Sources whose pace a test sets, and loops over the devices of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import torch
from epochs import PATIENCE_S, CodedError
from modes import devices
from torch.utils.data import IterableDataset

from unisono.world import World, thread_worlds


def worlds(count: int) -> list[World]:
    return thread_worlds([*map(torch.device, devices(count))])


class Paced:
    """An endless source that gives batch k only after `let(k)`, and says what it has given."""

    def __init__(self, free: int = 0) -> None:
        self.given: list[int] = []
        self._free = threading.Semaphore(free)
        self._given = threading.Semaphore(0)

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self._free.acquire()
            self.given.append(number)
            self._given.release()
            yield number

    def let(self, count: int = 1) -> None:
        self._free.release(count)

    def wait_given(self, count: int) -> None:
        while len(self.given) < count:
            assert self._given.acquire(timeout=PATIENCE_S)


class Stream(IterableDataset):
    def __init__(self, count: int, broken: int = -1) -> None:
        self.count, self.broken = count, broken

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.broken:
                raise CodedError(number)
            yield number
