"""Unisono: multi-device data-parallel training for PyTorch. One script, any number of devices, the same result.

The names below are the public ones. Each is imported from its module when it is first used, so that `import unisono`
costs nothing. Four modules have their own public names: `unisono.checkpoint` (saving and loading, `serialize`),
`unisono.errors`, `unisono.functional` (collectives with gradients) and `unisono.strategies` (options of the
Accelerator's). For packages that build on this one there are `unisono.building_blocks` and `unisono.protocols`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono import checkpoint as checkpoint
    from unisono import errors as errors
    from unisono import functional as functional
    from unisono import strategies as strategies
    from unisono.accelerator import Accelerator as Accelerator
    from unisono.batches.virtual_ranks import Virtual as Virtual
    from unisono.checkpoint.checkpointer import Checkpointer as Checkpointer
    from unisono.devices import available_devices as available_devices
    from unisono.launch.context import ProcessContext as ProcessContext
    from unisono.launch.hosts.join_world import join_world as join_world
    from unisono.launch.options import Cores as Cores
    from unisono.launch.options import Output as Output
    from unisono.launch.spawn import spawn as spawn
    from unisono.launch.starting.zygote_client import warm as warm
    from unisono.loading.device_iterator import DeviceIterator as DeviceIterator
    from unisono.loading.device_loader import DeviceLoader as DeviceLoader
    from unisono.loading.parallel_loader import ParallelLoader as ParallelLoader
    from unisono.loading.permutation import IndexedSampler as IndexedSampler
    from unisono.loading.progress import tqdm as tqdm
    from unisono.loading.sources import SampleGenerator as SampleGenerator
    from unisono.report.gathering import gather_report as gather_report
    from unisono.report.phases import phase as phase
    from unisono.report.summary import Report as Report
    from unisono.threads.data_parallel import DataParallel as DataParallel
    from unisono.threads.data_parallel import ReplicaContext as ReplicaContext
    from unisono.tracking.tracker import Tracker as Tracker
    from unisono.training.agreement import broadcast_parameters as broadcast_parameters
    from unisono.training.agreement import check_replicas as check_replicas
    from unisono.training.collectives import all_gather as all_gather
    from unisono.training.collectives import all_gather_object as all_gather_object
    from unisono.training.collectives import all_gather_samples as all_gather_samples
    from unisono.training.collectives import all_reduce as all_reduce
    from unisono.training.collectives import barrier as barrier
    from unisono.training.collectives import broadcast as broadcast
    from unisono.training.collectives import is_rank_zero as is_rank_zero
    from unisono.training.collectives import local_rank as local_rank
    from unisono.training.collectives import rank as rank
    from unisono.training.collectives import world_size as world_size
    from unisono.training.means import Accuracy as Accuracy
    from unisono.training.means import Mean as Mean
    from unisono.training.optimizer import backward as backward
    from unisono.training.optimizer import optimizer_step as optimizer_step
    from unisono.training.out_of_memory import find_executable_batch_size as find_executable_batch_size
    from unisono.training.stopping import should_stop as should_stop
    from unisono.world import World as World
    from unisono.world import current_world as current_world
    from unisono.world import use_world as use_world

__version__ = "0.1.0"

_HOMES = {
    "accelerator": "Accelerator",
    "batches.virtual_ranks": "Virtual",
    "checkpoint.checkpointer": "Checkpointer",
    "devices": "available_devices",
    "launch.context": "ProcessContext",
    "launch.hosts.join_world": "join_world",
    "launch.options": "Cores Output",
    "launch.spawn": "spawn",
    "launch.starting.zygote_client": "warm",
    "loading.device_iterator": "DeviceIterator",
    "loading.device_loader": "DeviceLoader",
    "loading.parallel_loader": "ParallelLoader",
    "loading.permutation": "IndexedSampler",
    "loading.progress": "tqdm",
    "loading.sources": "SampleGenerator",
    "report.gathering": "gather_report",
    "report.phases": "phase",
    "report.summary": "Report",
    "threads.data_parallel": "DataParallel ReplicaContext",
    "tracking.tracker": "Tracker",
    "training.agreement": "broadcast_parameters check_replicas",
    "training.collectives": "all_gather all_gather_object all_gather_samples all_reduce barrier "
    "broadcast is_rank_zero local_rank rank world_size",
    "training.means": "Accuracy Mean",
    "training.optimizer": "backward optimizer_step",
    "training.out_of_memory": "find_executable_batch_size",
    "training.stopping": "should_stop",
    "world": "World current_world use_world",
}
_HOME_OF = {name: f"unisono.{home}" for home, names in _HOMES.items() for name in names.split()}

_MODULES = ["checkpoint", "errors", "functional", "strategies"]
"""Those whose names are public under the module's."""

__all__ = sorted(_HOME_OF)


if not TYPE_CHECKING:  # for a type checker there are the imports above, and no other name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"unisono.{name}")
        if name not in _HOME_OF:
            # Before Python 3.12, `from unisono import ...` turns an AttributeError into an error without advice.
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                _advise(name)
            raise AttributeError(f"module 'unisono' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value  # from now on found without `__getattr__`
        return value


def _advise(name: str) -> None:
    """Raise an ImportError with the closest name, if there is one, and no module of this name."""
    from difflib import get_close_matches
    from importlib.util import find_spec

    if find_spec(f"unisono.{name}") is None and (near := get_close_matches(name, __all__, n=1)):
        raise ImportError(f"cannot import name {name!r} from 'unisono'; did you mean {near[0]!r}?", name=__name__)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


import_module("unisono.launch.starting.warm_at_import").warm_at_import()
