"""Claims: which batch a pass belongs to, and how many samples of its microbatch a rank's gradients stand for. That is n
of N: both come with the batch, from the loader; or n from the user, who counts tokens, and N is its sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from unisono.arguments import check_type
from unisono.batches.deliveries import Batch
from unisono.comm.operations import HOST
from unisono.report.timeline import REDUCE
from unisono.torch_private import current_graph_task_id
from unisono.world import World

NEGLIGIBLE = 2.0**-60  # a part that vanishes in a sum; float32 and bfloat16 are divided by it without a rounding
_ROUNDING = 1e-9  # of a part, if all ranks have given the same weight


class Claim(NamedTuple):
    """States that a pass covers `samples` of the `total` of its microbatch on all ranks.

    Attributes:
        is_given: whether the numbers are the user's.
        uncut: the numbers with the weights of batches that only repeat others, if there is such a batch. They hold for
            the loss of all ranks, which such a rank computes, too (`unisono.functional`).
    """

    samples: float
    total: float
    is_given: bool = False
    uncut: tuple[float, float] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no row of the batch counts, on any rank; a weight of 0 from the user counts as that."""
        return not self.total and (not self.is_given or self.uncut is not None)

    def part(self, size: int) -> float:
        """Return the factor for the gradients of the loss, in a world of that size."""
        return self.samples * size / self.total if self.total else 0.0


_counted = lru_cache(Claim)  # a loop's batches have few sizes


def claim_of(batch: Batch | None, weight: float | torch.Tensor | None, world: World) -> Claim:
    """What a pass claims. A small collective where the samples are to be summed, or the weight is given; with virtual
    ranks it has itself as its part then, and the step divides by their sum (`Steps.given_total`).

    Args:
        batch: None for data of no loader, or of one that does not know the round: each rank's counts the same then.
        weight: what the loss is the mean over, where it is not the samples.
    """
    draw = None if batch is None else batch.draw
    size = world.comm.size if draw is None else draw.carried.count
    if weight is None and batch is not None and batch.is_summed:
        batch.total = int(_sum_over_ranks([batch.samples], world)[0])
        batch.is_summed = False
    if weight is not None:
        given = checked_weight(weight)
        own = 0.0 if batch is not None and batch.is_repeated else given  # its rows count on another rank
        if draw is not None:
            return Claim(own, size, True)
        if size == 1:
            return Claim(own, own, True)
        total, whole = _sum_over_ranks([own, given], world)
        return Claim(own, total, True, None if total == whole else (given, whole))
    if batch is None or batch.total is None:
        return Claim(1, size)
    return _counted(batch.weight, batch.total)


def _sum_over_ranks(values: list[float], world: World) -> list[float]:
    # In a backward pass, this may be autograd's thread, which does not have its own track.
    track = world.timeline.loop() if current_graph_task_id() < 0 else world.timeline.backward
    with nullcontext() if track is None else track.span(REDUCE):
        # float64, since float32 counts tokens exactly only up to 2**24; on the host, so that reading it waits for no
        # device.
        summed: list[float] = world.comm.all_reduce(torch.tensor(values, dtype=torch.float64, device=HOST)).tolist()
    return summed


class Origin:
    """Where the inputs of a forward pass come from, and what a pass on that batch claims.

    Attributes:
        candidates: the batches that may be meant, the most likely first; None stands for data of no loader.
        is_computed: whether the inputs share no memory with a batch.
        may_lag: whether they may be computed from the batch before, which was used last.
        is_chained: whether the inputs were computed with gradients, for example by another model.
        is_differentiated: whether gradients through the outputs have a graph (create_graph=True), for a penalty.
        syncs: whether the backward pass may reduce.
        optimizers: returns those of the model.
    """

    __slots__ = (
        *("batch", "candidates", "claim", "is_chained", "is_computed", "is_differentiated", "may_lag", "optimizers"),
        *("part", "syncs"),
    )

    def __init__(
        self,
        candidates: Sequence[Batch | None],
        world: World,
        is_computed: bool = False,
        syncs: bool = True,
        optimizers: Callable[[], Collection[Optimizer]] = tuple,
    ) -> None:
        self.candidates, self.batch = candidates, candidates[0]
        self.is_computed, self.syncs, self.optimizers = is_computed, syncs, optimizers
        self.is_chained = self.is_differentiated = self.may_lag = False
        self.claim = claim = claim_of(self.batch, None, world)
        draw = None if self.batch is None else self.batch.draw
        parts = world.comm.size if draw is None else draw.carried.count
        self.part = claim.samples * parts / claim.total if claim.total else 0.0


def find_origin(
    world: World,
    inputs: Sequence[torch.Tensor] = (),
    syncs: bool = True,
    optimizers: Callable[[], Collection[Optimizer]] = tuple,
) -> Origin:
    """Where these inputs of a pass come from; note the batch as used."""
    deliveries = world.state.deliveries
    batches: Sequence[Batch | None] = deliveries.find_in(inputs)
    is_computed = not batches
    if is_computed:
        # Of the first tensor that has rows; a nested one may have no shape.
        rows = next((int(each.size(0)) for each in inputs if each.ndim), None)
        batches = deliveries.computed_from(rows, inputs)
    found = Origin(batches, world, is_computed, syncs, optimizers)
    if found.batch is not None:
        found.may_lag = is_computed and found.batch.loop.lags
        deliveries.use(found.batch)
    return found


def named_origin(batch: Any, world: World) -> Origin:
    """The origin that the user names by tensors of a batch; an empty value names data of no loader."""
    if isinstance(batch, list | tuple) and not batch:
        return Origin((None,), world)
    named = world.state.deliveries.named(batch)
    world.state.deliveries.use(named[0])
    return Origin(named, world)


def checked_weight(weight: float | torch.Tensor) -> float:
    """Return the weight as a number; TypeError or ValueError if it is not one, negative, or not finite."""
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.item()
    check_type(weight, "weight", "pass a number, such as the count of samples or tokens", int, float)
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight={weight} is not a weight; pass a finite, non-negative number")
    return float(weight)


def check_same(known: Claim, claim: Claim, is_of_virtual: bool) -> None:
    """Check the claims of two losses of one microbatch, or of two passes through its graph."""
    if known[:2] != claim[:2] and is_of_virtual:
        one, other = (f"{each.samples:g}" if each.is_given else None for each in (known, claim))
        raise ValueError(
            f"two passes of one batch have weight={one} and weight={other}, and with virtual_ranks a batch has one "
            "weight; pass the same in both, or add the losses up, and call backward once"
        )
    if known[:2] != claim[:2]:
        raise ValueError(
            f"one batch has the weights {known.samples:g} of {known.total:g} and {claim.samples:g} of {claim.total:g} "
            "on all ranks; if these are losses of several batches that come from no prepared loader, or means over "
            "different terms of one batch, such as its tokens of two kinds, let the lines of each run in `with "
            "accelerator.accumulate():`; otherwise add the losses up, and call backward once"
        )


def check_counts(batches: Sequence[Batch | None], world: World, is_mean: bool = True) -> None:
    """Check that all batches that may be meant count the same; None stands for data of no loader. If the step is a mean
    over its microbatches, N must be equal, too, not only n / N."""
    if len(batches) < 2:
        return
    if any(each is not None and each.is_summed for each in batches):
        # Nothing is summed here, where ranks may differ: if N differs, then n does on some rank, which raises.
        differ = len({None if each is None else each.samples for each in batches}) > 1
    else:
        claims = [claim_of(each, None, world) for each in batches]
        loaded = {claim.total for claim, each in zip(claims, batches, strict=True) if each is not None}
        differ = len({each.part(world.comm.size) for each in claims}) > 1 or (is_mean and len(loaded) > 1)
    if differ:
        shown = " or ".join(dict.fromkeys(map(_describe, batches)))
        raise ValueError(
            f"the loss may be the mean over {shown}, and nothing shows which: its inputs were made in the loop, as "
            "noise is, or computed from a batch; make noise with as many rows as the batch has, "
            "torch.randn(len(batch), ...); or name the batch, accelerator.backward(loss, batch=batch) (by hand: "
            "unisono.backward(loss, batch=batch) instead of loss.backward()), or the number of samples, weight=; or "
            "say that it is no loader's, batch=()"
        )


def check_latest(origin: Origin, world: World) -> None:
    """Check that a part of the loss that no output shows counts alike, whichever batch it comes from."""
    latest = (each.last for each in world.state.deliveries.open_loops())
    check_counts([*dict.fromkeys([*origin.candidates, *latest])], world, False)


def check_alike(name: str, claims: Collection[Claim], origin: Origin, is_mean: bool, world: World) -> None:
    """Check that everything a bare parameter gets in a pass counts alike: its gradient is a single sum."""
    parts, totals = {each.part(world.comm.size) for each in claims}, {each.total for each in claims}
    if len(parts) > 1 or (is_mean and len(totals) > 1):
        raise ValueError(
            f"the {name}, which was prepared by itself, may get gradients of several batches that count differently in "
            "one backward pass; call accelerator.backward(loss, batch=batch) for the loss of each"
        )
    check_latest(origin, world)


def bypassed(name: str) -> ValueError:
    """The error for a backward pass whose batch is not known, where that matters."""
    return ValueError(
        f"a backward pass has reached parameters of the {name} and none of its outputs, so its batch is unknown, and "
        "this rank has an uneven part of the current one; call what prepare() has returned, or "
        "a method of it after model.mark_forward_method(name), or name the batch, accelerator.backward(loss, "
        "batch=batch)"
    )


def guessed() -> ValueError:
    """The error for a pass that was counted for a batch other than that of its outputs."""
    return ValueError(
        "a backward pass has reached a parameter that was prepared by itself before any output of a model, and was "
        "counted for the batch of the last forward pass, but its loss belongs to another batch; name it, "
        "accelerator.backward(loss, batch=batch)"
    )


def mixed(name: str) -> RuntimeError:
    """The error for outputs of several batches in one pass, where no hook could weigh their gradients."""
    return RuntimeError(
        f"outputs of the {name} from several batches met in one backward pass, and all its parameters are in "
        "checkpoints with use_reentrant=True, so that no weights can be applied; pass use_reentrant=False, or call "
        "backward() for the loss of each batch"
    )


def penalized() -> ValueError:
    """The error for a pass whose penalty on gradients may come from another batch than its loss, where that matters."""
    return ValueError(
        "one backward pass may have a loss of one batch, and a penalty on gradients (create_graph=True) of another, "
        "and this rank's parts of the two differ; call accelerator.backward(loss, batch=batch) for each of them"
    )


def check_repeated(batches: Sequence[Batch | None], weight: float | torch.Tensor) -> None:
    """Check that all batches that may be meant count, or none: one that only repeats weighs 0, whatever the weight."""
    if len({each is not None and each.is_repeated for each in batches}) > 1 and checked_weight(weight):
        raise ValueError(
            f"weight={checked_weight(weight):g} is given for a loss whose inputs were computed from a batch, or come "
            "from no loader; nothing shows which, and a batch that only repeats another rank's rows weighs "
            "0; name it, too, accelerator.backward(loss, weight=weight, batch=batch); or say that it is no loader's, "
            "batch=(); or pass weight=0 for a batch with loader.valid_samples 0"
        )


def _describe(batch: Batch | None) -> str:
    if batch is None:
        return "data of no loader"
    return f"{batch.samples} of the {'' if batch.total is None else f'{batch.total} '}samples of all ranks"


class Crossings:
    """The backward passes of `unisono.functional` on one rank: gradients that come from other ranks' losses."""

    def __init__(self) -> None:
        self.number = 0  # of them so far
        self.task = -1  # autograd's number of the backward pass that contained the last one
        self.is_held = False  # whether there was one since the last step by hand

    def note(self) -> None:
        """Note that one runs, in a backward pass."""
        self.number += 1
        self.task, self.is_held = current_graph_task_id(), True

    def restart(self) -> None:
        """Start over: the rank's loop begins again."""
        self.is_held = False


def crossed_virtual() -> ValueError:
    """The error for gradients of other ranks' losses, with virtual ranks."""
    return ValueError(
        "gradients came through unisono.functional, from all ranks' losses, and with virtual_ranks a rank has several "
        "virtual ones; compute the loss of a batch from that batch, or leave out virtual_ranks"
    )


def refuse_crossed(part: float) -> None:
    """Refuse an uneven part of the microbatch as the weight of gradients that also come from other ranks' losses: rank
    r's would count n(r) R / N times, whichever rank's loss they come from."""
    if abs(part - 1) > _ROUNDING:
        raise ValueError(
            "the ranks have different numbers of samples, or weights, in this step, and gradients that came through "
            "unisono.functional belong to all ranks' losses: no rank's weight is correct for them; compute the "
            "loss of the global batch on each rank, and give all ranks the same weight, as in backward(loss, "
            "weight=len(gathered) / world_size)"
        )
