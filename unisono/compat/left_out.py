"""Names of other frameworks that are left out here: what to do instead, in one table.

A module of a mirror says `__getattr__ = left_out(__name__)`: a name that it does not have is an AttributeError, with
the advice of the table if there is one. `from` turns an AttributeError into an ImportError without its text, unless the
module is a package, whose modules Python then searches for the name. So each such module is one, and a name with advice
is an ImportError, as a missing module is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

_ADVICE = {
    # PyTorch/XLA
    "stablehlo": "torch.export writes a model's graph",
    "experimental": "it has experimental parts of the original, and here only eager_mode",
    "_XLAC": "it belongs to the original's C extension, which works only there",
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
    "ParallelismConfig|parallelism_config|torch_tp_.*|.*_parallel_rank|data_parallel_.*|.*device_mesh|.*_parallel": (
        "there is one axis, data parallel: process_index of num_processes; shard large models by "
        "FullyShardedDataParallelPlugin"
    ),
    "prepare_pippy|inference|build_pipeline": (
        "pipelines are not supported; PartialState().split_between_processes distributes inputs for inference"
    ),
    "(?i:.*deepspeed.*|.*megatron.*)|GatheredParameters|DummyOptim|DummyScheduler|Torch(Tensor|Context)Parallel.*": (
        "DeepSpeed, Megatron-LM, pipelines and tensor parallelism are not supported; unisono.Accelerator has strategy="
    ),
    ".*RecipeKwargs|(?i:.*fp8.*|.*bnb.*|.*quantize.*)|ao|.*_ao(_.*)?|transformer_engine|.*_recipe_handler": (
        "there is no training in 8 bits; mixed_precision is 'no', 'fp16' or 'bf16'"
    ),
    "((?!fsdp).)*offload.*|dispatch_model|load_checkpoint_.*|.*device_map|(?i:.*hook.*)|CpuOffload|modeling|.*_memory|"
    "set_module_tensor_to_device|named_module_tensors|.*_tied_parameters.*|.*module_sizes?|.*_layer_size": (
        "each device holds a whole replica, or its part of one under Accelerator(strategy='fsdp')"
    ),
    ".*fsdp.*": (
        "accelerator.save_state and load_state take sharded models, too; accelerator.get_state_dict(model) is whole"
    ),
    "checkpointing|constants|(save|load)_(accelerator|custom)_state|[A-Z_]+_NAME": (
        "accelerator.save_state(directory) writes, and load_state(directory) reads; they choose the names of files"
    ),
    "commands|launch|PrepareForLaunch|prepare_.*_env|write_basic_config": (
        "`unisono run -n 2 script.py` starts a script, and notebook_launcher a function; there is no configuration file"
    ),
    "BatchSamplerShard|IterableDatasetShard|Skip(BatchSampler|DataLoader)|DataLoader(StateMixin|Adapter)|get_sampler": (
        "a prepared loader is a unisono.DeviceLoader, which shards by itself"
    ),
    "AcceleratedOptimizer|optimizer": (
        "prepare() returns the optimizer itself; accelerator.optimizer_step_was_skipped is about its last step"
    ),
    ".*Tracker|.*_trackers|register_tracker_class|LOGGER_TYPE_TO_CLASS": (
        "pass log_with= the name of a library, or an object of a subclass of GeneralTracker"
    ),
    "concatenate|convert_outputs_.*|get_data_structure|initialize_tensors|honor_type|pad_input_tensors": (
        "map over a batch by torch.utils._pytree.tree_map"
    ),
    "active_dataloader|dataloader_references|remainder": (
        "a loader's own loop knows: loader.valid_samples, loader.epoch, loader.state_dict()"
    ),
    "step": "accelerator.sync_gradients says whether optimizer.step() takes a step; count batches by enumerate(loader)",
    "lomo_backward|has_lomo_optimizer": "prepare() takes optimizers of torch's kind: a step after the backward pass",
    "test_utils": "it has the tests of the original; examples/accelerate_style.py is a script that is tested here",
}
"""By patterns of names, or of the module that a name is in."""


_mirrors: set[str] = set()  # the names of modules


def left_out(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of a mirror."""
    _mirrors.add(module)
    vars(sys.modules[module]).setdefault("__path__", [])
    return partial(refuse, module)


def refuse(owner: str, name: str) -> NoReturn:
    """Raise the AttributeError for a name that a module, or an object of it, does not have."""
    if text := describe_left_out(owner, name):
        raise AttributeError(text)
    raise AttributeError(f"module {owner!r} has no attribute {name!r}")


def describe_left_out(owner: str, name: str) -> str | None:
    """The text of the error for a name that is left out; None without advice."""
    words = () if name.startswith("__") else (owner.rpartition(".")[2], name)  # the import system asks for such names
    for pattern, advice in _ADVICE.items():
        if any(re.fullmatch(pattern, word) for word in words):
            return f"{owner}.{name} is deliberately not supported: {advice}"
    return None


class _Finder(MetaPathFinder):
    """Finds no module; for one of a mirror that is left out it raises an ImportError with the advice."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        owner, _, name = fullname.rpartition(".")
        if owner in _mirrors and (text := describe_left_out(owner, name)):
            raise ImportError(text, name=fullname)


sys.meta_path.append(_Finder())
