"""`torch_xla.runtime`, the `xr` of current scripts: the numbers of replicas and devices, and which replica this is."""

from __future__ import annotations

from typing import Any

from unisono.compat.absent import refuse
from unisono.compat.torch_xla.core.ordinals import get_local_ordinal, get_ordinal, xrt_world_size
from unisono.compat.torch_xla.places import devices_of, here
from unisono.world import current_world

_NO_SPMD = "one replica of your script runs per device, by launch(), spawn() or DataParallel; none runs for all devices"

_INSTEAD = {
    "use_spmd": _NO_SPMD,
    "set_device_type": "set UNISONO_BACKEND=cpu, cuda, mps or xla before the program starts",
    "get_master_ip": "launchers tell the workers each other's addresses",
}


def __getattr__(name: str) -> Any:
    refuse(__name__, name, _INSTEAD)


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
    return _num_processes(current_world().local_world_size) * addressable_device_count()


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
    return _num_processes(current_world().world_size)


def local_process_count() -> int:
    """The number of processes on this machine."""
    return _num_processes(current_world().local_world_size)


def host_index() -> int:
    """The number of this machine."""
    return current_world().node_rank


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Has no effect: compiled graphs are cached per process."""


def get_num_cached_compilation_graph() -> int:
    """The number of graphs that this process has compiled."""
    return here()[0].counters().get("graphs compiled", 0)


def is_spmd() -> bool:
    """Always False: see `use_spmd`."""
    return False


def _num_processes(ranks: int) -> int:
    return ranks if current_world().is_of_processes else 1
