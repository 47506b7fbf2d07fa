"""Collectives over all replicas or groups of them, and optimizer steps.

`pin_layout`, and what follows it (`bucket_cap_mb`, `channel_id`, `use_global_device_ids`), has no effect. Nothing here
is differentiable; `functions.all_reduce` and `all_gather` are. Arguments that do not fit are a TypeError or a
ValueError; replicas whose calls do not fit one another get the errors of `unisono.all_reduce`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

import unisono
from unisono import World, current_world
from unisono.building_blocks import check_choice, check_type, disable_dynamo, reduce_by_hand
from unisono.compat.torch_xla.core.steps import mark_step
from unisono.protocols import ReduceOp

REDUCE_SUM, REDUCE_MUL, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR = "sum", "mul", "min", "max", "and", "or"

Groups = Sequence[Sequence[int]] | None
"""Lists of ordinals, with each replica in exactly one. A replica is reduced over its own group, and all replicas must
call."""

_FOLDS: dict[str, tuple[ReduceOp | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    REDUCE_SUM: ("sum", torch.add),
    REDUCE_MUL: ("product", torch.mul),
    REDUCE_MIN: ("min", torch.minimum),
    REDUCE_MAX: ("max", torch.maximum),
    REDUCE_AND: (None, torch.bitwise_and),
    REDUCE_OR: (None, torch.bitwise_or),
}
"""How all replicas reduce, where there is an operation for it, and how two tensors of a group are combined."""


@disable_dynamo
@torch.no_grad()
def all_reduce(
    reduce_type: str, inputs: Any, scale: float = 1.0, groups: Groups = None, pin_layout: bool = True
) -> Any:
    """Reduce over the replicas, then multiply by `scale`.

    Args:
        reduce_type: "sum", "mul", "min", "max"; bitwise "and" and "or" for integers and bools.
        inputs: a tensor, which yields a new one; or a list of tensors, which are reduced in place and returned.
    """
    check_choice(reduce_type, "reduce_type", *_FOLDS)
    world = current_world()
    group = own_group(groups, world)
    if isinstance(inputs, torch.Tensor):
        return _reduce_tensor(reduce_type, inputs, scale, group, world)
    for each in inputs:
        each.copy_(_reduce_tensor(reduce_type, each, scale, group, world))
    return inputs


def _reduce_tensor(
    reduce_type: str, tensor: torch.Tensor, scale: float, group: list[int] | None, world: World
) -> torch.Tensor:
    op, fold = _FOLDS[reduce_type]
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    if is_whole and scale != 1:
        raise TypeError(f"scale={scale} would round {tensor.dtype} numbers; convert to a floating type first")
    if op is None and not is_whole:
        raise TypeError(f"all_reduce of {tensor.dtype} has no {reduce_type!r}; convert to an integer type or to bool")
    if group is None and op is not None:
        result = unisono.all_reduce(tensor.detach().clone(), op, world)
    else:
        result = functools.reduce(fold, _gather_group(tensor, group, world))
    return result if scale == 1 else result.mul_(scale)


def _gather_group(tensor: torch.Tensor, group: list[int] | None, world: World) -> list[torch.Tensor]:
    """The tensors of this replica's group; every replica receives all tensors."""
    parts = unisono.all_gather(tensor.detach()[None], 0, world)
    return [parts[rank] for rank in group or range(world.world_size)]


@disable_dynamo
@torch.no_grad()
def all_gather(
    value: Any,
    dim: int = 0,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
    bucket_cap_mb: Any = None,
) -> Any:
    """Concatenate the replicas' tensors, of equal shapes, along `dim`, by ordinal; zero-dimensional tensors are
    stacked.

    Args:
        value: a tensor, or a list of them, which yields a list.
        output: written and returned in place of new tensors; resized to the results' shapes.
    """
    world = current_world()
    group = own_group(groups, world)

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if group is None:
            return unisono.all_gather(tensor.detach(), dim, world)
        parts = _gather_group(tensor, group, world)
        return torch.stack(parts) if tensor.ndim == 0 else torch.cat(parts, dim)

    return _apply_to_each(gathered, value, output)


all_gather_bucketized = all_gather


@disable_dynamo
@torch.no_grad()
def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
    bucket_cap_mb: Any = None,
) -> Any:
    """Like `all_reduce`, but each replica gets only its own of `shard_count` equal parts along `scatter_dim`; as many
    as there are replicas, or with groups those of its own. `input` and `output` are as for `all_gather`."""
    world = current_world()
    group = own_group(groups, world) or list(range(world.world_size))
    if shard_count != len(group):
        raise ValueError(f"shard_count={shard_count}, but {len(group)} replicas get one part each; pass their number")

    def scattered(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.shape[scatter_dim]
        if size % shard_count:
            raise ValueError(f"shard_count={shard_count} does not divide dimension {scatter_dim}, which has {size}")
        reduced = _reduce_tensor(reduce_type, tensor, scale, group if groups else None, world)
        return reduced.chunk(shard_count, scatter_dim)[group.index(world.rank)].clone()

    return _apply_to_each(scattered, input, output)


reduce_scatter_bucketized = reduce_scatter


def _apply_to_each(fn: Callable[[torch.Tensor], torch.Tensor], value: Any, output: Any) -> Any:
    """Apply `fn` to a tensor, or to each of a list; write the result into `output`, if given."""
    if not isinstance(value, torch.Tensor):
        check_type(value, "value", "pass a tensor or a list of tensors", list, tuple)
        outputs = [None] * len(value) if output is None else output
        if len(outputs) != len(value):
            raise ValueError(f"output has {len(outputs)} tensors for {len(value)}; pass one for each")
        return [_apply_to_each(fn, each, its) for each, its in zip(value, outputs, strict=True)]
    result = fn(value)
    return result if output is None else output.resize_(result.shape).copy_(result)


def own_group(groups: Groups, world: World) -> list[int] | None:
    """The group of this replica; None if there are no groups."""
    if not groups:
        return None
    for group in groups:
        check_type(group, "a group", "pass lists of ordinals, as in [[0, 1], [2, 3]]", list, tuple)
    if sorted(rank for group in groups for rank in group) != list(range(world.world_size)):
        raise ValueError(f"groups={groups} must hold each of the ordinals 0 to {world.world_size - 1} once")
    return next(list(group) for group in groups if world.rank in group)


def reduce_gradients(optimizer: Optimizer, groups: None = None, pin_layout: bool = True) -> None:
    """Replace the gradients by their mean over the replicas; for example, to clip them before `optimizer.step()`.

    As for `unisono.optimizer_step`, the mean is that over all samples, if a loader knows how many each replica had.
    `groups` is a ValueError.
    """
    _refuse_groups(groups)
    world = current_world()
    world.state.brings_batches = True
    reduce_by_hand(optimizer, world)


def _refuse_groups(groups: Any) -> None:
    if groups:
        raise ValueError(f"groups={groups}: gradients are those of all replicas here; reduce others by all_reduce")


def optimizer_step(
    optimizer: Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] = MappingProxyType({}),
    groups: None = None,
    pin_layout: bool = True,
) -> Any:
    """Reduce the gradients over the replicas, then return `optimizer.step(**optimizer_args)`.

    Args:
        barrier: end the step here, as `mark_step` does. Otherwise the loader's next batch ends it.

    Raises:
        ValueError: `groups` are given.
        TypeError, RuntimeError, CollectiveMismatchError, BrokenWorldError: as for `unisono.optimizer_step`.
    """
    _refuse_groups(groups)
    current_world().state.brings_batches = True
    result = unisono.optimizer_step(optimizer, optimizer_args=optimizer_args)
    if barrier:
        mark_step()
    return result


def fetch_gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    """The gradients of the optimizer's parameters that have one. Scripts know it as `xm._fetch_gradients`."""
    return [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]


broadcast_master_param = unisono.broadcast_parameters
