"""The process's random generators (python's, numpy's, torch's on the CPU), and numbers to seed them with.

*Threads:* the generators belong to the process, so only a thread that may disturb all others seeds them.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def seed_of(*place: int | str) -> int:
    """A seed of 63 bits for a place, (seed, epoch) say. Hashed, so that neighbouring places have nothing in common."""
    return random.Random("/".join(map(str, place))).getrandbits(63)


def mixed(seed: int, place: int) -> int:
    """The same for one more number, fast: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


def seed_all(seed: int) -> None:
    """Seed the three generators; numpy's where numpy is imported. Touches no accelerator."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def draws_so_far() -> tuple[object, ...]:
    """A mark of where the three generators stand: any draw changes it."""
    _, words, cached = random.getstate()
    mark: tuple[object, ...] = (words[0], words[-1], cached, zlib.crc32(torch.get_rng_state().numpy().data))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        mark += (int(keys[0]), *rest)
    return mark


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the three generators for the block, and put them back as they were."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None
    seed_all(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])
