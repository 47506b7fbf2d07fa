"""Device families by name, loaded on demand.

An accelerator that torch knows needs no file of its own (`accelerator.py`). To add another: write `foo.py` next to this
file, end it with `backend_class = FooBackend`, add "foo" to `OWN`, and run `pytest tests/contract -k foo`. Another
package adds one by an entry point, and runs the same tests:

    [project.entry-points."unisono.devices"]
    foo = "package.module:FooBackend"
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import torch

from unisono.arguments import check_type
from unisono.devices.accelerator import AcceleratorBackend, current_accelerator
from unisono.protocols import Backend

OWN = ("tpu", "cuda", "mps", "xla", "cpu")
"""The families with a file here, in the order in which `pick_backend` tries them: the CPU is the last."""

FOREIGN: dict[str, EntryPoint] = {
    each.name: each for each in entry_points(group="unisono.devices") if each.name not in OWN
}
"""The families of other installed packages, by name. Each is imported on demand."""

CHOICE = "UNISONO_BACKEND"
"""The environment variable that names the family to pick if a program names none."""

CPU = "cpu"
"""The family that every machine has."""


def family_names() -> tuple[str, ...]:
    """Every family, in the order in which `pick_backend` tries them; among them torch's accelerator, perhaps that of an
    extension of torch."""
    return tuple(dict.fromkeys([*sorted(FOREIGN), *filter(None, [current_accelerator()]), *OWN]))


def get_backend(name: str) -> Backend:
    """The family of that name, whether or not it has devices here. ValueError if there is none; ImportError if it comes
    from another package and cannot be loaded."""
    if name not in (names := family_names()):
        raise ValueError(f"backend {name!r} does not exist; choose one of {', '.join(sorted(names))}")
    return _load(name)


@cache
def _load(name: str) -> Backend:
    if name in OWN:
        backend: Backend = import_module(f"unisono.devices.{name}").backend_class()
        return backend
    if name not in FOREIGN:
        return AcceleratorBackend(name)
    entry = FOREIGN[name]
    try:
        foreign = entry.load()()  # this also registers its device type with torch
        if not isinstance(foreign, Backend) or foreign.name != name:
            raise TypeError(f"{entry.value} is no unisono.protocols.Backend of the name {name!r}")
        return foreign
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else entry.module
        raise ImportError(
            f"backend {name!r} of the package {package} cannot be loaded, {type(error).__name__}: {error}; "
            "repair or uninstall that package"
        ) from error


def pick_backend(name: str | None = None) -> Backend:
    """The family of that name, else that of `UNISONO_BACKEND`, else the first accelerator of `family_names()`, else the
    CPU. ValueError: it does not exist or has no device here; the message lists the devices that exist."""
    name = name or os.environ.get(CHOICE) or None
    if name is None:
        here = (each for each in map(get_backend, family_names()) if each.is_available() and each.is_accelerated())
        return next(here, None) or get_backend(CPU)
    backend = get_backend(name)
    if not backend.is_available():
        reason = backend.unavailable_reason()
        raise ValueError(
            f"backend {name!r} has no device on this machine{f': {reason}' if reason else ''}; it has "
            f"{', '.join(available_devices())}"
        )
    return backend


def backend_of_group(config: str) -> Backend:
    """The first available family whose tensors a process group reduces, as `dist.get_backend_config()` describes it. A
    pure gloo group means the CPU, unless `UNISONO_BACKEND` names another family."""
    if os.environ.get(CHOICE):
        return pick_backend()
    pairs = config.split(",")
    here = [backend for backend in map(get_backend, family_names()) if backend.is_available()]
    fitting = (each for each in here if f"{each.name}:{each.process_group_backend}" in pairs)
    return next(fitting, None) or pick_backend()


def available_devices() -> list[str]:
    """Every device that exists here, as strings such as "cuda:0", in the order of `family_names()`."""
    families = map(get_backend, family_names())
    return [f"{each.name}:{index}" for each in families for index in range(each.device_count())]


def resolve_device(device: str | int | torch.device) -> tuple[Backend, torch.device]:
    """The family and the normalised device that a user means by "cuda:1", "cpu", 1 or a `torch.device`.

    A bare integer is an index of the picked family; a family's name without an index is its device 0. TypeError: it is
    neither a string, an integer nor a device; ValueError: it does not exist here, and the message lists those that do.
    """
    device = getattr(device, "torch_device", device)  # of a `Device`
    check_type(device, "device", "pass a string, an index or a torch.device", str, int, torch.device)
    if isinstance(device, int):
        backend = pick_backend()
        return backend, backend.device(device)
    if isinstance(device, str) and (kind := device.partition(":")[0]) in FOREIGN:
        # Loading the family registers its name with torch, which `torch.device` needs below.
        get_backend(kind)
    wanted = None
    with suppress(RuntimeError):
        wanted = torch.device(device)
    if wanted is None or wanted.type not in family_names():
        raise ValueError(f"device {str(device)!r} does not exist; there are {', '.join(available_devices())}")
    backend = pick_backend(wanted.type)
    try:
        return backend, backend.device(wanted.index or 0)
    except ValueError as error:
        raise ValueError(f"{error}; there are {', '.join(available_devices())}") from None


def resolve_devices(devices: Sequence[str | int | torch.device]) -> list[tuple[Backend, torch.device]]:
    """The families and normalised devices of a list. TypeError if it is not a list; ValueError if it is empty, repeats
    a device, or names one that does not exist."""
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise TypeError(f"devices={devices!r} is of type {type(devices).__name__}; pass a list of devices")
    if not devices:
        raise ValueError("devices=[] is empty; pass at least one device")
    resolved = [resolve_device(device) for device in devices]
    names = [str(device) for _, device in resolved]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"devices={names} repeats {', '.join(repeated)}; name each device once")
    return resolved
