"""`accelerate.utils.other`, and `imports`, `memory`, `random`, `environment`, `tqdm`: seeds and generators, batch sizes
that fit, saving, unwrapping, waiting, environment variables, a bar, `is_..._available()`."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from unisono.compat.accelerate.state import PartialState, joined_world
from unisono.compat.accelerate.utils.dataclasses import RNGType
from unisono.compat.left_out import refuse
from unisono.parallel import out_of_memory
from unisono.parallel.prepared.model import PreparedModel
from unisono.progress import tqdm as bar_of_rank_zero
from unisono.randomness import seed_all
from unisono.world import World

_PACKAGES = {"bnb": "bitsandbytes"}
_REFUSED = ("deepspeed", "megatron_lm", "fp8", "msamp", "transformer_engine", "pippy", "sagemaker")
"""Unsupported packages are not available, even if they are installed."""


def __getattr__(name: str) -> Any:
    found = re.fullmatch(r"is_(\w+)_available", name)
    return partial(_is_available, found[1]) if found is not None else refuse(__name__, name)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether mixed_precision="bf16" is supported: it is on all families."""
    return True


def is_fp16_available() -> bool:
    """Whether mixed_precision="fp16" is supported on this rank's device."""
    return joined_world().backend.unsupported_reason("fp16") is None


def _is_available(name: str, *_: Any, **__: Any) -> bool:
    if name in _REFUSED:
        return False
    family = getattr(torch, name, None) or getattr(torch.backends, name, None)
    if family is not None and hasattr(family, "is_available"):
        return bool(family.is_available())
    return find_spec(_PACKAGES.get(name, name)) is not None


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


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Set a generator on all ranks to rank zero's state: torch's, the given one, or that of the devices."""
    world = joined_world()
    kind = RNGType(rng_type) if rng_type is not None else RNGType.TORCH
    if kind == RNGType.TORCH:
        torch.set_rng_state(_of_rank_zero(torch.get_rng_state(), world))
    elif kind == RNGType.GENERATOR:
        if generator is None:
            raise ValueError("rng_type='generator' synchronises a generator, and none was given; pass generator=")
        generator.set_state(_of_rank_zero(generator.get_state(), world))
    else:
        state = world.backend.rng_state(world.device)
        world.backend.set_rng_state(_of_rank_zero(state, world), world.device)


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Like `synchronize_rng_state`, for several of them."""
    for each in rng_types:
        synchronize_rng_state(each, generator)


def _of_rank_zero(state: torch.Tensor, world: World) -> torch.Tensor:
    found: torch.Tensor = world.comm.broadcast_object(state)
    return found


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """See `unisono.find_executable_batch_size`; on all ranks together.

    Args:
        reduce_batch_size_fn: takes no arguments, and returns the next size; None uses nine tenths of the previous one,
            as Accelerate does.
    """
    given = reduce_batch_size_fn
    reduce = (lambda size: size * 9 // 10) if given is None else (lambda _: given())
    decorate: Any = out_of_memory.find_executable_batch_size
    return decorate(function, starting_batch_size, reduce)  # type: ignore[no-any-return]


def release_memory(*objects: Any) -> list[None]:
    """Return one None per object, to assign in their place; objects freed by that go at the next collection."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the memory cached by a device's allocator to the device."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def wait_for_everyone() -> None:
    """Return when every rank has called it."""
    PartialState().wait_for_everyone()


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """`torch.save` on rank zero, or safetensors' `save_file`; on the first rank of each machine with
    `save_on_each_node`."""
    state = PartialState()
    if state.is_main_process or (save_on_each_node and state.is_local_main_process):
        if safe_serialization:
            import_module("safetensors.torch").save_file(
                {name: each.contiguous() for name, each in obj.items()}, f, metadata={"format": "pt"}
            )
        else:
            torch.save(obj, f)


load = torch.load


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's module. Other arguments have no effect, except `keep_torch_compile=False`, which returns the
    uncompiled module."""
    from unisono.torch_private import ORIGINAL  # here: it may import the compiler

    module = model.module if isinstance(model, PreparedModel) else model
    plain: nn.Module = module if keep_torch_compile else getattr(module, ORIGINAL, module)
    return plain


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`unisono.tqdm`; with `main_process_only=False` tqdm's own bar, on every rank."""
    return bar_of_rank_zero(*args, **kwargs) if main_process_only else import_module("tqdm.auto").tqdm(*args, **kwargs)


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set environment variables during the block; their names are converted to upper case."""
    own = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
        os.environ.update(before)


def str_to_bool(value: str) -> int:
    """1 for y, yes, t, true, on, 1; 0 for their opposites; otherwise a ValueError."""
    answers = dict.fromkeys(("y", "yes", "t", "true", "on", "1"), 1)
    answers |= dict.fromkeys(("n", "no", "f", "false", "off", "0"), 0)
    if value.lower() not in answers:
        raise ValueError(f"{value!r} is neither yes nor no; pass one of {', '.join(answers)}")
    return answers[value.lower()]


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The environment variable as a flag."""
    return bool(str_to_bool(os.environ.get(key, str(default))))
