"""The process's random generators (python's, numpy's, torch's on the CPU), and numbers to seed them with.

*Threads:* all threads of the process share the generators, so only a thread that may disturb all others seeds them.
`seeded` admits one thread at a time, and restores their states.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch

from unisono.errors import BusyError

_MASK = (1 << 64) - 1
_seeding = threading.RLock()
_SEEDING_S = 30.0


@lru_cache(maxsize=64)
def seed_of(*place: int | str) -> int:
    """A 63-bit seed for a place, for example (seed, epoch). Hashed, so that the seeds of neighbors are unrelated."""
    # A text is hashed by SHA-512, alike in every process; `hash` of a text is not.
    return random.Random("/".join(map(str, place))).getrandbits(63)


def mixed(seed: int, place: int) -> int:
    """A seed from a seed and one more number, fast: finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


def seed_all(seed: int) -> None:
    """Seed the three generators; numpy's only if numpy is imported. Touches no accelerator."""
    torch.default_generator.manual_seed(seed)
    seed_python(seed)


def seed_python(seed: int) -> None:
    """Seed Python's generator, and numpy's if numpy is imported."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # numpy's seed has 32 bits.
        numpy.random.seed(seed & 0xFFFFFFFF)


def numpy_state(source: Any) -> list[Any]:
    """The state of a generator of NumPy's, or of `numpy.random`, as plain data."""
    kind, keys, *place = source.get_state()
    return [kind, torch.from_numpy(keys.astype("int64")), *map(float, place)]


def set_numpy_state(source: Any, state: list[Any]) -> None:
    """Continue from what `numpy_state` has returned."""
    kind, keys, place, has_gauss, cached = state
    source.set_state((kind, keys.numpy().astype("uint32"), int(place), int(has_gauss), cached))


def all_states() -> tuple[object, ...]:
    """A part of the three generators' states that any draw changes; slow."""
    _, words, cached = random.getstate()
    numpy = sys.modules.get("numpy")
    place = () if numpy is None else numpy.random.get_state()
    return (_was_asked, words[0], words[-1], cached, *_torch_place(), *place[2:])


_was_asked = False


@contextmanager
def noticing_who_asks() -> Iterator[None]:
    """The same in the block."""
    ask = torch.random.initial_seed
    notice_who_asks()
    try:
        yield
    finally:
        torch.initial_seed = torch.random.initial_seed = ask


def notice_who_asks() -> None:
    """In a loader worker, let a `Watch` count each call of `torch.initial_seed()` as a draw from now on."""
    ask = torch.random.initial_seed

    def initial_seed() -> int:
        global _was_asked
        _was_asked = True
        return ask()

    torch.initial_seed = torch.random.initial_seed = initial_seed


class Watch:
    """Detects whether anything is drawn from the three generators from now on, at the cost of seeding them once.

    Python's and numpy's generators get the same seed each time, so the next number shows whether it is the first;
    torch's gets `seed`, since `torch.initial_seed()` returns it.
    """

    def __init__(self, seed: int) -> None:
        global _was_asked
        _was_asked = False
        seed_all(0)
        torch.default_generator.manual_seed(seed)
        self._numpy = sys.modules.get("numpy")
        self._torch = _torch_place()

    def is_drawn_from(self) -> bool:
        """Whether something was drawn. Call it once only, since the check itself draws."""
        if _was_asked or _torch_place() != self._torch or random.getrandbits(32) != _FIRST:
            return True
        return self._numpy is not None and self._numpy.random.random_sample() != _first_of_numpy()


_FIRST = random.Random(0).getrandbits(32)


@cache
def _first_of_numpy() -> float:
    return float(sys.modules["numpy"].random.RandomState(0).random_sample())


def _torch_place() -> list[int]:
    """The position of torch's generator in its cycle: two numbers of its state, changed by every draw."""
    # After 8 bytes of the initial seed: `left`, `seeded` and `next` of the Mersenne Twister.
    place: list[int] = torch.default_generator.get_state()[8:24].tolist()
    return place


def is_seeding() -> bool:
    """Whether the calling thread is in a `seeded` block."""
    return _seeding._is_owned()  # type: ignore[attr-defined, no-any-return] # typeshed omits it


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the three generators for the block, then restore their states; BusyError if another thread has been in such
    a block for `_SEEDING_S`."""
    with drawing(seed, restores=True):
        yield


@contextmanager
def drawing(seed: int, restores: bool = False) -> Iterator[None]:
    """The same where the next user seeds them: numpy takes a third of a millisecond for its state."""
    # Looked up once: if the block imports numpy, there is no state of it to restore.
    numpy = sys.modules.get("numpy")
    if not _seeding.acquire(timeout=_SEEDING_S):
        raise BusyError(
            "another thread has been drawing an order from the process's random generators for half a minute: samplers "
            "must not wait for other ranks in __iter__, since they draw one after the other"
        )
    try:
        if not restores:
            seed_all(seed)
            yield
            return
        before = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy is not None:
                numpy.random.set_state(before[2])
    finally:
        _seeding.release()
