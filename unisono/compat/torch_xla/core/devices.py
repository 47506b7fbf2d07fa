"""Devices by the names of PyTorch/XLA, their random generators, and data that is sent to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.backends import resolve_device
from unisono.backends.seeding import seed_device, seed_of_device
from unisono.compat.torch_xla.places import choose, device_of, devices_of, here, replication
from unisono.compat.torch_xla.utils.utils import for_each_instance_rewrite
from unisono.loaders.parallel_loader import check_size
from unisono.protocols import Backend


def xla_device(n: int | None = None, devkind: str | Sequence[str] | None = None) -> torch.device:
    """The replica's own device; for a script that is alone, the first of the kind. The caller works on it from now on.

    Args:
        n: which one of the kind, where it is not that.
        devkind: as for `get_xla_supported_devices`.

    Raises:
        TypeError: `n` or `devkind` is of another type.
        ValueError: there is no such device.
    """
    return choose(*device_of(n, devkind))


def get_xla_supported_devices(devkind: str | Sequence[str] | None = None, max_devices: int | None = None) -> list[str]:
    """The devices that the caller sees, as strings, all of one kind; asking for them starts nothing.

    Args:
        devkind: "TPU", "GPU", "MPS" or "CPU"; a list takes the first of them that has a device. None is the kind in
            use: accelerators before the CPU, or what UNISONO_BACKEND says.
        max_devices: how many at most; None and 0 set no limit.

    Raises:
        TypeError, ValueError: an argument is of another type, or out of its range.
    """
    if max_devices is not None:
        check_size(max_devices, "max_devices", 0)
    found = [str(device) for device in devices_of(devkind)]
    return found[:max_devices] if max_devices else found


def xla_device_hw(device: str | torch.device) -> str:
    """What a device is made of: "CPU", "GPU", "MPS" or "TPU".

    Raises:
        TypeError, ValueError: it is no device.
    """
    return _hardware(resolve_device(device)[0])


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a device of the kind that the caller works on."""
    return tensor.device.type == here()[1].type


def xla_real_devices(devices: Sequence[str | torch.device] | None = None) -> list[str]:
    """The devices by their hardware: "CPU:0" for "xla:0" on a CPU. None takes those that the caller sees."""
    resolved = [resolve_device(each) for each in (devices_of(None) if devices is None else devices)]
    return [f"{_hardware(backend)}:{device.index or 0}" for backend, device in resolved]


def xla_replication_devices(local_devices: Sequence[str | torch.device]) -> list[str]:
    """The same, of devices that are to be a replication; any set of one kind can be.

    Raises:
        RuntimeError: they are of several kinds.
    """
    real = xla_real_devices(local_devices)
    kinds = sorted({name.partition(":")[0] for name in real})
    if len(kinds) > 1:
        raise RuntimeError(f"Cannot replicate across different device types: {real} are {', '.join(kinds)}; name one")
    return real


def wait_device_ops(devices: Sequence[str | torch.device] = ()) -> None:
    """Block until all work submitted to the devices has ended; none named: to one's own, or all that a script sees."""
    if not devices:
        devices = [here()[1]] if replication() else devices_of(None)
    for backend, device in map(resolve_device, devices):
        backend.synchronize(device)


def set_rng_state(seed: int, device: str | torch.device | None = None) -> None:
    """Seed the device's random generator; None is the caller's device.

    Raises:
        TypeError, ValueError: the seed is no whole number, or negative.
    """
    check_size(seed, "seed", 0)
    seed_device(*_place(device), seed)


def get_rng_state(device: str | torch.device | None = None) -> int:
    """A seed from which the device's random generator continues: `set_rng_state` with it repeats what comes now.

    Where something was drawn since the generator was seeded, it is reseeded for that, by where it stands.
    """
    return seed_of_device(*_place(device))


def send_cpu_data_to_device(data: Any, device: str | torch.device) -> Any:
    """The data with its tensors on the device, in containers of the same types; the data itself is not touched.

    Tensors are looked for in attributes of objects, too; a `DataWrapper` names its own.
    """
    backend, target = resolve_device(device)
    moved, token = backend.to_device(data, target)
    if token is not None:
        backend.wait_ready(token)
    return send_attributes(moved, backend, target)


def send_attributes(moved: Any, backend: Backend, device: torch.device) -> Any:
    """The rest of what moves with a batch: tensors in main memory that are attributes of objects."""
    if not backend.moves_in_background:
        return moved
    return for_each_instance_rewrite(moved, _is_in_main_memory, lambda tensor: tensor.to(device))


def _is_in_main_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cpu


def _hardware(backend: Backend) -> str:
    hardware = backend.hardware()
    return "GPU" if hardware == "CUDA" else hardware


def _place(device: str | torch.device | None) -> tuple[Backend, torch.device]:
    return here() if device is None else resolve_device(device)
