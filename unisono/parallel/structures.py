"""Descriptions of nested values, by which differences between ranks are reported before anything is sent.

Otherwise equal tensors in a different order, or under other names, would mix the labels of one rank with the
predictions of another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.tree import leaves
from unisono.world import World

_SHOWN = 400  # characters of a description


def announce_structure(
    name: str, values: Any, world: World, describe_tensor: Callable[[torch.Tensor], str] | None = None
) -> None:
    """Compare the structure of the values with the other ranks'.

    Args:
        name: the operation.
        describe_tensor: describes a tensor in words that are equal on all ranks; None uses its type and number of
            dimensions.

    Raises:
        CollectiveMismatchError: the structure of another rank differs; raised here, or in the next call.
    """
    described = _describe(values, describe_tensor or _without_sizes)
    if len(described) > _SHOWN:
        # The checksum stands for the part that is cut off, so that a difference there is found, too.
        described = f"{described[:_SHOWN]}... ({zlib.crc32(described.encode()):08x})"
    world.comm.announce(f"{name} of {described}")


def with_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _without_sizes(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}, {tensor.ndim}-dim"


def _describe(values: Any, describe_tensor: Callable[[torch.Tensor], str]) -> str:
    """Describe the structure, in words that are equal for ranks whose tensors correspond."""
    if isinstance(values, torch.Tensor):
        return describe_tensor(values)
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{key!r}: {_describe(each, describe_tensor)}" for key, each in values.items()) + "}"
    if isinstance(values, list | tuple):
        return f"{type(values).__name__}({', '.join(_describe(each, describe_tensor) for each in values)})"
    return f"{type(values).__name__}({', '.join(describe_tensor(each) for each in leaves(values))})"
