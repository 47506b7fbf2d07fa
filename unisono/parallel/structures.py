"""What nested values look like, in words: differences between ranks are reported before anything is sent.

Equal tensors in another order, or under other names, are one rank's labels among the other's predictions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.tree import leaves
from unisono.world import World

_SHOWN = 400  # characters of a structure


def announce_structure(
    name: str, values: Any, world: World, describe_tensor: Callable[[torch.Tensor], str] | None = None
) -> None:
    """Compare the structure of the values with the other ranks'.

    Args:
        name: of what is done with them.
        describe_tensor: in words that are equal on all ranks; None takes type and number of dimensions.

    Raises:
        CollectiveMismatchError: another rank's differs; here, or in the next call.
    """
    described = _describe(values, describe_tensor or _without_sizes)
    if len(described) > _SHOWN:
        described = f"{described[:_SHOWN]}... ({zlib.crc32(described.encode()):08x})"
    world.comm.announce(f"{name} of {described}")


def with_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _without_sizes(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}, {tensor.ndim}-dim"


def _describe(values: Any, describe_tensor: Callable[[torch.Tensor], str]) -> str:
    """The structure in words: equal for two ranks whose tensors belong together."""
    if isinstance(values, torch.Tensor):
        return describe_tensor(values)
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{key!r}: {_describe(each, describe_tensor)}" for key, each in values.items()) + "}"
    if isinstance(values, list | tuple):
        return f"{type(values).__name__}({', '.join(_describe(each, describe_tensor) for each in values)})"
    return f"{type(values).__name__}({', '.join(describe_tensor(each) for each in leaves(values))})"
