"""The functions of Accelerate, whichever of its modules they are in: collectives over nested structures, seeds and
generators, batch sizes that fit, saving, unwrapping, profiling, starting, `is_..._available()`.

In Accelerate, a gathered or reduced value has no gradient, which goes unnoticed until the model trains wrongly. Here it
raises when a backward pass reaches it.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import chain
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.torch_version import TorchVersion

import unisono
from unisono import Output, World, spawn
from unisono.building_blocks import (
    HOST,
    PreparedModel,
    check_choice,
    gather_nested,
    get_backend,
    leaves,
    pad_nested,
    reduce_nested,
    seed_all,
    tensors,
    tree_map,
    uncompiled,
    write_state,
)
from unisono.compat.accelerate.state import PartialState, joined_world
from unisono.compat.accelerate.utils.dataclasses import ProfileKwargs
from unisono.compat.accelerate.utils.environment import patch_environment
from unisono.compat.left_out import left_out
from unisono.errors import UnisonoError
from unisono.protocols import ReduceOp

DistributedOperationException = UnisonoError
"""The rank that detects a difference raises a CollectiveMismatchError, the others a BrokenWorldError: none
continues."""

_PACKAGES = {"bnb": "bitsandbytes"}
_refuse = left_out(__name__)
_REFUSED = ("deepspeed", "megatron_lm", "fp8", "msamp", "transformer_engine", "pippy", "sagemaker")
"""Unsupported packages are not available, even if they are installed."""


def __getattr__(name: str) -> Any:
    found = re.fullmatch(r"is_(\w+)_available", name)
    return partial(_is_available, found[1]) if found is not None else _refuse(name)


def _is_available(name: str, *_: Any, **__: Any) -> bool:
    """Whether Accelerator has this precision, whether there is a device of this family, or that package."""
    if name in ("bf16", "fp16"):
        return name == "bf16" or joined_world().backend.unsupported_reason("fp16") is None
    if name in _REFUSED:
        return False
    family = getattr(torch, name, None) or getattr(torch.backends, name, None)
    if family is not None and hasattr(family, "is_available"):
        return bool(family.is_available())
    return find_spec(_PACKAGES.get(name, name)) is not None


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether a version, or that of an installed library by its name, is `<`, `<=`, `==`, `!=`, `>=` or `>` the other
    one."""
    known = library_or_version
    own = TorchVersion(metadata.version(known) if type(known) is str else str(known))
    compare = {"<": lt, "<=": le, "==": eq, "!=": ne, ">=": ge, ">": gt}
    check_choice(operation, "operation", *compare)
    return bool(compare[operation](own, requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version, without what follows its numbers, compares like that."""
    numbers = re.findall(r"[\d.]*\d", torch.__version__)
    return compare_versions(TorchVersion(numbers[0]), operation, version)


# Collectives.


def gather(tensor: Any, world: World | None = None) -> Any:
    """Every rank's tensors along dim 0; in a world of one the tensors themselves.

    Ranks may have different numbers of rows, as in the last batch, which is split rather than padded: each row occurs
    once. A nesting whose tensors require grad is gathered as values: a backward pass that reaches one is an error.
    """
    world = world or joined_world()
    if world.world_size == 1:
        return tensor
    collect: Callable[[Any], Any] = partial(gather_nested, dim=0, world=world)
    if all(isinstance(each, torch.Tensor) and each.ndim for each in leaves(tensor)):
        collect = partial(tree_map, lambda each: unisono.all_gather_samples(each, len(each), world=world))
    return _without_gradient("gather", collect, tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, world: World | None = None) -> Any:
    """The reduction over the ranks ("mean", "sum", "max", "min"; "none" keeps each rank's own value), times `scale`."""
    world = world or joined_world()
    op: ReduceOp = reduction  # type: ignore[assignment]  # an unknown one is refused below
    if reduction == "none" or world.world_size == 1:
        return tree_map(lambda each: each if scale == 1 else each * scale, tensor)  # times 1.0 would round integers
    return _without_gradient("reduce", lambda values: reduce_nested(values, op, scale, world), tensor)


def _without_gradient(name: str, collect: Callable[[Any], Any], values: Any) -> Any:
    """Collect the values; if they require grad, the result raises in a backward pass."""
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors(values))):
        return collect(values)
    with torch.no_grad():
        collected = collect(values)
    anchor = torch.zeros((), device=HOST, requires_grad=True)
    return tree_map(lambda each: _Cut.apply(anchor, each, name) if each.is_floating_point() else each, collected)


class _Cut(torch.autograd.Function):
    """The value; a backward pass that reaches it raises an error. It keeps no graph of the values."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise RuntimeError(
            f"a backward pass has come to what {ctx.name}() returned, which has no gradient: Accelerate would silently "
            "drop it; call unisono.functional.all_gather or all_reduce for a result with a gradient, or detach() it"
        )


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """See `unisono.Accelerator.pad_across_processes`."""
    return pad_nested(tensor, dim, pad_index, pad_first, joined_world())


def gather_object(object: Any) -> Any:
    """The elements of every rank's list, in rank order; in a world of one the object itself."""
    world = joined_world()
    return object if world.world_size == 1 else list(chain.from_iterable(unisono.all_gather_object(object, world)))


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """That rank's tensors: new ones, in the same nesting; shapes must be equal on each rank."""
    world = joined_world()
    return tree_map(lambda each: unisono.broadcast(each.detach().clone(), from_process, world), tensor)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Rank zero's tensor, on each rank's device; the other ranks pass None."""
    world = joined_world()
    return world.comm.broadcast_object(None if tensor is None else tensor.cpu()).to(world.device)  # type: ignore[no-any-return]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the list's contents by that rank's objects, and return the list."""
    object_list[:] = joined_world().comm.broadcast_object(list(object_list), from_process)
    return object_list


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
    """Move the structure's tensors, and everything with a method `to`, to that device."""
    return tree_map(lambda each: each.to(device) if hasattr(each, "to") else each, tensor)


def wait_for_everyone() -> None:
    """Wait until every rank has called it."""
    unisono.barrier(joined_world())


# Nested structures.


def is_torch_tensor(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The structure with `func(each, *args, **kwargs)` in place of each leaf of that type; others stay, or are a
    TypeError."""

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{getattr(func, '__name__', func)} cannot take a {type(leaf).__name__}; pass tensors")
        return leaf

    return tree_map(apply, data)


def find_batch_size(data: Any) -> int | None:
    """The number of rows of the structure's first tensor; None if it has no tensor."""
    return next((len(each) for each in tensors(data)), None)


def find_device(data: Any) -> torch.device | None:
    """The device of the structure's first tensor; None if it has no tensor."""
    return next((each.device for each in tensors(data)), None)


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """The structure with these rows of each tensor; other arguments have no effect."""
    return recursively_apply(lambda each: each[tensor_slice], data)


def listify(data: Any) -> Any:
    """The structure with lists of numbers in place of tensors."""
    return recursively_apply(lambda each: each.detach().cpu().float().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """The structure with its tensors of 16 bits as float32."""
    half = (torch.float16, torch.bfloat16)
    return recursively_apply(lambda each: each.float() if each.dtype in half else each, tensor)


# Generators.


class Seed:
    """The `value` of a rank's last `set_seed`; None before the first one."""

    value: int | None = None


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch (among threads, the replica's own), and the orders of DataLoaders
    that are prepared from now on. `device_specific` adds the rank to the seed."""
    world = joined_world()
    world.state.part(Seed).value = seed
    seed += world.rank if device_specific else 0
    if world.world_size == 1 or world.is_of_processes:
        seed_all(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_states` of one type; None is the devices'."""
    synchronize_rng_states([rng_type or joined_world().backend.name], generator)


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Set generators on all ranks to rank zero's state: "torch" for torch's, "generator" for the given one, the name of
    a device family for the devices'; ValueError if it is none of these."""
    world = joined_world()
    backend, device = world.backend, world.device
    for kind in map(str, rng_types):
        if kind == "torch":
            torch.set_rng_state(world.comm.broadcast_object(torch.get_rng_state()))
        elif kind == "generator":
            if generator is None:
                raise ValueError("rng_types has 'generator', and none was given; pass generator=")
            generator.set_state(world.comm.broadcast_object(generator.get_state()))
        else:
            get_backend(kind)  # ValueError if there is no such family
            backend.set_rng_state(world.comm.broadcast_object(backend.rng_state(device)), device)


# Memory, files, models, bars.


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """See `unisono.find_executable_batch_size`. `reduce_batch_size_fn` takes no arguments, and returns the next size;
    None uses nine tenths of the previous one, as Accelerate does."""
    given = reduce_batch_size_fn
    reduce = (lambda size: size * 9 // 10) if given is None else (lambda _: given())
    return unisono.find_executable_batch_size(function, starting_batch_size, reduce)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return cached memory to the device."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Return one None per object, to assign in their place, and cached memory to the device; objects freed by that go
    at the next collection."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """`torch.save` on rank zero, or safetensors' `save_file`; on the first rank of each machine with
    `save_on_each_node`."""
    state = PartialState()
    if state.is_main_process or (save_on_each_node and state.is_local_main_process):
        if safe_serialization:
            write_state(obj, Path(f), "safetensors", "the object")
        else:
            torch.save(obj, f)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's module, also of torch's DataParallel and DistributedDataParallel. Other arguments have no effect,
    except `keep_torch_compile=False`, which returns the uncompiled module."""
    wrappers = (PreparedModel, nn.DataParallel, nn.parallel.DistributedDataParallel)
    # `torch.compile` may be around the wrapper, or inside of it.
    outer: Any = model if keep_torch_compile else uncompiled(model)
    module: Any = outer.module if isinstance(outer, wrappers) else outer
    plain: nn.Module = module if keep_torch_compile else uncompiled(module)
    return plain


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`unisono.tqdm`; with `main_process_only=False` tqdm's own bar, on every rank."""
    return unisono.tqdm(*args, **kwargs) if main_process_only else import_module("tqdm.auto").tqdm(*args, **kwargs)


_profiler: list[torch.profiler.profile] = []  # the one that threads share; at most one


@contextmanager
def profiled(handler: ProfileKwargs, world: World) -> Iterator[torch.profiler.profile]:
    """Profile the block by `torch.profiler.profile`; with `output_trace_dir`, export `profile_{rank}.json` there.

    Among threads it is a collective, records what rank zero's thread does, and is exported once: torch's profiler
    belongs to the process, which a second concurrent one would end.
    """
    is_shared = world.world_size > 1 and not world.is_of_processes
    meet = partial(unisono.barrier, world) if is_shared else lambda: None
    if is_shared and world.rank > 0:
        meet()
        yield _profiler[0]
        meet()
    else:
        with handler.build() as profiler:
            _profiler[:] = [profiler]
            meet()
            yield profiler
            meet()
        _profiler.clear()
        if is_shared:
            profiler.events()  # computed now, not by the first of several threads that ask
        if handler.output_trace_dir is not None:
            Path(handler.output_trace_dir).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(handler.output_trace_dir) / f"profile_{world.rank}.json"))
    meet()  # the profiler has stopped


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in that many worker processes on the CPU."""
    spawn(lambda _: function(*args), nprocs=num_processes, backend=HOST.type)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    max_restarts: int = 0,
    output: Output | None = None,
    **options: Any,
) -> list[Any]:
    """What `function(*args)` returns in that many worker processes, by default one for each device: `unisono.spawn`.

    `mixed_precision` is that of the Accelerators that the function creates. `output` is that of `spawn`: with
    `Output("logs")`, `unisono top` shows the run. Options for several machines have no effect.
    """

    def work(_: int) -> Any:
        with patch_environment(accelerate_mixed_precision=mixed_precision):
            return function(*args)

    return spawn(work, nprocs=num_processes, max_restarts=max_restarts, output=output or Output())


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """A block in which this thread creates modules with their parameters on the meta device, or (`include_buffers`) all
    their tensors."""
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """The same for any device."""
    own = threading.get_ident()
    if include_buffers:
        with device:
            yield
        return

    def move_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or threading.get_ident() != own:
            return parameter
        moved = nn.Parameter(parameter.to(device), parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    handle = register_module_parameter_registration_hook(move_parameter)
    try:
        yield
    finally:
        handle.remove()
