"""Seeding one device's random generator, and asking it for a seed from which it goes on, in any family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import torch

from unisono.protocols import Backend


def seed_device(backend: Backend, device: torch.device, seed: int) -> None:
    """Seed the device's random generator, and no other one; on the CPU that is the thread's, where it has its own."""
    backend.set_rng_state(_seeded(backend, device, seed), device)


def seed_of_device(backend: Backend, device: torch.device) -> int:
    """A seed from which the generator goes on as it stands now: the one it has, where nothing was drawn since.

    Otherwise it is seeded anew, by where it stands.
    """
    state = backend.rng_state(device)
    seed = _seed_in(state, device)
    if torch.equal(_seeded(backend, device, seed), state):
        return seed
    seed = int.from_bytes(blake2b(state.numpy().tobytes(), digest_size=8).digest()) >> 1
    seed_device(backend, device, seed)
    return seed


def _seeded(backend: Backend, device: torch.device, seed: int) -> torch.Tensor:
    state = backend.seeded_state(seed, device)
    return torch.Generator().manual_seed(seed).get_state() if state is None else state


def _seed_in(state: torch.Tensor, device: torch.device) -> int:
    with suppress(RuntimeError):  # a family without generators that one can make has its seed for a state
        generator = torch.Generator(device)
        generator.set_state(state)
        return generator.initial_seed()
    return int.from_bytes(state.numpy().tobytes()[:8], "little")


def seeding_locks() -> Iterator[Any]:
    """The locks that `torch.manual_seed` takes: it seeds accelerators too, at once or when they start."""
    for family in (torch.cuda, getattr(torch, "xpu", None)):
        lock = getattr(family, "_initialization_lock", None)
        if lock is not None:
            yield lock
