"""Accelerate's names over this framework: a script runs by changing its imports, in processes and in threads.

`from accelerate import Accelerator` becomes `from unisono.compat.accelerate import Accelerator`, and so for each
module. No code is shared with it. docs/migrating_from_accelerate.md describes the differences.
"""

from __future__ import annotations

from typing import Any

from unisono.compat.accelerate import big_modeling as _big_modeling
from unisono.compat.accelerate.accelerator import Accelerator as Accelerator
from unisono.compat.accelerate.big_modeling import init_empty_weights as init_empty_weights
from unisono.compat.accelerate.big_modeling import init_on_device as init_on_device
from unisono.compat.accelerate.data_loader import skip_first_batches as skip_first_batches
from unisono.compat.accelerate.launchers import debug_launcher as debug_launcher
from unisono.compat.accelerate.launchers import notebook_launcher as notebook_launcher
from unisono.compat.accelerate.local_sgd import LocalSGD as _LocalSGD  # noqa: F401 - accelerate.local_sgd is there, too
from unisono.compat.accelerate.logging import get_logger as _get_logger  # noqa: F401 - and accelerate.logging
from unisono.compat.accelerate.state import PartialState as PartialState
from unisono.compat.accelerate.utils import dataclasses as _dataclasses
from unisono.compat.accelerate.utils.dataclasses import AutocastKwargs as AutocastKwargs
from unisono.compat.accelerate.utils.dataclasses import DataLoaderConfiguration as DataLoaderConfiguration
from unisono.compat.accelerate.utils.dataclasses import DDPCommunicationHookType as DDPCommunicationHookType
from unisono.compat.accelerate.utils.dataclasses import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from unisono.compat.accelerate.utils.dataclasses import DistributedType as DistributedType
from unisono.compat.accelerate.utils.dataclasses import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from unisono.compat.accelerate.utils.dataclasses import GradScalerKwargs as GradScalerKwargs
from unisono.compat.accelerate.utils.dataclasses import InitProcessGroupKwargs as InitProcessGroupKwargs
from unisono.compat.accelerate.utils.dataclasses import ProfileKwargs as ProfileKwargs
from unisono.compat.accelerate.utils.memory import find_executable_batch_size as find_executable_batch_size
from unisono.compat.accelerate.utils.random import synchronize_rng_states as synchronize_rng_states

__version__ = "1.15.0"
"""The version of Accelerate with these names; scripts compare it."""

_INSTEAD = {
    "ParallelismConfig": "there is one axis, data parallel; shard large models by FullyShardedDataParallelPlugin",
    "prepare_pippy": (
        "pipelines are not supported; PartialState().split_between_processes distributes inputs for inference"
    ),
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise AttributeError(f"{__name__}.{name} is deliberately not supported: {_INSTEAD[name]}")
    return getattr(_big_modeling if name in _big_modeling._INSTEAD else _dataclasses, name)
