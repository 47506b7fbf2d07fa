"""`torch_xla.core.xla_model`, the `xm` of PyTorch/XLA scripts, on any device family.

Each name means the same in a plain script, in a thread of a `DataParallel` and in a worker of `spawn`.
"""

from __future__ import annotations

from typing import Any

from unisono.compat.absent import refuse
from unisono.compat.torch_xla.core.collectives import REDUCE_AND as REDUCE_AND
from unisono.compat.torch_xla.core.collectives import REDUCE_MAX as REDUCE_MAX
from unisono.compat.torch_xla.core.collectives import REDUCE_MIN as REDUCE_MIN
from unisono.compat.torch_xla.core.collectives import REDUCE_MUL as REDUCE_MUL
from unisono.compat.torch_xla.core.collectives import REDUCE_OR as REDUCE_OR
from unisono.compat.torch_xla.core.collectives import REDUCE_SUM as REDUCE_SUM
from unisono.compat.torch_xla.core.collectives import all_gather as all_gather
from unisono.compat.torch_xla.core.collectives import all_gather_bucketized as all_gather_bucketized
from unisono.compat.torch_xla.core.collectives import all_reduce as all_reduce
from unisono.compat.torch_xla.core.collectives import all_reduce_bucketized_gradients as all_reduce_bucketized_gradients
from unisono.compat.torch_xla.core.collectives import broadcast_master_param as broadcast_master_param
from unisono.compat.torch_xla.core.collectives import collective_broadcast as collective_broadcast
from unisono.compat.torch_xla.core.collectives import fetch_gradients as _fetch_gradients  # noqa: F401 - scripts call it
from unisono.compat.torch_xla.core.collectives import optimizer_step as optimizer_step
from unisono.compat.torch_xla.core.collectives import reduce_gradients as reduce_gradients
from unisono.compat.torch_xla.core.collectives import reduce_scatter as reduce_scatter
from unisono.compat.torch_xla.core.collectives import reduce_scatter_bucketized as reduce_scatter_bucketized
from unisono.compat.torch_xla.core.devices import get_rng_state as get_rng_state
from unisono.compat.torch_xla.core.devices import get_xla_supported_devices as get_xla_supported_devices
from unisono.compat.torch_xla.core.devices import is_xla_tensor as is_xla_tensor
from unisono.compat.torch_xla.core.devices import send_cpu_data_to_device as send_cpu_data_to_device
from unisono.compat.torch_xla.core.devices import set_rng_state as set_rng_state
from unisono.compat.torch_xla.core.devices import wait_device_ops as wait_device_ops
from unisono.compat.torch_xla.core.devices import xla_device as xla_device
from unisono.compat.torch_xla.core.devices import xla_device_hw as xla_device_hw
from unisono.compat.torch_xla.core.devices import xla_real_devices as xla_real_devices
from unisono.compat.torch_xla.core.devices import xla_replication_devices as xla_replication_devices
from unisono.compat.torch_xla.core.meeting import do_on_ordinals as do_on_ordinals
from unisono.compat.torch_xla.core.meeting import mesh_reduce as mesh_reduce
from unisono.compat.torch_xla.core.meeting import rendezvous as rendezvous
from unisono.compat.torch_xla.core.meeting import save as save
from unisono.compat.torch_xla.core.ordinals import get_local_ordinal as get_local_ordinal
from unisono.compat.torch_xla.core.ordinals import get_ordinal as get_ordinal
from unisono.compat.torch_xla.core.ordinals import is_master_ordinal as is_master_ordinal
from unisono.compat.torch_xla.core.ordinals import master_print as master_print
from unisono.compat.torch_xla.core.ordinals import xrt_world_size as xrt_world_size
from unisono.compat.torch_xla.core.rates import RateTracker as RateTracker
from unisono.compat.torch_xla.core.steps import add_step_closure as add_step_closure
from unisono.compat.torch_xla.core.steps import mark_step as mark_step
from unisono.compat.torch_xla.core.views import check_view_sharing as check_view_sharing

_NO_MODEL_PARALLELISM = (
    "it moves parts of a model between devices, and this framework runs whole models, one per device"
)

_INSTEAD = {
    "all_to_all": f"{_NO_MODEL_PARALLELISM}; all_gather gives every replica all parts",
    "collective_permute": f"{_NO_MODEL_PARALLELISM}; all_gather gives every replica all parts",
    "ToXlaTensorArena": "send_cpu_data_to_device moves the tensors of a structure",
    "unlazy": "call mark_step(), after which tensors have their values",
    "get_memory_info": "unisono.gather_report() has each rank's memory",
    "parse_xla_device": "a torch.device has `type` and `index`",
    "xla_rendezvous": "call rendezvous, for all replicas or for groups of them",
    "optimization_barrier_": "nothing is reordered across the end of a step, which mark_step() marks",
}


def __getattr__(name: str) -> Any:
    refuse(__name__, name, _INSTEAD)
