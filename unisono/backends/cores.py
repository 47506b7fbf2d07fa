"""The CPU's cores, and how many of them torch uses in the calling thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fair_num_threads(count: int) -> int:
    """CPU threads for each of `count` ranks of this machine, so that together they use each core once.

    Two workers of two threads on two cores take twice as long as two of one thread.
    """
    return max(1, usable_cores() // count)


@contextmanager
def kept_num_threads() -> Iterator[None]:
    """Restore torch's number of threads after the block. Part of it is global: setting it in a thread changes all."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
