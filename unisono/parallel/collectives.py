"""Collectives and properties of the current world: the same in a plain script, a DataParallel thread, a spawned worker.

They are not differentiable (those of `unisono.functional` are), so tensors that require grad are refused before
anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.arguments import check_type
from unisono.comm.operations import HOST
from unisono.parallel.structures import announce_structure
from unisono.protocols import ReduceOp
from unisono.timeline import REDUCE
from unisono.tree import leaves, tree_map
from unisono.world import World, current_world


def rank(world: World | None = None) -> int:
    """Return this rank, 0 to `world_size() - 1`."""
    return (world or current_world()).rank


def world_size(world: World | None = None) -> int:
    """Return the number of ranks: processes, or threads of a DataParallel."""
    return (world or current_world()).world_size


def local_rank(world: World | None = None) -> int:
    """Return this rank's number among those of this machine."""
    return (world or current_world()).local_rank


def is_rank_zero(world: World | None = None) -> bool:
    """Whether this is rank zero, the one that prints and saves."""
    return (world or current_world()).rank == 0


def all_reduce(tensor: torch.Tensor, op: ReduceOp = "sum", world: World | None = None) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place, and return it.

    Args:
        tensor: any shape, the same on each rank.
        op: "sum", "mean", "min", "max" or "product".

    Raises:
        ValueError: the tensor requires grad; or `op` is unknown.
        TypeError: the tensor's dtype does not support `op` ("mean" of integers, for example).
        BrokenWorldError: a peer failed or left.
        CollectiveMismatchError: a peer made a different call.
    """
    refuse_gradient(tensor, "all_reduce")
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        return world.comm.all_reduce(tensor, op)


def all_gather(tensor: torch.Tensor, dim: int = 0, world: World | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along `dim`, in rank order; 0-dim tensors become a vector.

    Args:
        tensor: the same shape on each rank.

    Returns:
        A new tensor, `world_size` times as large along `dim`.

    Raises:
        ValueError: the tensor requires grad.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    refuse_gradient(tensor, "all_gather")
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        parts = world.comm.all_gather(tensor)
    return torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts, dim)


def all_gather_samples(batch: Any, valid_samples: int, dim: int = 0, world: World | None = None) -> Any:
    """Gather the valid samples of all ranks, in rank order: the input of a metric, with each sample exactly once.

    Args:
        batch: a tensor, or any nesting of tensors, with samples along `dim`: predictions and labels, for example. The
            ranks may have different numbers of samples. (For strings and other objects use `all_gather_object`.)
        valid_samples: how many of them count, from the front: `loader.valid_samples`.

    Returns:
        The same nesting; each tensor has all ranks' samples along `dim`.

    Raises:
        TypeError: something in the batch is not a tensor, or `valid_samples` is not an integer.
        ValueError: a tensor has fewer samples than that, or no such dimension; or it requires grad.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    check_samples(batch, valid_samples, dim)
    for leaf in leaves(batch):
        refuse_gradient(leaf, "all_gather_samples")
    with world.timeline.loop().span(REDUCE):
        announce_structure(f"all_gather_samples along {dim}", batch, world)
        return gather_samples(batch, valid_samples, dim, world.comm.all_gather, world)


def gather_samples(
    batch: Any, valid_samples: int, dim: int, gather: Callable[[torch.Tensor], Sequence[torch.Tensor]], world: World
) -> Any:
    """The samples of all ranks, gathered as tensors padded to the largest number of samples. The caller has announced
    the structure of the batch: in lock-step, ranks with other ones would gather unrelated leaves together.

    Args:
        gather: gathers the tensors of all ranks, which have one shape.
    """
    counts = world.comm.all_gather(torch.tensor([valid_samples], device=HOST))
    numbers = [int(count) for count in counts]

    def gather_leaf(leaf: Any) -> Any:
        own = leaf.narrow(dim, 0, valid_samples)
        missing = list(own.shape)
        missing[dim] = max(numbers) - valid_samples  # the ranks' tensors must have one shape
        parts = gather(torch.cat([own, own.new_zeros(missing)], dim))
        return torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, numbers, strict=True)], dim)

    return tree_map(gather_leaf, batch)


def refuse_gradient(tensor: Any, name: str, way_out: str | None = None) -> None:
    """Refuse a tensor whose gradient the collective would silently drop.

    Args:
        name: the name of the collective.
        way_out: the name of its differentiable counterpart; None if it is the same.

    Raises:
        ValueError: the tensor requires grad, and gradients are recorded.
    """
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} got a tensor that requires grad, and its result would have no gradient; pass x.detach() for the "
            f"value, or call unisono.functional.{way_out or name}(x) for a result with a gradient"
        )


def check_samples(batch: Any, valid_samples: int, dim: int) -> None:
    """Refuse batches without that many samples.

    Raises:
        TypeError: something in the batch is not a tensor, or `valid_samples` is not an integer.
        ValueError: a tensor has fewer samples than that, or no such dimension.
    """
    unknown = "a loader's is None where a batch does not say how many samples it holds; count them, as in len(labels)"
    check_type(valid_samples, "valid_samples", unknown if valid_samples is None else "pass an integer", int)
    for leaf in leaves(batch):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"the batch holds a {type(leaf).__name__}, and only tensors are gathered by samples; make it a tensor, "
                "or pass it to all_gather_object"
            )
        if not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(f"a tensor of shape {tuple(leaf.shape)} has no dimension {dim} for its samples")
        if not 0 <= valid_samples <= leaf.shape[dim]:
            raise ValueError(
                f"valid_samples={valid_samples}, but a tensor has {leaf.shape[dim]} samples along dim {dim}"
            )


def broadcast(tensor: torch.Tensor, root: int = 0, world: World | None = None) -> torch.Tensor:
    """Overwrite a tensor with the root's, in place, and return it.

    Args:
        tensor: of the same shape and type on all ranks.
        root: the rank whose values are sent.

    Raises:
        ValueError: `root` is not a rank of the world; or the tensor requires grad.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    refuse_gradient(tensor, "broadcast")
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        return world.comm.broadcast(tensor, root)


def all_gather_object(value: Any, world: World | None = None) -> list[Any]:
    """Gather a copy of every rank's object, in rank order; anything that can be pickled.

    Raises:
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        return world.comm.all_gather_object(value)


def barrier(world: World | None = None) -> None:
    """Wait until every rank has called it.

    Raises:
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        world.comm.barrier()
