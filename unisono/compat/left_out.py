"""Names of other frameworks that are left out here: what to do instead, in one table.

A module of a mirror says `__getattr__ = left_out(__name__)`: a name that it does not have is an AttributeError, with
the advice of the table if there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

_ADVICE = {
    # PyTorch/XLA
    "stablehlo": "torch.export writes a model's graph",
    "experimental": "it has experimental parts of the original, and here only eager_mode",
    "_XLAC": "it is of the original's C extension, which works only there",
    "all_to_all|collective_permute": (
        "it moves parts of a model between devices, and this framework runs whole models, one per device; all_gather "
        "gives every replica all parts"
    ),
    "send_cpu_data_to_device": "loaders move batches, and x.to(device) a tensor",
    "devices|device_count|real_devices": "call xla_model.get_xla_supported_devices(), or xla_real_devices()",
    "unlazy": "call mark_step(), after which tensors have their values",
    "get_memory_info": "unisono.gather_report() has each rank's memory",
    "parse_xla_device": "a torch.device has `type` and `index`",
    "use_spmd": (
        "one replica of your script runs per device, by launch(), spawn() or DataParallel; none runs for all devices"
    ),
    "GradScaler": (
        "bfloat16, which autocast uses here, needs no loss scaling; for float16, Accelerator(mixed_precision='fp16')"
    ),
    "trace|trace_detached": (
        "a replica traces itself: start_trace(folder) before the steps in question, stop_trace() after them"
    ),
    "for_each_instance.*|getenv_as|timed|TimedScope|eprint": "copy it from the original's utils.py: it is plain Python",
    # Accelerate
    "ParallelismConfig": "there is one axis, data parallel; shard large models by FullyShardedDataParallelPlugin",
    "prepare_pippy": (
        "pipelines are not supported; PartialState().split_between_processes distributes inputs for inference"
    ),
    "DeepSpeed.*|GatheredParameters|MegatronLM.*|TorchTensorParallel.*|TorchContextParallel.*": (
        "DeepSpeed, Megatron-LM, pipelines and tensor parallelism are not supported; unisono.Accelerator has strategy="
    ),
    ".*RecipeKwargs": "mixed_precision is 'no', 'fp16' or 'bf16'",
    ".*_offload.*|dispatch_model|load_checkpoint_.*|infer_auto_device_map": (
        "each device holds a whole replica, or its part of one under Accelerator(strategy='fsdp')"
    ),
    "BatchSamplerShard|IterableDatasetShard": "a prepared loader is a unisono.DeviceLoader, which shards by itself",
    ".*Tracker|filter_trackers": (
        "pass log_with= the name of a library, or an object with the methods of unisono.Tracker"
    ),
    "recursively_apply|concatenate|find_batch_size|slice_tensors|listify|convert_.*fp32|get_data_structure": (
        "map over a batch by torch.utils._pytree.tree_map"
    ),
    "active_dataloader|dataloader_references|remainder": (
        "a loader's own loop knows: loader.valid_samples, loader.epoch, loader.state_dict()"
    ),
}
"""By patterns of names, or of the module that a name is in."""


def left_out(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of a mirror."""
    return partial(refuse, module)


def refuse(owner: str, name: str) -> NoReturn:
    """Raise the AttributeError for a name that a module, or an object of it, does not have."""
    words = () if name.startswith("__") else (owner.rpartition(".")[2], name)  # the import system asks for such names
    for pattern, advice in _ADVICE.items():
        if any(re.fullmatch(pattern, word) for word in words):
            raise AttributeError(f"{owner}.{name} is deliberately not supported: {advice}")
    raise AttributeError(f"module {owner!r} has no attribute {name!r}")
