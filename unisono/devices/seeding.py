"""Seeds one device's random generator, and obtains a seed that it continues from, in any family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from hashlib import blake2b
from typing import Any

import torch

from unisono.devices.accelerator import current_accelerator
from unisono.protocols import Backend
from unisono.torch_private import INITIALIZATION_LOCK


def seed_device(backend: Backend, device: torch.device, seed: int) -> None:
    """Seed only that device's random generator; on the CPU, the thread's, if it has its own."""
    backend.set_rng_state(_seed_state(backend, device, seed), device)


def seed_beside(backend: Backend, device: torch.device, seed: int) -> None:
    """Seed the device's generator where it has one besides the CPU's."""
    if backend.seeded_state(0, device) is not None:
        seed_device(backend, device, seed)


def seed_of_device(backend: Backend, device: torch.device) -> int:
    """A seed that the generator continues from: its own, if nothing was drawn since; otherwise it is reseeded, with one
    derived from its state."""
    state = backend.rng_state(device)
    seed = _seed_in(state, device)
    if torch.equal(_seed_state(backend, device, seed), state):
        return seed
    seed = int.from_bytes(blake2b(state.numpy().tobytes(), digest_size=8).digest()) >> 1
    seed_device(backend, device, seed)
    return seed


def ask_before_seeding_all(is_taken: Callable[[str, int], bool]) -> None:
    """Call `is_taken(family, seed)` from now on before all devices of a family are seeded at once, as by
    `torch.manual_seed`, in the thread that does so. If it returns True, it has done the seeding itself."""
    for family, module in _seeded_modules():
        for name in ("manual_seed_all", "manual_seed"):  # mps has one device, and the second only
            if hasattr(module, name):
                _wrap(module, name, partial(is_taken, family))
                break


def _wrap(module: Any, name: str, is_taken: Callable[[int], bool]) -> None:
    seed_all = getattr(module, name)
    setattr(module, name, wraps(seed_all)(lambda seed: is_taken(seed) or seed_all(seed)))


def _seed_state(backend: Backend, device: torch.device, seed: int) -> torch.Tensor:
    state = backend.seeded_state(seed, device)
    return torch.Generator().manual_seed(seed).get_state() if state is None else state


def _seed_in(state: torch.Tensor, device: torch.device) -> int:
    with suppress(RuntimeError):  # in a family whose generators cannot be created, the state is the seed
        generator = torch.Generator(device)
        generator.set_state(state)
        return generator.initial_seed()
    return int.from_bytes(state.numpy().tobytes()[:8], "little")


def seeding_locks() -> Iterator[Any]:
    """The locks that `torch.manual_seed` acquires: it also seeds accelerators, immediately or when they start."""
    for _, module in _seeded_modules():
        lock = getattr(module, INITIALIZATION_LOCK, None)
        if lock is not None:
            yield lock


def _seeded_modules() -> list[tuple[str, Any]]:
    """torch's modules of the device types that `torch.manual_seed` seeds, by type: it asks these even without a device,
    and the accelerator's."""
    families = dict.fromkeys(filter(None, ["cuda", "xpu", "mps", current_accelerator()]))
    return [(family, torch.get_device_module(family)) for family in families if hasattr(torch, family)]
