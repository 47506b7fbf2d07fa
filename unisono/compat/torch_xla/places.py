"""Which replica is calling, and which devices it sees: the basis of PyTorch/XLA's names in this framework.

A *replication* is a world created by `spawn`, a `DataParallel` or a launcher. Outside of one a script runs alone, on
the device that it has chosen last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import Context
from types import NoneType

import torch

from unisono.arguments import check_type
from unisono.backends import NAMES, available_devices, get_backend, resolve_device
from unisono.protocols import Backend
from unisono.world import World, current_world, process_world

_SYNONYMS = {"GPU": "CUDA"}
_KINDS = ("TPU", "GPU", "CUDA", "MPS", "XLA", "CPU")


class _Place:
    """The device that a world's thread has asked for last, if that is not the world's own."""

    chosen: tuple[Backend, torch.device] | None = None


def replication() -> World | None:
    """The calling replica's world; None outside a replication."""
    world = current_world()
    is_own = world.world_size > 1 or world.is_of_processes or world is process_world()
    return world if is_own or world is not Context().run(current_world) else None


def here() -> tuple[Backend, torch.device]:
    """The device that the caller works on."""
    world = current_world()
    return world.state.part(_Place).chosen or (world.backend, world.device)


def choose(backend: Backend, device: torch.device) -> torch.device:
    """Make it the device that the caller works on."""
    backend.activate(device)
    current_world().state.part(_Place).chosen = backend, device
    return device


def is_worker() -> bool:
    """Whether the caller is a replica in a separate process, which only sees its own device."""
    world = replication()
    return world is not None and world.is_of_processes


def devices_of(devkind: str | Sequence[str] | None) -> list[torch.device]:
    """The devices visible to the caller: all devices of the first of the given kinds that has any.

    Args:
        devkind: "TPU", "GPU", "CUDA", "MPS", "XLA" or "CPU", or a list of these; None is the kind in use.

    Raises:
        TypeError, ValueError: it is not such a kind.
    """
    world = current_world()
    families: Iterator[Backend] = iter([world.backend] if devkind is None else _families(devkind, world.backend))
    for family in families:
        if is_worker():
            if family is world.backend:
                return [world.device]
        elif family.is_available() and family.device_count():
            return [family.device(index) for index in range(family.device_count())]
    return []


def _families(devkind: str | Sequence[str], first: Backend) -> Iterator[Backend]:
    """Yield the families of these kinds, the one in use before others of the same kind; each is loaded only when
    reached."""
    for kind in _checked_kinds(devkind):
        for name in dict.fromkeys([first.name, *NAMES]):
            family = get_backend(name)
            if _SYNONYMS.get(kind, kind) in (family.hardware(), family.name.upper()):
                yield family


def _checked_kinds(devkind: str | Sequence[str]) -> list[str]:
    kinds = [devkind] if isinstance(devkind, str) else devkind
    if not isinstance(kinds, Sequence) or not all(isinstance(kind, str) for kind in kinds):
        raise TypeError(
            f"devkind={devkind!r} is of type {type(devkind).__name__}; pass a string, a list of strings or None"
        )
    for kind in kinds:
        if kind.upper() not in _KINDS:
            raise ValueError(f"devkind={kind!r} is not a kind of device; choose one of {', '.join(_KINDS)}")
    return [kind.upper() for kind in kinds]


def device_of(n: int | None, devkind: str | Sequence[str] | None) -> tuple[Backend, torch.device]:
    """The device that `xla_device(n, devkind)` means for the caller.

    Raises:
        TypeError: `n` is not an integer.
        ValueError: there is no such device; the message lists those that exist.
    """
    check_type(n, "n", "pass an integer, or None for the rank's own device", int, NoneType)
    seen = devices_of(devkind)
    world = current_world()
    if not seen:
        there = [str(world.device)] if is_worker() else available_devices()
        raise ValueError(f"there is no device of kind {devkind!r} here; there are {', '.join(there)}")
    is_own = seen[0].type == world.device.type
    if n is None:
        return resolve_device(world.device if is_own and replication() else seen[0])
    if is_worker():
        if n not in (0, world.device.index):
            raise ValueError(
                f"n={n}, but rank {world.rank} sees only its own device, {world.device}; call xla_device() without n"
            )
        return resolve_device(world.device)
    family = resolve_device(seen[0])[0]
    return family, family.device(n)
