"""Reducing gradients: every rank ends with the gradient of the mean loss over all samples of the global batch.

Each rank's gradients, times the step's factor (`steps.py`), are summed in flat buckets. The first bucket has one more
number per parameter: whether it has a gradient. So a parameter without a gradient on some ranks counts as zero there,
and is never paired with another. On accelerators that run asynchronously, these numbers are sent first, from main
memory: reading them from a bucket would wait for the whole backward pass. Sparse gradients
(`nn.Embedding(sparse=True)`) become dense, since a rank may have none, or dense ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unisono.comm.operations import HOST
from unisono.torch_private import foreach_copy_, foreach_mul_, foreach_zero_, sparse_indices, sparse_values
from unisono.world import World

BUCKET_BYTES = 64 * 2**20  # large enough to be bandwidth-bound, small enough not to double a model's memory


def reduce_gradients(
    parameters: Sequence[torch.Tensor],
    world: World,
    factor: float,
    place: str,
    add_up: Callable[[torch.Tensor], Any] | None = None,
) -> None:
    """Replace the gradients, in place, by the sum over the ranks of factor times gradient.

    Args:
        parameters: the same ones in the same order on each rank.
        place: the position of this rank in its loop, in words that are equal on all ranks in lock-step; others are a
            CollectiveMismatchError.
        add_up: replaces a vector by its sum over the ranks; None is the communicator's `all_reduce`.
    """
    if world.comm.size == 1 or not parameters:
        scale_gradients(parameters, factor, in_place=not world.backend.is_lazy)
        return
    for each in parameters:
        if each.grad is not None and each.grad.layout is not torch.strided:
            each.grad = each.grad.to_dense()
    world.comm.announce(f"the gradients of {place}")
    notes = [float(parameter.grad is not None) for parameter in parameters]
    present: set[int] = set()
    # Sent on their own where reading them from a bucket would wait.
    if world.is_hosted or world.backend.is_accelerated():
        present = _ids_with_gradient(world.comm.all_reduce(torch.tensor(notes, device=HOST)), parameters)
        notes = []
    for bucket in buckets(parameters):
        flat = _flatten(bucket, factor, notes)
        (add_up or world.comm.all_reduce)(flat)
        if notes:
            present = _ids_with_gradient(flat[-len(notes) :], parameters)
            flat, notes = flat[: -len(notes)], []
        _unflatten(flat, bucket, present, in_place=not world.backend.is_lazy)


def is_sparse(tensor: torch.Tensor | None) -> bool:
    """Whether it is a sparse tensor of rows with indices."""
    return tensor is not None and tensor.layout is torch.sparse_coo


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor; or the indices and the rows of a sparse one, as they are."""
    return [sparse_indices(tensor), sparse_values(tensor)] if is_sparse(tensor) else [tensor]


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or the rows of a sparse one; repeated rows are separate unless it is coalesced."""
    return parts_of(tensor)[-1]


@torch.no_grad()
def scale_gradients(parameters: Sequence[torch.Tensor], factor: float, in_place: bool = True) -> None:
    """Multiply the gradients; multiplying by 0 also clears non-finite values."""
    gradients = []
    for each in parameters if factor != 1 else ():
        if each.grad is not None and in_place and not is_sparse(each.grad):
            gradients.append(each.grad)
        elif each.grad is not None:
            each.grad = each.grad * factor if factor else torch.zeros_like(each.grad)
    if gradients and factor == 0:
        foreach_zero_(gradients)
    elif gradients:
        foreach_mul_(gradients, factor)


def scaled(factor: float, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Scale a gradient in a hook: returning None leaves it unchanged, and autograd passes None for a missing one.
    Multiplying by 0 gives zero also for non-finite values, such as the mean over no samples."""
    if gradient is None or factor == 1:
        return None
    return gradient * factor if factor else torch.zeros_like(gradient)


def scale_in_place(tensor: torch.Tensor, factor: float) -> None:
    """Multiply; multiplying by 0 also clears non-finite values, such as the mean over no samples."""
    if factor == 0:
        tensor.zero_()
    elif factor != 1:
        tensor.mul_(factor)


def check_presence(parameters: Sequence[torch.Tensor]) -> None:
    """Refuse (RuntimeError) to step if no parameter has a gradient; after the reduction all ranks have the same, so all
    refuse or none does."""
    if parameters and all(each.grad is None for each in parameters):
        raise RuntimeError(
            f"none of the optimizer's {len(parameters)} parameters has a gradient; call loss.backward() before the "
            "step, on every rank, on a loss that depends on them, and zero_grad() after it. (Create the optimizer "
            "after model.to(device), which on some devices, such as XLA's, replaces the parameters by new ones.)"
        )


def _ids_with_gradient(counts: torch.Tensor, parameters: Sequence[torch.Tensor]) -> set[int]:
    """The parameters that have a gradient on some rank; `counts` says on how many."""
    return {id(parameter) for parameter, count in zip(parameters, counts.tolist(), strict=True) if count}


def buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group parameters of one type and device, in order, into buckets of at most `BUCKET_BYTES` or one parameter."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for group in groups.values():
        bucket: list[torch.Tensor] = []
        for parameter in group:
            if bucket and sum(each.nbytes for each in bucket) + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


@torch.no_grad()
def _flatten(bucket: list[torch.Tensor], scale: float, notes: list[float]) -> torch.Tensor:
    """The bucket's gradients, scaled, concatenated in one new vector, followed by the flags."""
    # Zeros for a missing gradient: the buckets of all ranks must have one layout.
    pieces = [(torch.zeros_like(each) if each.grad is None else each.grad).reshape(-1) for each in bucket]
    flat = torch.cat([*pieces, pieces[0].new_tensor(notes)])
    scale_in_place(flat[: len(flat) - len(notes)], scale)  # `[:-0]` would be empty; the flags are not scaled
    return flat


@torch.no_grad()
def _unflatten(flat: torch.Tensor, bucket: list[torch.Tensor], present: set[int], in_place: bool) -> None:
    """Assign each parameter its piece; not in place on lazy devices, where a gradient may be a view of one number."""
    pieces = flat.split([each.numel() for each in bucket])
    held: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for parameter, part in zip(bucket, pieces, strict=True):
        piece = part.view_as(parameter)
        if parameter.grad is not None and in_place:
            held.append(parameter.grad)
            new.append(piece)
        # A gradient on some rank becomes one on all, or the ranks' optimizers would step different parameters.
        elif parameter.grad is not None or id(parameter) in present:
            # A view would keep the memory of the whole bucket as long as one of its gradients exists.
            parameter.grad = piece.clone()
    if held:
        foreach_copy_(held, new)
