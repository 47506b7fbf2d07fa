"""Reducing gradients: every rank ends with the gradient of the mean loss over all samples of the global batch.

A rank's gradient g_r is that of the mean over its own n_r samples. With N samples over all ranks,

    grad of the mean over N samples  =  sum over r of (n_r / N) g_r

so each rank scales its gradient by its share n_r / N and the sum over the ranks is exact, however unevenly the batch
was dealt. Where no share is known, it is the plain mean over the ranks, n_r / N = 1 / size. For gradients that weigh
something else already, `ledger.py` has the factor.

Gradients travel in flat buckets, one reduction each. The first bucket carries a few numbers more (by way of main memory
they go before it): how many batches each rank took and of which round, the shares, whose sum must be 1, and which
parameters have a gradient. So ranks that stand in different rounds are found out, and a parameter without a gradient on
some ranks counts as zero there and is never paired with another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.errors import CollectiveMismatchError
from unisono.parallel.ledger import Share
from unisono.parallel.names import name_of
from unisono.parallel.sparse import is_known_as_sparse, is_sparse, reduce_sparse, refuse_unknown
from unisono.world import World

logger = logging.getLogger(__name__)

_warned = WeakTensorKeyDictionary()
_MARKS = 251  # the largest prime that even bfloat16 holds exactly

BUCKET_BYTES = 64 * 2**20  # large enough to be bound by bandwidth, small enough not to double a model's memory


def reduce_gradients(
    parameters: Sequence[torch.Tensor],
    world: World,
    share: Share | None,
    factor: float | None = None,
    *,
    is_part: bool = False,
) -> None:
    """Replace the gradients, in place, by the weighted sum over the ranks.

    Args:
        parameters: the same ones in the same order on each rank.
        share: this rank's part of the global batch; None where it is unknown.
        factor: of this rank's gradients; None takes its part.
        is_part: the step has further parameters, so that none of these need have a gradient.

    Raises:
        TypeError: a gradient is sparse, and the ranks do not know that it is (`sparse.py`).
        RuntimeError: no parameter has a gradient, on any rank.
        CollectiveMismatchError: the ranks stand in different rounds: they took different numbers of batches, or their
            shares do not add up to 1, or their rounds are not the same.
    """
    if world.comm.size == 1 or not parameters:
        scale_gradients(parameters, 1.0 if factor is None else factor, in_place=not world.backend.is_lazy)
        if not is_part:
            check_presence(parameters)
        return
    factor = part_of(share, world) if factor is None else factor
    dense = [each for each in parameters if not is_known_as_sparse(each)]
    for each in dense:
        refuse_unknown(each)
    notes = [*_notes(share, world), *(float(parameter.grad is not None) for parameter in parameters)]
    present: set[int] = set()
    if world.is_hosted or not dense:  # to read them from a bucket would cut a graph; or there is none
        place = None if world.is_hosted else world.device
        present = _told(world.comm.all_reduce(torch.tensor(notes, device=place)), parameters, world)
        notes = []
    for bucket in _buckets(dense):
        flat = _flatten(bucket, factor, notes)
        world.comm.all_reduce(flat)
        if notes:
            present = _told(flat[-len(notes) :], parameters, world)
            flat, notes = flat[: -len(notes)], []
        _unflatten(flat, bucket, present, in_place=not world.backend.is_lazy)
    for each in parameters:
        if is_known_as_sparse(each):
            reduce_sparse(each, world, factor)
    if not is_part:
        check_presence(parameters)


@torch.no_grad()
def scale_gradients(parameters: Sequence[torch.Tensor], factor: float, in_place: bool = True) -> None:
    """Multiply the gradients; by 0 also what is not finite."""
    gradients = []
    for each in parameters if factor != 1 else ():
        if each.grad is not None and in_place and not is_sparse(each.grad):
            gradients.append(each.grad)
        elif each.grad is not None:
            each.grad = each.grad * factor if factor else torch.zeros_like(each.grad)
    if gradients and factor == 0:
        torch._foreach_zero_(gradients)
    elif gradients:
        torch._foreach_mul_(gradients, factor)


def scale_in_place(tensor: torch.Tensor, factor: float) -> None:
    """Multiply; by 0 also what is not finite, as the mean over no samples is."""
    if factor == 0:
        tensor.zero_()
    elif factor != 1:
        tensor.mul_(factor)


def check_presence(parameters: Sequence[torch.Tensor]) -> None:
    """Refuse to step on nothing; after the reduction all ranks have the same gradients, so all refuse or none does.

    Raises:
        RuntimeError: no parameter has a gradient.
    """
    if parameters and all(each.grad is None for each in parameters):
        raise RuntimeError(
            f"none of the optimizer's {len(parameters)} parameters has a gradient, on any rank; call loss.backward() "
            "before the step, on a loss that depends on them, and zero_grad() after it. (Make the optimizer behind "
            "model.to(device), which on some devices, XLA's, puts new parameters in the place of the old ones.)"
        )


def check_rounds(world: World, share: Share | None) -> None:
    """Compare the ranks' rounds where the backward pass has reduced, and could not. A small collective.

    Raises:
        CollectiveMismatchError: as `reduce_gradients`.
    """
    size = world.comm.size
    if size == 1:
        return
    notes = torch.tensor(_notes(share, world), device=world.device)
    counts = world.comm.all_reduce(notes).tolist()
    _check_shares(counts[:size], counts[size : 2 * size], counts[2 * size], notes.dtype)


def _notes(share: Share | None, world: World) -> list[float]:
    """Of each rank its batches and its mark, which the sum over the ranks keeps apart; and the sum of the shares."""
    size = world.comm.size
    places = [0.0] * 2 * size
    if share is not None:
        places[world.comm.rank], places[size + world.comm.rank] = float(share.batches), float(share.mark % _MARKS)
    return [*places, share.part if share else 0.0]


def part_of(share: Share | None, world: World) -> float:
    """What this rank's gradient, or loss, weighs in the sum over the ranks."""
    return share.part if share else 1 / world.comm.size


def _told(summed: torch.Tensor, parameters: Sequence[torch.Tensor], world: World) -> set[int]:
    """Look at the notes, summed over the ranks: the parameters that have a gradient somewhere, by identity."""
    size = world.comm.size
    counts = (summed.real if summed.is_complex() else summed).tolist()
    _check_shares(counts[:size], counts[size : 2 * size], counts[2 * size], summed.dtype)
    return _present(parameters, counts[2 * size + 1 :], world)


def _present(parameters: Sequence[torch.Tensor], counts: list[float], world: World) -> set[int]:
    """The parameters that have a gradient somewhere; rank zero warns, once, of those that some ranks lack."""
    size = world.comm.size
    for parameter, count in zip(parameters, counts, strict=True):
        if 0 < round(count) < size and world.rank == 0 and parameter not in _warned:
            _warned[parameter] = True
            logger.warning(
                "%s has a gradient on %d of %d ranks only; on the others it counts as zero",
                name_of(parameter, parameters),
                round(count),
                size,
            )
    return {id(parameter) for parameter, count in zip(parameters, counts, strict=True) if count}


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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
    """The bucket's gradients, scaled, end to end in one new vector, then the notes."""
    pieces = [(torch.zeros_like(each) if each.grad is None else each.grad).reshape(-1) for each in bucket]
    flat = torch.cat([*pieces, pieces[0].new_tensor(notes)])
    scale_in_place(flat[: len(flat) - len(notes)], scale)
    return flat


@torch.no_grad()
def _unflatten(flat: torch.Tensor, bucket: list[torch.Tensor], present: set[int], in_place: bool) -> None:
    """Give each parameter its piece; on lazy devices not in place, where a gradient may be a view of one number."""
    start = 0
    for parameter in bucket:
        piece = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
        if parameter.grad is not None and in_place:
            parameter.grad.copy_(piece)
        elif parameter.grad is not None or id(parameter) in present:
            parameter.grad = piece.clone()


def _check_shares(batches: list[float], marks: list[float], total: float, dtype: torch.dtype) -> None:
    """All ranks see the same numbers, so all raise or none does.

    Args:
        batches: how many each rank took; 0 where it does not know the global batch.
        marks: of the round that each took last.
        total: the sum of the shares.
    """
    if not any(batches):
        return
    if not all(batches):
        knowing = ", ".join(str(rank) for rank, count in enumerate(batches) if count)
        raise CollectiveMismatchError(
            f"rank {knowing} of {len(batches)} took batches from a loader that knows the global batch, the others did "
            "not; use the same kind of loader on every rank"
        )
    odd = next((rank for rank, count in enumerate(batches) if count != batches[0]), None)
    if odd is not None:
        raise CollectiveMismatchError(
            f"since the last optimizer step rank 0 took {batches[0]:.0f} batches and rank {odd} took "
            f"{batches[odd]:.0f}; every rank must take the same number of batches between two steps"
        )
    odd = next((rank for rank, mark in enumerate(marks) if mark != marks[0]), None)
    if odd is not None:
        raise CollectiveMismatchError(
            f"rank 0 and rank {odd} took batches of different rounds: their loaders are in different epochs, or their "
            "orders differ; every rank must loop over its loader as often as the others, and a sampler or an iterable "
            "of your own must give the same order on every rank"
        )
    rounding = 4 * len(batches) * torch.finfo(dtype).eps
    if abs(total - 1) > rounding:
        raise CollectiveMismatchError(
            f"the ranks' shares of the global batch add up to {total:.4f} instead of 1; every rank must take its part "
            "of the same rounds between two optimizer steps"
        )
