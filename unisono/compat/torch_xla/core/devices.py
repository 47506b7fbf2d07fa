"""Which replica is calling, and which devices it sees; and their random generators.

A *replication* is a world created by `spawn`, a `DataParallel` or a launcher. Outside of one a script runs alone, on
the device that it has chosen last. What is no device, kind, seed or number is a TypeError or a ValueError.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextvars import Context
from types import NoneType
from typing import Any, TextIO, TypeVar

import torch

from unisono import World, available_devices, current_world
from unisono.building_blocks import (
    check_choice,
    check_integer,
    check_type,
    family_names,
    get_backend,
    resolve_device,
    seed_device,
    seed_of_device,
)
from unisono.protocols import Backend

D = TypeVar("D")

DeviceName = str | torch.device
Kind = str | Sequence[str] | None
"""A kind of devices, "TPU", "GPU", "CUDA", "MPS", "XLA" or "CPU"; of a list, the first that has any. None is the kind
in use: accelerators before the CPU, or what UNISONO_BACKEND says."""

_KINDS = ("TPU", "GPU", "CUDA", "MPS", "XLA", "CPU")


class _Chosen:
    """The device that a world's thread has asked for last, if that is not the world's own."""

    place: tuple[Backend, torch.device] | None = None


# The calling replica.


def replication() -> World | None:
    """The calling replica's world; None outside a replication."""
    world = current_world()
    is_own = world.world_size > 1 or world.is_of_processes
    return world if is_own or world is not Context().run(current_world) else None


def xrt_world_size(defval: D | int = 1) -> D | int:
    """The number of replicas, processes or threads; `defval` outside any replication."""
    world = replication()
    return defval if world is None else world.world_size


def get_ordinal(defval: D | int = 0) -> D | int:
    """The replica's number among all; `defval` outside any replication."""
    world = replication()
    return defval if world is None else world.rank


def get_local_ordinal(defval: D | int = 0) -> D | int:
    """The replica's number on this machine; `defval` outside any replication."""
    world = replication()
    return defval if world is None else world.local_rank


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is replica 0, of this machine or (`local=False`) of all. Outside a replication, a script is the
    master."""
    return (get_local_ordinal() if local else get_ordinal()) == 0


def master_print(*args: Any, fd: TextIO | None = None, local: bool = True, flush: bool = False) -> None:
    """`print` on the master only, as of `is_master_ordinal(local)`, to `fd` or the current `sys.stdout`."""
    if is_master_ordinal(local):
        print(*args, file=fd or sys.stdout, flush=flush)


# Its devices.


def here(device: DeviceName | None = None) -> tuple[Backend, torch.device]:
    """That device and its family; None is the device that the caller works on."""
    if device is not None:
        return resolve_device(device)
    world = current_world()
    return world.state.part(_Chosen).place or (world.backend, world.device)


def devices_of(devkind: Kind) -> list[torch.device]:
    """The devices of a kind that are visible to the caller: its own, if the caller is a worker."""
    world = current_world()
    for family in [world.backend] if devkind is None else _families_of_kinds(devkind, world.backend):
        if world.is_of_processes:  # a worker, which only sees its own device
            if family is world.backend:
                return [world.device]
        elif family.is_available() and family.device_count():
            return [family.device(index) for index in range(family.device_count())]
    return []


def _families_of_kinds(devkind: str | Sequence[str], first: Backend) -> Iterator[Backend]:
    """Yield the families of these kinds, the one in use before others of the same kind; each is loaded only when
    reached."""
    check_type(devkind, "devkind", "pass a string, a list of strings or None", str, list, tuple)
    for each in [devkind] if isinstance(devkind, str) else devkind:
        kind = str(each).upper()
        check_choice(kind, "devkind", *_KINDS)
        for name in dict.fromkeys([first.name, *family_names()]):
            family = get_backend(name)
            if kind in (_hardware_name(family), family.hardware(), family.name.upper()):
                yield family


def xla_device(n: int | None = None, devkind: Kind = None) -> torch.device:
    """The replica's own device; outside a replication, the first of the kind; or the n-th. The caller works on it from
    now on."""
    check_type(n, "n", "pass an integer, or None for the rank's own device", int, NoneType)
    seen, world = devices_of(devkind), current_world()
    if not seen:
        raise ValueError(f"there is no device of kind {devkind!r} here; there are {', '.join(available_devices())}")
    if world.is_of_processes and n not in (None, 0, world.device.index):
        raise ValueError(f"n={n}, but rank {world.rank} sees only its own device, {world.device}; leave n out")
    backend, device = resolve_device(seen[0])
    if replication() and (n is None or world.is_of_processes):
        device = world.device if device.type == world.device.type else device
    elif n is not None:
        device = backend.device(n)
    backend.activate(device)
    world.state.part(_Chosen).place = backend, device
    return device


def get_xla_supported_devices(devkind: Kind = None, max_devices: int | None = None) -> list[str]:
    """The devices of a kind that are visible to the caller, as strings, at most `max_devices` of them unless that is
    None or 0; listing them starts nothing."""
    most = check_integer(max_devices or 0, "max_devices", 0) or None
    return [str(device) for device in devices_of(devkind)][:most]


def xla_device_hw(device: DeviceName) -> str:
    """The hardware of a device: "CPU", "GPU", "MPS" or "TPU"."""
    return _hardware_name(here(device)[0])


def xla_real_devices(devices: Sequence[DeviceName] | None = None) -> list[str]:
    """The devices by their hardware: "CPU:0" for "xla:0" on a CPU. None uses those visible to the caller."""
    resolved = [resolve_device(each) for each in (devices_of(None) if devices is None else devices)]
    return [f"{_hardware_name(backend)}:{device.index or 0}" for backend, device in resolved]


xla_replication_devices = xla_real_devices


def _hardware_name(backend: Backend) -> str:
    return {"CUDA": "GPU"}.get(backend.hardware(), backend.hardware())


def wait_device_ops(devices: Sequence[DeviceName] = ()) -> None:
    """Block until all work submitted to the devices has finished; by default to the replica's own, or all a script
    sees."""
    for device in devices or ([here()[1]] if replication() else devices_of(None)):
        backend, resolved = resolve_device(device)
        backend.synchronize(resolved)


def set_rng_state(seed: int, device: DeviceName | None = None) -> None:
    """Seed the random generator of a device, by default of the caller's; the seed is a non-negative integer."""
    check_integer(seed, "seed", 0)
    seed_device(*here(device), seed)


def get_rng_state(device: DeviceName | None = None) -> int:
    """A seed from which the device's random generator continues: `set_rng_state` with it repeats what comes next.

    If anything was drawn since the generator was seeded, it is reseeded for that, with a seed derived from its state.
    """
    return seed_of_device(*here(device))
