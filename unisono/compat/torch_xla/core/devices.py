"""Devices under the names of PyTorch/XLA, their random generators, and moving data to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.arguments import check_integer
from unisono.backends import resolve_device
from unisono.backends.seeding import seed_device, seed_of_device
from unisono.compat.torch_xla.places import choose, device_of, devices_of, here, replication
from unisono.compat.torch_xla.utils.utils import for_each_instance_rewrite
from unisono.protocols import Backend


def xla_device(n: int | None = None, devkind: str | Sequence[str] | None = None) -> torch.device:
    """The replica's own device; outside a replication, the first of the kind. The caller works on it from now on.

    Args:
        n: the index of another device of the kind.
        devkind: as for `get_xla_supported_devices`.

    Raises:
        TypeError: `n` or `devkind` is of another type.
        ValueError: there is no such device.
    """
    return choose(*device_of(n, devkind))


def get_xla_supported_devices(devkind: str | Sequence[str] | None = None, max_devices: int | None = None) -> list[str]:
    """The devices visible to the caller, as strings, all of one kind; listing them starts nothing.

    Args:
        devkind: "TPU", "GPU", "MPS" or "CPU"; of a list, the first kind that has a device. None is the kind in use:
            accelerators before the CPU, or what UNISONO_BACKEND says.
        max_devices: the largest number to return; None and 0 set no limit.

    Raises:
        TypeError, ValueError: an argument is of another type, or out of range.
    """
    if max_devices is not None:
        check_integer(max_devices, "max_devices", 0)
    found = [str(device) for device in devices_of(devkind)]
    return found[:max_devices] if max_devices else found


def xla_device_hw(device: str | torch.device) -> str:
    """The hardware of a device: "CPU", "GPU", "MPS" or "TPU".

    Raises:
        TypeError, ValueError: it is not a device.
    """
    return _hardware(resolve_device(device)[0])


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a device of the kind that the caller works on."""
    return tensor.device.type == here()[1].type


def xla_real_devices(devices: Sequence[str | torch.device] | None = None) -> list[str]:
    """The devices by their hardware: "CPU:0" for "xla:0" on a CPU. None uses those visible to the caller."""
    resolved = [resolve_device(each) for each in (devices_of(None) if devices is None else devices)]
    return [f"{_hardware(backend)}:{device.index or 0}" for backend, device in resolved]


def xla_replication_devices(local_devices: Sequence[str | torch.device]) -> list[str]:
    """Like `xla_real_devices`, for devices that are to form a replication; any set of one kind can.

    Raises:
        RuntimeError: they are of several kinds.
    """
    real = xla_real_devices(local_devices)
    kinds = sorted({name.partition(":")[0] for name in real})
    if len(kinds) > 1:
        raise RuntimeError(f"Cannot replicate across different device types: {real} are {', '.join(kinds)}; name one")
    return real


def wait_device_ops(devices: Sequence[str | torch.device] = ()) -> None:
    """Block until all work submitted to the devices has finished; by default to the replica's own, or all a script
    sees."""
    if not devices:
        devices = [here()[1]] if replication() else devices_of(None)
    for backend, device in map(resolve_device, devices):
        backend.synchronize(device)


def set_rng_state(seed: int, device: str | torch.device | None = None) -> None:
    """Seed the device's random generator; None is the caller's device.

    Raises:
        TypeError, ValueError: the seed is not an integer, or negative.
    """
    check_integer(seed, "seed", 0)
    seed_device(*_place(device), seed)


def get_rng_state(device: str | torch.device | None = None) -> int:
    """A seed from which the device's random generator continues: `set_rng_state` with it repeats what comes next.

    If anything was drawn since the generator was seeded, it is reseeded for that, with a seed derived from its state.
    """
    return seed_of_device(*_place(device))


def send_cpu_data_to_device(data: Any, device: str | torch.device) -> Any:
    """The data with its tensors on the device, in containers of the same types; the data itself is not modified.

    Tensors in attributes of objects are moved, too; a `DataWrapper` names its own.
    """
    backend, target = resolve_device(device)
    moved, token = backend.to_device(data, target)
    if token is not None:
        backend.wait_ready(token)
    return send_attributes(moved, backend, target)


def send_attributes(moved: Any, backend: Backend, device: torch.device) -> Any:
    """Move the remaining parts of a batch: tensors in main memory that are attributes of objects."""
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
