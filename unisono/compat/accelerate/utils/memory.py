"""`accelerate.utils.memory`: batch sizes that fit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from unisono.parallel import out_of_memory

should_reduce_batch_size = out_of_memory.is_out_of_memory


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """As `unisono.find_executable_batch_size`, on all ranks together.

    Args:
        reduce_batch_size_fn: takes nothing, and gives the next size; None takes nine tenths of the one before, as
            Accelerate does.
    """
    given = reduce_batch_size_fn
    reduce = (lambda size: size * 9 // 10) if given is None else (lambda _: given())
    if function is None:
        return out_of_memory.find_executable_batch_size(None, starting_batch_size, reduce)
    return out_of_memory.find_executable_batch_size(function, starting_batch_size, reduce)


def release_memory(*objects: Any) -> list[None]:
    """As many Nones, to put in their places; and what is garbage then goes at the next collection."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that a device's allocator has cached back to the device."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
