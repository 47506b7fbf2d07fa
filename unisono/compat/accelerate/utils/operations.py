"""`accelerate.utils.operations`: collectives and maps over nested structures.

In Accelerate, a gathered or reduced value has no gradient, which goes unnoticed until the model trains wrongly. Here it
raises when a backward pass reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NoReturn

import torch

from unisono.compat.accelerate.state import joined_world
from unisono.compat.left_out import left_out
from unisono.errors import UnisonoError
from unisono.parallel import collectives
from unisono.parallel.collectives import gather_nested, pad_nested, reduce_nested
from unisono.protocols import ReduceOp
from unisono.tree import batch_size, leaves, take, tensors, tree_map
from unisono.world import World

DistributedOperationException = UnisonoError
"""The rank that detects a difference raises a CollectiveMismatchError, the others a BrokenWorldError: none
continues."""


__getattr__ = left_out(__name__)


def gather(tensor: Any, world: World | None = None) -> Any:
    """Every rank's tensors along dim 0; in a world of one the tensors themselves.

    Ranks may have different numbers of rows, as in the last batch, which is split rather than padded: each row occurs
    once. A nesting whose tensors require grad is gathered as values: a backward pass that reaches one is an error.
    """
    world = world or joined_world()
    if world.world_size == 1:
        return tensor
    return _without_gradient("gather", lambda values: _gather_rows(values, world), tensor)


def _gather_rows(values: Any, world: World) -> Any:
    if not all(isinstance(each, torch.Tensor) and each.ndim for each in leaves(values)):
        return gather_nested(values, 0, world)
    return tree_map(lambda each: collectives.all_gather_samples(each, len(each), world=world), values)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, world: World | None = None) -> Any:
    """The reduction over the ranks ("mean", "sum", "max", "min"; "none" keeps each rank's own value), times `scale`."""
    world = world or joined_world()
    op: ReduceOp = reduction  # type: ignore[assignment]  # an unknown one is refused below
    if reduction == "none" or world.world_size == 1:
        return tree_map(lambda each: each * scale, tensor)
    return _without_gradient("reduce", lambda values: reduce_nested(values, op, scale, world), tensor)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """See `unisono.Accelerator.pad_across_processes`."""
    return pad_nested(tensor, dim, pad_index, pad_first, joined_world())


def gather_object(object: Any) -> Any:
    """The elements of every rank's list, in rank order; in a world of one the object itself."""
    world = joined_world()
    return object if world.world_size == 1 else list(chain.from_iterable(collectives.all_gather_object(object, world)))


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """That rank's tensors: new ones, in the same nesting; shapes must be equal on each rank."""
    world = joined_world()
    return tree_map(lambda each: collectives.broadcast(each.detach().clone(), from_process, world), tensor)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Rank zero's tensor, on each rank's device; the other ranks pass None."""
    world = joined_world()
    value: torch.Tensor = world.comm.broadcast_object(tensor.cpu() if tensor is not None else None)
    return value.to(world.device)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the list's contents by that rank's objects, and return the list."""
    object_list[:] = joined_world().comm.broadcast_object(list(object_list), from_process)
    return object_list


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move the structure's tensors, and everything with a method `to`, to that device; but in a mapping, not the values
    under `skip_keys`."""
    if skip_keys is not None and isinstance(tensor, Mapping):
        skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys)
        moved = {key: each if key in skipped else send_to_device(each, device) for key, each in tensor.items()}
        return type(tensor)(moved) if type(tensor) is not dict else moved  # type: ignore[call-arg]
    return tree_map(lambda each: each.to(device) if hasattr(each, "to") else each, tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = torch.is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Replace each leaf that passes the test by `func(leaf, *args, **kwargs)`; other leaves are kept, or raise a
    TypeError."""

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{getattr(func, '__name__', func)} takes tensors, and got a {type(leaf).__name__}")
        return leaf

    return tree_map(apply, data)


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Concatenate the corresponding tensors of structures of the same form."""
    columns = zip(*(leaves(each) for each in data), strict=True)
    joined = iter([torch.cat(list(column), dim) for column in columns])
    return tree_map(lambda _: next(joined), data[0])


def find_batch_size(data: Any) -> int | None:
    """The size of dim 0 of the first tensor in it that has dimensions."""
    return next((len(each) for each in tensors(data) if each.ndim), None)


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """The structure with these rows of its tensors."""
    return take(data, *tensor_slice.indices(batch_size(data) or 0)[:2])


def listify(data: Any) -> Any:
    """The structure with lists of numbers in place of tensors."""
    return recursively_apply(lambda each: each.tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """The structure with half-precision tensors converted to float32."""
    halves = (torch.float16, torch.bfloat16)
    return recursively_apply(torch.Tensor.float, tensor, test_type=lambda each: getattr(each, "dtype", None) in halves)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with outputs in full precision."""
    return lambda *args, **kwargs: convert_to_fp32(model_forward(*args, **kwargs))


def _without_gradient(name: str, collect: Callable[[Any], Any], values: Any) -> Any:
    """Collect the values; if they require grad, the result raises in a backward pass."""
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors(values))):
        return collect(values)
    with torch.no_grad():
        collected = collect(values)
    anchor = torch.zeros((), requires_grad=True)
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
