"""`torch_xla.runtime`, the `xr` of current scripts: the numbers of replicas and devices, and which replica this is."""

from __future__ import annotations

from unisono import current_world
from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core.devices import devices_of, get_local_ordinal, get_ordinal, here, xrt_world_size

__getattr__ = left_out(__name__)

world_size = xrt_world_size
global_ordinal = get_ordinal
local_ordinal = get_local_ordinal


def device_type() -> str:
    """The hardware of the device: "CPU", "CUDA", "MPS" or "TPU"."""
    return here()[0].hardware()


def addressable_device_count() -> int:
    """The number of devices visible to this process."""
    return len(devices_of(None))


def local_device_count() -> int:
    """The number of devices in use on this machine."""
    return local_process_count() * addressable_device_count()


def global_device_count() -> int:
    """The number of devices in use."""
    return process_count() * addressable_device_count()


global_runtime_device_count = global_device_count
addressable_runtime_device_count = addressable_device_count


def process_index() -> int:
    """The number of this process among all."""
    world = current_world()
    return world.rank if world.is_of_processes else 0


def process_count() -> int:
    """The number of processes."""
    world = current_world()
    return world.world_size if world.is_of_processes else 1


def local_process_count() -> int:
    """The number of processes on this machine."""
    world = current_world()
    return world.local_world_size if world.is_of_processes else 1


def host_index() -> int:
    """The number of this machine."""
    return current_world().node_rank


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Has no effect: compiled graphs are cached per process."""


def is_spmd() -> bool:
    """Always False: see `use_spmd`."""
    return False
