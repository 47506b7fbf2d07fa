"""Collectives and facts of the current world: the same in a plain script, a DataParallel thread, a spawned worker."""

from __future__ import annotations

from typing import Any

import torch

from unisono.protocols import ReduceOp
from unisono.timeline import REDUCE
from unisono.world import World, current_world


def rank(world: World | None = None) -> int:
    """This rank, 0 to `world_size() - 1`."""
    return (world or current_world()).rank


def world_size(world: World | None = None) -> int:
    """The number of ranks: processes, or threads of a DataParallel."""
    return (world or current_world()).world_size


def local_rank(world: World | None = None) -> int:
    """This rank among those of this machine."""
    return (world or current_world()).local_rank


def is_rank_zero(world: World | None = None) -> bool:
    """Whether this is the rank that prints and saves."""
    return (world or current_world()).rank == 0


def all_reduce(tensor: torch.Tensor, op: ReduceOp = "sum", world: World | None = None) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place, and return it.

    Args:
        tensor: any shape, the same on each rank.
        op: "sum", "mean", "min", "max" or "product".

    Raises:
        TypeError: the tensor's type does not have the operation ("mean" of integers, say).
        BrokenWorldError: a peer failed or departed.
        CollectiveMismatchError: a peer called something else.
    """
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        return world.comm.all_reduce(tensor, op)


def all_gather(tensor: torch.Tensor, dim: int = 0, world: World | None = None) -> torch.Tensor:
    """Concatenate every rank's tensor along `dim`, in rank order; 0-dim tensors become a vector.

    Args:
        tensor: the same shape on each rank.

    Returns:
        A new tensor, `world_size` times as large along `dim`.

    Raises:
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        parts = world.comm.all_gather(tensor)
    return torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts, dim)


def broadcast(tensor: torch.Tensor, root: int = 0, world: World | None = None) -> torch.Tensor:
    """Overwrite a tensor with the root's, in place, and return it.

    Raises:
        ValueError: `root` is no rank of the world.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        return world.comm.broadcast(tensor, root)


def all_gather_object(value: Any, world: World | None = None) -> list[Any]:
    """A copy of every rank's object, in rank order; anything that can be pickled.

    Raises:
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        return world.comm.all_gather_object(value)


def barrier(world: World | None = None) -> None:
    """Return when every rank has called it.

    Raises:
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        world.comm.barrier()
