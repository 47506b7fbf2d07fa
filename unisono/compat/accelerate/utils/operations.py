"""Accelerate's operations on nested structures: collectives, and what only maps.

In Accelerate, a gathered or reduced value has no gradient, which goes unnoticed until the model trains wrongly. Here it
raises when a backward pass reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch

import unisono
from unisono import World
from unisono.building_blocks import HOST, gather_nested, leaves, pad_nested, reduce_nested, tensors, tree_map
from unisono.compat.accelerate.state import joined_world
from unisono.compat.left_out import left_out
from unisono.errors import UnisonoError
from unisono.protocols import ReduceOp

__getattr__ = left_out(__name__)

DistributedOperationException = UnisonoError
"""The rank that detects a difference raises a CollectiveMismatchError, the others a BrokenWorldError: none
continues."""


# Collectives.


def gather(tensor: Any, world: World | None = None) -> Any:
    """Every rank's tensors along dim 0; in a world of one the tensors themselves.

    Ranks may have different numbers of rows, as in the last batch, which is split rather than padded: each row occurs
    once. A nesting whose tensors require grad is gathered as values: a backward pass that reaches one is an error.
    """
    world = world or joined_world()
    if world.world_size == 1:
        return tensor
    collect: Callable[[Any], Any] = partial(gather_nested, dim=0, world=world)
    if all(isinstance(each, torch.Tensor) and each.ndim for each in leaves(tensor)):
        collect = partial(tree_map, lambda each: unisono.all_gather_samples(each, len(each), world=world))
    return _without_gradient("gather", collect, tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, world: World | None = None) -> Any:
    """The reduction over the ranks ("mean", "sum", "max", "min"; "none" keeps each rank's own value), times `scale`."""
    world = world or joined_world()
    op: ReduceOp = reduction  # type: ignore[assignment]  # an unknown one is refused below
    if reduction == "none" or world.world_size == 1:
        return tree_map(lambda each: each if scale == 1 else each * scale, tensor)  # times 1.0 would round integers
    return _without_gradient("reduce", lambda values: reduce_nested(values, op, scale, world), tensor)


def _without_gradient(name: str, collect: Callable[[Any], Any], values: Any) -> Any:
    """Collect the values; if they require grad, the result raises in a backward pass."""
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors(values))):
        return collect(values)
    with torch.no_grad():
        collected = collect(values)
    anchor = torch.zeros((), device=HOST, requires_grad=True)
    return tree_map(lambda each: _Cut.apply(anchor, each, name) if each.is_floating_point() else each, collected)


class _Cut(torch.autograd.Function):
    """The value; a backward pass that reaches it raises an error. It keeps no graph of the values."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise RuntimeError(
            f"a backward pass has come to what {ctx.name}() returned, which has no gradient: Accelerate would silently "
            "drop it; call unisono.functional.all_gather or all_reduce for a result with a gradient, or detach() it"
        )


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """See `unisono.Accelerator.pad_across_processes`."""
    return pad_nested(tensor, dim, pad_index, pad_first, joined_world())


def gather_object(object: Any) -> Any:
    """The elements of every rank's list, in rank order; in a world of one the object itself."""
    world = joined_world()
    return object if world.world_size == 1 else list(chain.from_iterable(unisono.all_gather_object(object, world)))


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """That rank's tensors: new ones, in the same nesting; shapes must be equal on each rank."""
    world = joined_world()
    return tree_map(lambda each: unisono.broadcast(each.detach().clone(), from_process, world), tensor)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Rank zero's tensor, on each rank's device; the other ranks pass None."""
    world = joined_world()
    return world.comm.broadcast_object(None if tensor is None else tensor.cpu()).to(world.device)  # type: ignore[no-any-return]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the list's contents by that rank's objects, and return the list."""
    object_list[:] = joined_world().comm.broadcast_object(list(object_list), from_process)
    return object_list


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
    """Move the structure's tensors, and everything with a method `to`, to that device."""
    return tree_map(lambda each: each.to(device) if hasattr(each, "to") else each, tensor)


def wait_for_everyone() -> None:
    """Wait until every rank has called it."""
    unisono.barrier(joined_world())


# Nested structures.


def is_torch_tensor(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The structure with `func(each, *args, **kwargs)` in place of each leaf of that type; others stay, or are a
    TypeError."""

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{getattr(func, '__name__', func)} cannot take a {type(leaf).__name__}; pass tensors")
        return leaf

    return tree_map(apply, data)


def find_batch_size(data: Any) -> int | None:
    """The number of rows of the structure's first tensor; None if it has no tensor."""
    return next((len(each) for each in tensors(data)), None)


def find_device(data: Any) -> torch.device | None:
    """The device of the structure's first tensor; None if it has no tensor."""
    return next((each.device for each in tensors(data)), None)


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """The structure with these rows of each tensor; other arguments have no effect."""
    return recursively_apply(lambda each: each[tensor_slice], data)


def listify(data: Any) -> Any:
    """The structure with lists of numbers in place of tensors."""
    return recursively_apply(lambda each: each.detach().cpu().float().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """The structure with its tensors of 16 bits as float32."""
    half = (torch.float16, torch.bfloat16)
    return recursively_apply(lambda each: each.float() if each.dtype in half else each, tensor)
