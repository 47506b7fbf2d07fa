"""`accelerate.utils.memory`: batch sizes that fit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from unisono.parallel import out_of_memory


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
