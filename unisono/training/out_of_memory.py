"""Finds the largest batch size that fits: attempts with decreasing sizes, on all ranks together.

After each attempt the ranks exchange whether one of them ran out of memory, and retry together. They meet only there:
if a rank ran out of memory while its peers wait for it inside the attempt, as in a reduction, all of them get a
`CollectiveMismatchError`, since a collective that others have begun cannot be cancelled.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from unisono.arguments import check_integer
from unisono.comm.operations import HOST
from unisono.errors import BrokenWorldError, CollectiveMismatchError, UnisonoError
from unisono.training.collectives import all_reduce
from unisono.world import World, current_world

_WORDS = ("out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED", "CUDNN_STATUS_NOT_SUPPORTED")
"""The messages of allocators: torch's for each family, XLA's, and cuDNN's, which then finds no algorithm."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help: a device, or main memory, was full."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, UnisonoError)
    return is_of_torch and any(words in str(error) for words in _WORDS)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[int], int] = lambda size: size // 2,
) -> Callable[..., Any]:
    """Decorator: call `function(batch_size, ...)` with smaller and smaller sizes until no rank runs out of memory.

        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size):
            accelerator.free_memory()  # release the previous attempt
            model, optimizer, loader = accelerator.prepare(*build(batch_size))
            ...

        train()

    Every rank must call it, and all of them retry if one ran out of memory. A failed attempt releases the tensors of
    its calls; those that the function has stored elsewhere remain. Each call begins with `starting_batch_size`.

    Args:
        function: its first argument is the size; the arguments of the decorated function follow.
        starting_batch_size: tried first; the same on each rank.
        reduce_batch_size_fn: the next size, from the one that failed; the default halves it.

    Raises:
        TypeError, ValueError: `starting_batch_size` is not a positive integer, or the next size is not smaller.
        RuntimeError: no size was left; the message names those that were tried. Its `__cause__` is missing on purpose:
            it would hold the attempt's tensors.
        CollectiveMismatchError: a rank ran out of memory while others waited for it in a collective of the attempt.
    """
    check_integer(starting_batch_size, "starting_batch_size", 1)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def attempt(*args: Any, **kwargs: Any) -> Any:
            world, tried = current_world(), [starting_batch_size]
            while True:
                result, reason = _attempt(function, tried[-1], args, kwargs)
                if not _failed_anywhere(reason, tried[-1], world):
                    return result
                # This rank may have succeeded where another failed; its result occupies memory, too.
                del result
                gc.collect()  # a device's allocator releases its free memory itself before it fails
                world.state.restart()
                tried.append(_next_size(reduce_batch_size_fn, tried, reason))

        return attempt

    return decorate if function is None else decorate(function)


def _attempt(function: Callable[..., Any], size: int, args: Any, kwargs: Any) -> tuple[Any, str]:
    """The result of the function, or None; and the reason if memory ran out, otherwise ""."""
    try:
        return function(size, *args, **kwargs), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The text alone: the error's traceback would keep the tensors of the attempt alive.
        return None, str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _failed_anywhere(reason: str, size: int, world: World) -> bool:
    """Whether some rank ran out of memory. A collective."""
    try:
        world.comm.announce(
            f"the end of an attempt with batch size {size}, where a rank comes early that ran out of memory"
        )
        return bool(all_reduce(torch.tensor(int(bool(reason)), device=HOST), "max", world))
    except (BrokenWorldError, CollectiveMismatchError) as error:
        if reason:
            error.add_note(
                f"rank {world.rank} ran out of memory with batch size {size} ({reason}), and the others wait for it "
                "inside the attempt, which cannot be undone; start from a smaller size"
            )
        raise


def _next_size(reduce: Callable[[int], int], tried: list[int], reason: str) -> int:
    size = reduce(tried[-1])
    if size >= tried[-1]:
        raise ValueError(f"reduce_batch_size_fn gave {size} after {tried[-1]}; it must give a smaller size")
    if size < 1:
        why = f"on this rank: {reason}" if reason else "on another rank"
        raise RuntimeError(
            f"No executable batch size found, reached zero: {', '.join(map(str, tried))} were tried, and each ran out "
            f"of memory (the last one {why}); use a smaller model, a larger device, or strategy='fsdp'"
        )
    return size
