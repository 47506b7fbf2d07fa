"""Collectives over nested structures: all of their tensors are gathered, reduced or padded, and the structure is kept.

Before anything is sent, each rank announces its structure: its containers, and the shapes and types of its tensors. So
ranks with different structures get an error that names two of them, and never each other's tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.comm.operations import HOST
from unisono.parallel.collectives import all_gather, all_reduce, refuse_gradient
from unisono.parallel.structures import announce_structure, with_shape
from unisono.protocols import ReduceOp
from unisono.tree import leaves, tree_map
from unisono.world import World


def gather_nested(values: Any, dim: int, world: World) -> Any:
    """As `Accelerator.gather`."""
    _enter("gather", values, world, "all_gather")
    return tree_map(lambda each: all_gather(each, dim, world), values)


def reduce_nested(values: Any, reduction: ReduceOp, scale: float, world: World) -> Any:
    """As `Accelerator.reduce`."""
    _enter(f"reduce with {reduction!r}", values, world, "all_reduce")

    def reduced(each: torch.Tensor) -> torch.Tensor:
        result = all_reduce(each.detach().clone(), reduction, world)  # works in place
        return result if scale == 1 else result * scale

    return tree_map(reduced, values)


def pad_nested(values: Any, dim: int, pad_index: float, pad_first: bool, world: World) -> Any:
    """As `Accelerator.pad_across_processes`."""
    _enter(f"pad_across_processes along {dim}", values, world, None, has_shapes=False)
    padded = [each for each in leaves(values) if -each.ndim <= dim < each.ndim]
    if not padded:
        return values
    sizes = all_reduce(torch.tensor([each.shape[dim] for each in padded], device=HOST), "max", world).tolist()
    # By identity, since `leaves` and `tree_map` visit a tensor that occurs twice once.
    largest = dict(zip(map(id, padded), sizes, strict=True))

    def pad(each: torch.Tensor) -> torch.Tensor:
        missing = largest.get(id(each), 0) - (each.shape[dim] if id(each) in largest else 0)
        if not missing:
            return each
        shape = list(each.shape)
        shape[dim] = missing
        filling = each.new_full(shape, pad_index)
        return torch.cat([filling, each] if pad_first else [each, filling], dim)

    return tree_map(pad, values)


def _enter(name: str, values: Any, world: World, with_gradient: str | None, has_shapes: bool = True) -> None:
    """Refuse values that cannot be sent, and compare the structure with the other ranks'.

    Args:
        with_gradient: the function of `unisono.functional` for tensors that require grad; None if such tensors are
            allowed.
        has_shapes: whether the shapes must be equal on all ranks.

    Raises:
        TypeError: something in it is not a tensor.
        ValueError: a tensor requires grad.
        CollectiveMismatchError: another rank's differs.
    """
    called = name.split()[0]
    for each in leaves(values):
        if not isinstance(each, torch.Tensor):
            raise TypeError(
                f"{called} takes tensors, and got {each!r:.100}, a {type(each).__name__}, on rank {world.rank}; pass a "
                "tensor, or a nesting of tensors, or gather other objects by unisono.all_gather_object"
            )
        if with_gradient is not None:
            refuse_gradient(each, called, with_gradient)
    announce_structure(name, values, world, with_shape if has_shapes else None)
