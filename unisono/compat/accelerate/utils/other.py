"""Other functions of Accelerate, whichever of its modules they are in: seeds and generators, batch sizes that fit,
saving, unwrapping, profiling, starting, `is_..._available()`.
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
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

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
    get_backend,
    seed_all,
    uncompiled,
    write_state,
)
from unisono.compat.accelerate.state import PartialState, joined_world
from unisono.compat.accelerate.utils.dataclasses import ProfileKwargs
from unisono.compat.accelerate.utils.environment import patch_environment
from unisono.compat.left_out import left_out

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
