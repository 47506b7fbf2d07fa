"""Names of other frameworks that are left out here: what to do instead, in one table for each framework.

A module of a mirror says `__getattr__ = left_out(__name__)`: a name that it does not have is an AttributeError, with
the advice of the table if there is one. So is a ModuleNotFoundError, for modules of torch_xla.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_WHOLE_MODELS = (
    "it moves parts of a model between devices, and this framework runs whole models, one per device; all_gather gives "
    "every replica all parts"
)

_OF_TORCH_XLA = {
    "stablehlo": "torch.export writes a model's graph",
    "backends": "torch.set_float32_matmul_precision sets the precision of products",
    "distributed.spmd": "one program for all devices is unisono.Accelerator(strategy='spmd')",
    "distributed.fsdp distributed.zero_redundancy_optimizer": (
        "use unisono.Accelerator with strategy='fsdp' or 'zero1', which use torch's own engines"
    ),
    "distributed.xla_dist distributed.cluster": (
        "unisono run --nnodes, torchrun and SLURM start workers on several machines"
    ),
    "experimental": "it has experimental parts of the original, and here only eager_mode",
    (
        "core.xla_builder core.dynamo_bridge core.xla_op_registry core.xla_env_vars _internal _dynamo debug.graph_saver"
    ): "it accesses the original's runtime, which is not used on other devices here",
    "_XLAC": "it is of the original's C extension, which works only there",
    "utils.checkpoint": "torch.utils.checkpoint has the same function",
    "utils.gcsfs": "fsspec reads and writes gs:// addresses; checkpoints accept them as they are",
    "utils.tf_record_reader": "loaders take any iterable of batches, including a reader of TFRecord files",
    "utils.dlpack": "torch.utils.dlpack has the same functions",
    "utils.keyd_queue": "queue.Queue is one",
    "utils.utils.Cleaner": "use contextlib.ExitStack",
    "utils.utils.LazyProperty": "use functools.cached_property",
    "core.xla_model.all_to_all core.xla_model.collective_permute": _WHOLE_MODELS,
    "core.xla_model.ToXlaTensorArena": "send_cpu_data_to_device moves the tensors of a structure",
    "core.xla_model.unlazy": "call mark_step(), after which tensors have their values",
    "core.xla_model.get_memory_info": "unisono.gather_report() has each rank's memory",
    "core.xla_model.parse_xla_device": "a torch.device has `type` and `index`",
    "core.xla_model.xla_rendezvous": "call rendezvous, for all replicas or for groups of them",
    "core.xla_model.optimization_barrier_": "nothing is reordered across the end of a step, which mark_step() marks",
    "core.functions.nms": "torchvision.ops.nms runs on the CPU and on CUDA",
    "runtime.use_spmd": (
        "one replica of your script runs per device, by launch(), spawn() or DataParallel; none runs for all devices"
    ),
    "runtime.set_device_type": "set UNISONO_BACKEND=cpu, cuda, mps or xla before the program starts",
    "runtime.get_master_ip": "launchers tell the workers each other's addresses",
    "distributed.parallel_loader.BatchDataLoader": "take a DataLoader's own batch_size",
    "amp.GradScaler": (
        "bfloat16, which autocast uses here, needs no loss scaling; for float16, Accelerator(mixed_precision='fp16')"
    ),
    "debug.metrics_saver": "write debug.metrics.metrics_report() to a file",
    "debug.model_comparator": "unisono.check_replicas compares the replicas' weights",
    "debug.metrics.executed_fallback_ops": "nothing falls back here: an operation runs, or raises an error",
    (
        "debug.metrics_compare_utils.compare_metrics debug.metrics_compare_utils.get_data_points_from_metrics_reports"
    ): "compare the numbers that parse_metrics_report returns, by your own rule",
    "debug.profiler.trace debug.profiler.trace_detached": (
        "a replica traces itself: start_trace(folder) before the steps in question, stop_trace() after them"
    ),
    "test.test_utils.XlaTestCase": "torch.testing.assert_close compares tensors on any device",
}

TORCH_XLA = {name: advice for names, advice in _OF_TORCH_XLA.items() for name in names.split()}
"""By modules of `torch_xla`, with all that they have and is not here, and by names in a module."""

ACCELERATE = {
    "ParallelismConfig": "there is one axis, data parallel; shard large models by FullyShardedDataParallelPlugin",
    "prepare_pippy": (
        "pipelines are not supported; PartialState().split_between_processes distributes inputs for inference"
    ),
    "DeepSpeed.*|GatheredParameters|MegatronLM.*|TorchTensorParallel.*|TorchContextParallel.*": (
        "DeepSpeed, Megatron-LM, pipelines and tensor parallelism are not supported; unisono.Accelerator has strategy="
    ),
    ".*RecipeKwargs": "mixed_precision is 'no', 'fp16' or 'bf16'",
    "BnbQuantizationConfig": "models are trained in the precision they have; quantise before prepare()",
    "SageMakerDistributedType": "SageMaker starts torchrun, whose world is joined",
    ".*_offload.*|dispatch_model|load_checkpoint_.*|infer_auto_device_map|attach_layerwise_casting_hooks": (
        "each device holds a whole replica, or its part of one under Accelerator(strategy='fsdp')"
    ),
    "BatchSamplerShard|IterableDatasetShard|MpDeviceLoaderWrapper": (
        "a prepared loader is a unisono.DeviceLoader, which shards by itself"
    ),
    ".*Tracker|filter_trackers": (
        "pass log_with= the name of a library, or an object with the methods of unisono.Tracker"
    ),
    "initialize_tensors": "call broadcast_object_list, or unisono.broadcast(tensor)",
    "get_data_structure": "ranks compare structures themselves before they send",
    "active_dataloader|dataloader_references|remainder": (
        "a loader's own loop knows: loader.valid_samples, loader.epoch, loader.state_dict()"
    ),
}
"""By patterns of names in any module of `accelerate`, which has most names in several modules."""


def left_out(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of a mirror."""
    return partial(refuse, module)


def refuse(owner: str, name: str) -> NoReturn:
    """Raise the AttributeError for a name that a module, or an object of it, does not have."""
    if advice := _advice_on(f"{owner}.{name}"):
        raise AttributeError(f"{owner}.{name} is deliberately not supported: {advice}")
    raise AttributeError(f"module {owner!r} has no attribute {name!r}")


def _advice_on(full_name: str) -> str | None:
    framework, _, name = full_name.removeprefix("unisono.compat.").partition(".")
    if framework == "accelerate":
        last = name.rpartition(".")[2]
        return next((ACCELERATE[each] for each in ACCELERATE if re.fullmatch(each, last)), None)
    is_special = name.rpartition(".")[2].startswith("__")  # asked for by the import system
    found = (TORCH_XLA[each] for each in TORCH_XLA if name == each or name.startswith(f"{each}."))
    return None if is_special else next(found, None)


class _Finder:
    """The last finder, for modules that no other one has found."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{self.package}."):
            return None
        advice = _advice_on(name)
        reason = f"is deliberately not supported: {advice}" if advice else "does not exist"
        raise ModuleNotFoundError(
            f"{name} {reason}; docs/migrating_from_torch_xla.md lists the modules that are there", name=name
        )


def explain_missing_modules(package: str) -> None:
    """Make imports of a module that the package does not have say why. Effective once per process."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder(package))
