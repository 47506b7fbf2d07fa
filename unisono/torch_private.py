"""The private names of torch that this package uses; no other module names one, and a test checks that.

A lowercase name is torch's object itself. An uppercase one is the name of an attribute of torch's objects, for
`getattr` and `setattr`. Both are looked up by the first `from unisono.torch_private import ...`, and from then on cost
nothing; importing this module does not import torch.

If torch no longer has a name, the modules that import it raise an ImportError that says what it was for: a feature is
then missing, but none computes something else. Names that some versions of torch lack are None there, and `INSTEAD`
says what happens without them.

The private names of torch_xla are in `devices/xla.py`, `devices/xla_runtime.py` and `comm/xla.py`: no other module
imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the types that are more than Any
    from torch._C._distributed_c10d import GradBucket as _GradBucket
    from torch._compile import _disable_dynamo
    from torch.nn.modules.batchnorm import _BatchNorm

    current_graph_task_id: Callable[[], int]
    disable_dynamo = _disable_dynamo
    BatchNorm = _BatchNorm
    GradBucket = _GradBucket

TRIED = ("2.9", "2.13", "2.14", "2.15")
"""The versions of torch that have these names, except for those in `INSTEAD`; the tests check the installed one."""

_ITERATOR = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_WORKER = "torch.utils.data._utils.worker"
_AGENT = "torch.distributed.elastic.agent.server.SimpleElasticAgent"
_RENDEZVOUS = "torch.distributed.elastic.rendezvous"
_MEETING = f"{_RENDEZVOUS}.dynamic_rendezvous"
_GROUPS = "torch.distributed.distributed_c10d"
_SCHEDULER = "torch.optim.lr_scheduler"

NAMES = {  # ours: (torch's, what we do by it)
    # Backward passes.
    "current_graph_task_id": ("torch._C._current_graph_task_id", "distinguishes backward passes"),
    "will_engine_execute_node": ("torch._C._will_engine_execute_node", "sees where a backward pass leaves gradients"),
    "queue_callback": ("torch.autograd.Variable._execution_engine.queue_callback", "ends steps with backward passes"),
    "is_in_tls": ("torch._C._is_key_in_tls", "finds the world of a backward pass in autograd's thread"),
    "from_tls": ("torch._C._get_obj_in_tls", "finds the world of a backward pass in autograd's thread"),
    "BACKWARD_HOOKS": ("torch.Tensor._backward_hooks", "keeps hooks of parameters with fsdp"),
    "POST_GRADIENT_HOOKS": ("torch.Tensor._post_accumulate_grad_hooks", "keeps hooks of parameters with fsdp"),
    "SEQUENCE_NUMBER": ("torch._C._FunctionBase._sequence_nr", "sees what a loss was computed from"),
    "is_in_torch_func": ("torch._C._functorch.is_functorch_wrapped_tensor", "sees which passes torch.func.grad makes"),
    "get_unwrapped": ("torch._C._functorch.get_unwrapped", "sees which passes torch.func.grad makes"),
    # Many tensors in one call.
    "foreach_copy_": ("torch._foreach_copy_", "copies gradients and buffers"),
    "foreach_mul_": ("torch._foreach_mul_", "scales gradients"),
    "foreach_zero_": ("torch._foreach_zero_", "clears gradients"),
    # Tensors and their memory.
    "sparse_indices": ("torch.Tensor._indices", "sends sparse tensors that are not coalesced"),
    "sparse_values": ("torch.Tensor._values", "reads sparse tensors that are not coalesced"),
    "tracing_context": ("torch._guards.TracingContext.try_get", "hides sharded gradients from dynamo"),
    "is_view": ("torch.Tensor._is_view", "copies views that a model returns"),
    "STORAGE_ADDRESS": ("torch.UntypedStorage._cdata", "shows which tensors share memory"),
    "weak_storage": ("torch.UntypedStorage._weak_ref", "shows which tensors share memory"),
    "is_storage_expired": ("torch.UntypedStorage._expired", "shows which tensors share memory"),
    "free_weak_storage": ("torch.UntypedStorage._free_weak_ref", "shows which tensors share memory"),
    "VERSION": ("torch.Tensor._version", "shows whether inputs or gathered parameters have changed"),
    "UNTYPED_STORAGE": ("torch.TypedStorage._untyped_storage", "sends typed storages to workers"),
    "REBUILD_FROM_CPU": ("torch._utils._rebuild_device_tensor_from_cpu_tensor", "sends tensors to workers"),
    # Modules.
    "PARAMETERS": ("torch.nn.Module._parameters", "finds a module's own parameters"),
    "BUFFERS": ("torch.nn.Module._buffers", "finds a module's own buffers"),
    "MODULES": ("torch.nn.Module._modules", "finds a module's children"),
    "APPLY": ("torch.nn.Module._apply", "converts and moves the tensors of a module"),
    "RESET_PARAMETERS": ("torch.nn.MultiheadAttention._reset_parameters", "initialises modules built on 'meta'"),
    "BatchNorm": ("torch.nn.modules.batchnorm._BatchNorm", "finds the layers that synchronize_batch_norm converts"),
    "CHECK_INPUT_DIM": ("torch.nn.BatchNorm1d._check_input_dim", "checks the input of a synchronised BatchNorm"),
    # torch.compile.
    "disable_dynamo": ("torch._compile._disable_dynamo", "keeps collectives out of compiled graphs"),
    "leave_out_of_graphs": ("torch._dynamo.trace_rules.add", "keeps prepared models out of compiled graphs"),
    "set_lru_cache": ("torch._C._dynamo.eval_frame._set_lru_cache", "keeps the order of compiled graphs"),
    "functorch_entries": ("torch._functorch.config._config", "lets compiled graphs draw as usual"),
    "CALL": ("torch.nn.Module._call_impl", "compiles modules of torch's own classes"),
    "COMPILED_CALL": ("torch.nn.Module._compiled_call_impl", "compiles a module"),
    "ORIGINAL": ("torch._dynamo.eval_frame.OptimizedModule._orig_mod", "finds the module that torch.compile wraps"),
    # Other switches of the process.
    "cpus_near": ("torch.numa.binding._get_logical_cpus_to_bind_to", "pins workers to the cores near their GPUs"),
    "get_fp32_precision": ("torch._C._get_fp32_precision_getter", "gives workers torch.backends.fp32_precision"),
    "set_fp32_precision": ("torch._C._set_fp32_precision_setter", "gives workers torch.backends.fp32_precision"),
    # Operators, and a generator for each replica.
    "all_schemas": ("torch._C._jit_get_all_schemas", "finds the operators that draw or communicate"),
    "OPERATOR_SCHEMA": ("torch._ops.OpOverload._schema", "finds what an operation writes to"),
    "OpOverload": ("torch._ops.OpOverload", "gives each replica its own generator"),
    "include_dispatch_key": ("torch._C._dispatch_tls_set_dispatch_key_included", "gives each replica a generator"),
    "keys_after": ("torch._C._dispatch_keyset_full_after", "gives each replica its own generator"),
    "parse_dispatch_key": ("torch._C._dispatch_key_parse", "gives each replica its own generator"),
    "GENERATOR_ADDRESS": ("torch.Generator._cdata", "gives each replica its own generator"),
    # Optimizers and schedulers.
    "STEP_PRE_HOOKS": ("torch.optim.Optimizer._optimizer_step_pre_hooks", "keeps an optimizer's hooks with zero1"),
    "STEP_POST_HOOKS": ("torch.optim.Optimizer._optimizer_step_post_hooks", "keeps an optimizer's hooks with zero1"),
    "STEP_CALLED": (f"{_SCHEDULER}.LRScheduler._opt_called", "shows schedulers the steps"),
    "STEP_WRAPPED": (f"{_SCHEDULER}.LRScheduler._wrapped_by_lr_sched", "shows schedulers the steps"),
    "SCHEDULERS": (f"{_SCHEDULER}.SequentialLR._schedulers", "finds the length of a schedule of several"),
    # DataLoaders and their workers.
    "loader_worker": (_WORKER, "shows loader workers the user's dataset"),
    "WORKER_INFO": (f"{_WORKER}._worker_info", "shows loader workers the user's dataset"),
    "remove_worker_pids": (
        "torch.utils.data._utils.signal_handling._remove_worker_pids",
        "notices dead loader workers",
    ),
    "LoaderIterator": ("torch.utils.data.dataloader._BaseDataLoaderIter", "sees plain loops wait for data"),
    "LOADER_ITERATOR": ("torch.utils.data.DataLoader._iterator", "replaces dead loader workers"),
    "WORKER_PIDS_SET": (f"{_ITERATOR}._worker_pids_set", "notices dead loader workers itself"),
    "TRY_GET_DATA": (f"{_ITERATOR}._try_get_data", "limits the wait for a loader worker"),
    "TASK_INFO": (f"{_ITERATOR}._task_info", "names the loader worker that is awaited"),
    "AWAITED_INDEX": (f"{_ITERATOR}._rcvd_idx", "names the loader worker that is awaited"),
    "WORKERS": (f"{_ITERATOR}._workers", "finds dead loader workers"),
    "share_memory_lock": ("torch.storage._share_memory_lock", "forks loader workers from a process with threads"),
    "share_memory_map": ("torch.storage._share_memory_map", "forks loader workers from a process with threads"),
    "INITIALIZATION_LOCK": ("torch.cuda._initialization_lock", "forks loader workers from a process with threads"),
    # Process groups.
    "OBJECT_TO_TENSOR": (f"{_GROUPS}._object_to_tensor", "signs objects that ranks of several machines send"),
    "TENSOR_TO_OBJECT": (f"{_GROUPS}._tensor_to_object", "loads no objects that are not signed"),
    "default_store": (f"{_GROUPS}._get_default_store", "meets the other ranks in their store"),
    "abort_process_group": (f"{_GROUPS}._abort_process_group", "ends a group whose collectives hang"),
    "GET_BACKEND": ("torch.distributed.ProcessGroup._get_backend", "sees collectives go on"),
    "sequence_number": ("torch._C._distributed_c10d.Backend._get_sequence_number_for_group", "sees collectives go on"),
    "create_work_from_future": (
        "torch._C._distributed_c10d._create_work_from_future",
        "returns collectives that are done from shared memory",
    ),
    "DEVICE_TYPES": ("torch.distributed.ProcessGroup._device_types", "says that a group is for main memory"),
    "GlooOptions": ("torch.distributed.ProcessGroupGloo._Options", "sends what shared memory does not carry"),
    "GLOO_TIMEOUT": ("torch.distributed.ProcessGroupGloo._Options._timeout", "limits what waits for gloo"),
    "GLOO_DEVICES": ("torch.distributed.ProcessGroupGloo._Options._devices", "connects gloo within a machine"),
    "START_WORKERS": (f"{_AGENT}._start_workers", "runs on several machines"),
    "MONITOR_WORKERS": (f"{_AGENT}._monitor_workers", "runs on several machines"),
    "STOP_WORKERS": (f"{_AGENT}._stop_workers", "runs on several machines"),
    "SHUTDOWN": (f"{_AGENT}._shutdown", "runs on several machines"),
    "create_backend": (f"{_RENDEZVOUS}.c10d_rendezvous_backend.create_backend", "signs what agents agree on"),
    "create_handler": (f"{_MEETING}.create_handler", "signs what agents agree on"),
    "POLL_DELAY": (f"{_MEETING}._delay", "lets machines meet without a wait of a second"),
    "STATE_HOLDER": (f"{_MEETING}.DynamicRendezvousHandler._state_holder", "lets machines meet without such a wait"),
    "CACHE_DURATION": (f"{_MEETING}._BackendRendezvousStateHolder._cache_duration", "lets them meet without that wait"),
    "REMAINING_RESTARTS": (f"{_AGENT}._remaining_restarts", "restarts the workers of several machines"),
    # Strategies.
    "ACTIVE": ("torch.nn.parallel.DistributedDataParallel._active_ddp_module", "cuts graphs at buckets"),
    "BUILD_PARAMETERS": ("torch.nn.parallel.DistributedDataParallel._build_params_for_reducer", "orders additions"),
    "push_rebuilt_parameters": ("torch.distributed.Reducer._push_all_rebuilt_params", "fixes the order of additions"),
    "FSDP_CONTEXT": ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._state_ctx", "outlives failed passes"),
    "rebuild_buckets": ("torch.distributed.Reducer._rebuild_buckets", "fixes the order of additions"),
    "reset_reducer": ("torch.distributed.Reducer._reset_state", "finds parameters unused after zero_grad()"),
    "GradBucket": ("torch._C._distributed_c10d.GradBucket", "weights gradients in torch's communication hooks"),
    "FSDP_STATE": ("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "continues after a forward pass that failed"),
}
INSTEAD = {
    "set_lru_cache": "torch 2.9: ranks that are threads compile no models",
    **dict.fromkeys(("POLL_DELAY", "STATE_HOLDER", "CACHE_DURATION"), "machines take a second longer to meet"),
}

OUTPUTS = "_input_metadata"  # of torch.autograd.graph.Node

# For processes that have not imported torch. Without the first two, something starts more slowly, or a printed stack is
# longer; the third is also above, among the names that the loaders import.
COMPILER_MODULE = "torch._dynamo"
GRAPH_RULES = "torch._dynamo.trace_rules"  # what is compiled
WRAPPING_FRAMES = ("_call_impl", "_wrapped_call_impl")  # of nn.Module
LOADER_WORKER_MODULE = "torch.utils.data._utils.worker"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    path, purpose = NAMES[name]
    if name == "ORIGINAL" and COMPILER_MODULE not in sys.modules:  # then nothing is compiled, and it takes a second
        return path.rpartition(".")[2]
    try:
        found = _find(name, path)
    except (ImportError, AttributeError) as error:
        if name not in INSTEAD:
            raise ImportError(
                f"torch {torch.__version__} has no {path}, a private name with which Unisono {purpose}; Unisono was "
                f"tried with torch {', '.join(TRIED)}: install one of these, or a later Unisono"
            ) from error
        found = None
    globals()[name] = found
    return found


def _find(name: str, path: str) -> Any:
    if not name.isupper():
        return pkgutil.resolve_name(path)
    owner, _, attribute = path.rpartition(".")
    holder = pkgutil.resolve_name(owner)
    if not hasattr(holder, attribute) and not _is_set(holder, attribute):
        raise AttributeError(f"{owner} has no {attribute}")
    return attribute


def _is_set(kind: Any, attribute: str) -> bool:
    """Whether a method of the class assigns it, or has its name as a text: then instances have it."""
    methods = [each for base in getattr(kind, "__mro__", ()) for each in vars(base).values()]
    codes = [each.__code__ for each in methods if isinstance(each, FunctionType)]
    if any(attribute in code.co_consts for code in codes):
        return True
    named = [each for code in codes if attribute in code.co_names for each in dis.get_instructions(code)]
    return any(each.opname == "STORE_ATTR" and each.argval == attribute for each in named)


def overrides(name: str) -> Callable[[_Method], _Method]:
    """Mark a method that takes the place of torch's private one of that name, which is in the table above."""

    def check(method: _Method) -> _Method:
        assert method.__name__ == name
        return method

    return check


def typed_storage(untyped: Any, dtype: Any) -> Any:
    """A `torch.TypedStorage`, created with the private argument that avoids a warning."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def read_log_level() -> None:
    """Make torch's library read TORCH_CPP_LOG_LEVEL again, if it has kept the function that does."""
    import torch

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()


def saved(node: Any, name: str) -> Any:
    """What a node of autograd's graph has saved under that name; None if nothing, or if it is released."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


def output_size(node: Any) -> tuple[int, ...]:
    """The size of what a node of autograd's graph has computed, its first output."""
    return tuple(getattr(node, OUTPUTS)[0].shape)
