"""Collectives and properties of the current world: the same in a plain script, a DataParallel thread, a spawned worker.

They are not differentiable (those of `unisono.functional` are), so tensors that require grad are refused before
anything is sent. Ranks announce the structure of nested values first: equal tensors in another order, or under other
names, would mix the labels of one rank with the predictions of another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.arguments import check_type
from unisono.comm.operations import HOST
from unisono.protocols import ReduceOp
from unisono.report.timeline import REDUCE
from unisono.tree import leaves, tree_map
from unisono.world import World, current_world

_SHOWN = 400  # characters of the description of a structure


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
    the structure of the batch: in lock-step, ranks with different ones would gather unrelated leaves together. `gather`
    takes tensors that have one shape on all ranks."""
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
    """Refuse (ValueError) a tensor whose gradient the collective would drop; `way_out` is one that keeps it."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} got a tensor that requires grad, and its result would have no gradient; pass x.detach() for the "
            f"value, or call unisono.functional.{way_out or name}(x) for a result with a gradient"
        )


def check_samples(batch: Any, valid_samples: int, dim: int) -> None:
    """Refuse (TypeError, ValueError) anything but a tensor with that many samples along that dimension."""
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


def num_rows(values: Any) -> int:
    """Return the number of rows, the same for every tensor; otherwise TypeError or ValueError."""
    rows = set()
    for leaf in leaves(values):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            what = "a tensor of no dimension" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            raise TypeError(f"values hold {what}, which has no samples; gather it with gather(), or leave it out")
        rows.add(len(leaf))
    if not rows:
        raise TypeError(f"values={values!r} hold no tensor; pass one, or a nesting of them")
    if len(rows) > 1:
        raise ValueError(f"values have {sorted(rows)} rows; each tensor must have one row for each sample")
    return rows.pop()


def broadcast(tensor: torch.Tensor, root: int = 0, world: World | None = None) -> torch.Tensor:
    """Overwrite a tensor with the root's, in place, and return it.

    Args:
        tensor: of the same shape and type on all ranks.
        root: the rank whose values are sent.

    Raises:
        ValueError: `root` is not a rank of the world; or the tensor requires grad.
        BrokenWorldError, CollectiveMismatchError: as for `all_reduce`.
    """
    refuse_gradient(tensor, "broadcast", "all_gather")
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
    refuse_within_round("barrier", world)
    with world.timeline.loop().span(REDUCE), world.state.deliveries.evaluations.aside():
        world.comm.barrier()


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


def refuse_within_round(name: str, world: World, is_of_batch: bool = False) -> None:
    """Refuse (RuntimeError) what ranks do together for each batch, where their numbers of batches differ; what is of a
    batch, at the end of a round, too."""
    loop = next(iter(world.state.deliveries.open_loops()), None)
    draw = None if loop is None or loop.last is None else loop.last.draw
    if draw is None or not draw.carried.balances or (draw.ends_round and not is_of_batch):
        return
    if (loop is not None and loop.num_used) or not draw.carried.fills:
        raise RuntimeError(
            f"{name} came in the middle of a round, and with Virtual(balance=True) the ranks have different numbers of "
            "batches in it: call it where accelerator.sync_gradients is true, after optimizer.step(); Mean and "
            "Accuracy take each batch, and gather when they compute; evaluate in a loop under torch.no_grad()"
        )


def _enter(name: str, values: Any, world: World, with_gradient: str | None, has_shapes: bool = True) -> None:
    """Refuse values that cannot be sent, and compare the structure with the other ranks'. `with_gradient` is the
    function of `unisono.functional` for tensors that require grad; None if these are allowed."""
    called = name.split()[0]
    refuse_within_round(called, world)
    for each in leaves(values):
        if not isinstance(each, torch.Tensor):
            raise TypeError(
                f"{called} takes tensors, and got {each!r:.100}, a {type(each).__name__}, on rank {world.rank}; pass a "
                "tensor, or a nesting of tensors, or gather other objects by unisono.all_gather_object"
            )
        if with_gradient is not None:
            refuse_gradient(each, called, with_gradient)
    announce_structure(name, values, world, has_shapes)


def announce_structure(name: str, values: Any, world: World, has_shapes: bool = False) -> None:
    """Compare the structure of the values of an operation with the other ranks'; if one differs, this or the next call
    raises CollectiveMismatchError."""
    described = _describe(values, with_shape if has_shapes else lambda each: f"{each.dtype}, {each.ndim}-dim")
    if len(described) > _SHOWN:
        # The checksum stands for the part that is cut off, so that a difference there is found, too.
        described = f"{described[:_SHOWN]}... ({zlib.crc32(described.encode()):08x})"
    world.comm.announce(f"{name} of {described}")


def with_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _describe(values: Any, describe_tensor: Callable[[torch.Tensor], str]) -> str:
    """Describe the structure, in words that are equal for ranks whose tensors correspond."""
    if isinstance(values, torch.Tensor):
        return describe_tensor(values)
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{key!r}: {_describe(each, describe_tensor)}" for key, each in values.items()) + "}"
    if isinstance(values, list | tuple):
        return f"{type(values).__name__}({', '.join(_describe(each, describe_tensor) for each in values)})"
    return f"{type(values).__name__}({', '.join(describe_tensor(each) for each in leaves(values))})"
