"""The ledger: how many of the step's samples a rank's gradients stand for, so that the reduced gradient is exact.

Let g(r, m) be the gradient of the mean loss over rank r's n(r, m) samples of microbatch m, N(m) the samples of that
microbatch on all R ranks, and W the sum of N over the step's microbatches. The gradient of the mean over the step is

    sum over r and m of  n(r, m) / W * g(r, m)  =  sum over r and m of  part * scale * factor * g(r, m)

    part    n(r, m) R / N(m)    the rank's part of the microbatch, 1 if it is split evenly
    scale   N(m) / U            the microbatch's size against the step's first, U; 1 except for the tail of a loop
    factor  U / (R W)           of the one reduction that ends the step

The sum of the microbatches' means, which is what several backward passes before a step compute if each batch is a step,
is the same with N(m) in place of U and W: a scale of 1, a factor of 1 / R.

A penalty on the parameters, which every rank adds to every loss, counts once, as on one device: the sum over r and m of
part * scale * factor is 1.

A loss that is a sum over samples has a part, a scale and a factor of 1.

n and N come with the batch, from the loader; or from the user, who counts tokens: then N is summed over the ranks.

*Threads:* a rank's ledger belongs to the thread of its loop.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from unisono.comm.operations import HOST
from unisono.deliveries import Batch, Loop, name_batches
from unisono.torch_private import current_graph_task_id
from unisono.world import World

_SHOWN = 3  # learning rates; more are compared by a checksum
_ROUNDING = 1e-9  # of a part, if all ranks have given the same weight


class Claim(NamedTuple):
    """States that a backward pass is of `samples` of the `total` of its microbatch on all ranks.

    Attributes:
        batch: the loader's batch; None for batches from elsewhere.
        is_given: whether the numbers are the user's.
    """

    samples: float
    total: float
    batch: Batch | None = None
    is_given: bool = False

    def part(self, size: int) -> float:
        """Return the factor for the gradients of the loss, in a world of that size."""
        return self.samples * size / self.total if self.total else 0.0


def claim_of(batch: Batch | None, weight: float | torch.Tensor | None, world: World) -> Claim:
    """What a backward pass claims. A small collective where the weight is given.

    Args:
        batch: that it is computed from; None for one from elsewhere, or of a loader that does not know the round: each
            rank's counts the same then.
        weight: what the loss is the mean over, where that is not the samples.

    Raises:
        TypeError, ValueError: the weight is no weight.
    """
    if weight is not None:
        own = checked_weight(weight)
        if world.comm.size == 1:
            return Claim(own, own, batch, True)
        # float64, since float32 counts tokens exactly only up to 2**24; on the host, so that reading it waits for no
        # device.
        total = world.comm.all_reduce(torch.tensor(own, dtype=torch.float64, device=HOST))
        return Claim(own, float(total), batch, True)
    if batch is None or batch.total is None:
        return Claim(1, world.comm.size, batch)
    return Claim(batch.samples, batch.total, batch)


def checked_weight(weight: float | torch.Tensor) -> float:
    """Return the weight as a number.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative or not finite.
    """
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(
            f"weight={weight!r} is of type {type(weight).__name__}; pass a number, such as the "
            "count of samples or tokens"
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight={weight} is not a weight; pass a finite, non-negative number")
    return float(weight)


class Crossings:
    """The backward passes of `unisono.functional` on one rank: gradients that come from other ranks' losses.

    Attributes:
        number: the number of them so far.
        task: autograd's number of the backward pass that contained the last one.
        is_held: whether there was one since the last step by hand.
    """

    def __init__(self) -> None:
        # Readers: `optimizer.backward` (number), `passes.py` (task), steps after a plain loss.backward() (is_held).
        self.number, self.task, self.is_held = 0, -1, False

    def note(self) -> None:
        """Note that one runs, in a backward pass."""
        self.number += 1
        self.task, self.is_held = current_graph_task_id(), True

    def restart(self) -> None:
        """Start over: the rank's loop begins again."""
        self.is_held = False


def refuse_crossed(part: float) -> None:
    """Refuse an uneven part of the microbatch as the weight of gradients that also come from other ranks' losses.

    Rank r's would count n(r) R / N times, regardless of which rank's loss they come from.

    Raises:
        ValueError: the part is not that of an even split.
    """
    if abs(part - 1) > _ROUNDING:
        raise ValueError(
            "the ranks have different numbers of samples, or weights, in this step, and gradients that came through "
            "unisono.functional are of the losses of all ranks: no weight of a rank is correct for them; compute the "
            "loss of the global batch on each rank, and give all ranks the same weight, as in backward(loss, "
            "weight=len(gathered) / world_size)"
        )


@dataclass(eq=False)
class Step:
    """The microbatches whose gradients make one step of a rank.

    Attributes:
        number: its number, from 1 on; a step that was given up does not count.
        before: the last batch of the previous step.
        claims: one for each microbatch, by its key.
        units: the first total of each loader that has a loss in it.
        stepped: the optimizers that have stepped on it. Others, on the same microbatches, belong to it.
        is_closed: whether one of them has.
        is_full: whether it is known to have its last microbatch.
    """

    number: int = 1
    before: Batch | None = None
    claims: dict[object, Claim] = field(default_factory=dict)
    units: dict[Loop, float] = field(default_factory=dict)
    # Weak: a ledger keeps its last step, and must not keep an optimizer alive that the user has dropped.
    stepped: WeakSet[Optimizer] = field(default_factory=WeakSet)
    is_closed: bool = False
    is_full: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it has microbatches, and no optimizer has stepped on them."""
        return bool(self.claims) and not self.is_closed

    @property
    def unit(self) -> float:
        """U; 0 if nothing counts."""
        # Microbatches in which nothing counts on any rank are passed over: U is a divisor.
        return next((each.total for each in self.claims.values() if each.total), 0.0)

    @property
    def last(self) -> Batch | None:
        """The batch that was entered last."""
        return next((each.batch for each in reversed(self.claims.values())), None)

    def following(self) -> Step:
        """Return the step after this one; or its replacement, if no optimizer has stepped."""
        return Step(self.number + bool(self.claims and self.is_closed), self.last)


def describe_rates(optimizers: Iterable[Optimizer]) -> str:
    """The learning rates that are plain numbers, to be compared by the ranks, which step with them."""
    # To six digits: hosts may compute the cosine of a schedule differently in the last one.
    rates = [f"{group['lr']:.6g}" for each in optimizers for group in each.param_groups if _is_number(group.get("lr"))]
    shown = list(dict.fromkeys(rates))
    if len(shown) > _SHOWN:
        shown = [*shown[:_SHOWN], f"{zlib.crc32(repr(rates).encode()):08x}"]
    return f" at lr {'/'.join(shown)}" if shown else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


class Ledger:
    """The microbatches of one rank's current step.

    Args:
        size: the number of ranks.
        every: the number of microbatches per step; math.inf if the user decides by stepping.
        is_mean: whether the step is the mean over its microbatches' samples, or the sum of their means.
        is_sum: losses are sums over samples, and nothing is weighted.

    Attributes:
        step: the current one.
    """

    def __init__(self, size: int, every: float = 1, is_mean: bool = True, is_sum: bool = False) -> None:
        self.every, self.is_mean, self.is_sum = every, is_mean, is_sum
        self._next = (every, is_mean)
        self.step = Step()
        self._size = size

    @property
    def count(self) -> int:
        """The step's microbatches so far."""
        return len(self.step.claims)

    def claim(self, batch: Batch | None, weight: float | torch.Tensor | None, world: World) -> Claim:
        """As `claim_of`; for a sum, each rank's loss counts fully, and that of a batch that only repeats others not at
        all.

        Raises:
            ValueError: a weight is given for a sum.
        """
        if not self.is_sum:
            return claim_of(batch, weight, world)
        if weight is not None:
            raise ValueError("loss_reduction='sum' adds losses as they are; leave out weight=, or use 'mean'")
        return Claim(0 if batch is not None and not batch.samples else 1, self._size, batch)  # a part of 0 or 1

    def accumulate(self, every: int) -> None:
        """Set the number of microbatches per step, from the next step on: one that has begun is not affected."""
        # With every=1 each backward pass is a batch: several before a step add up their means, as in a plain script.
        self._next = (every, every > 1)
        if not self.step.is_open:
            self.every, self.is_mean = self._next

    def _begin(self, step: Step) -> Step:
        self.step, (self.every, self.is_mean) = step, self._next
        return step

    def enter(self, claim: Claim, key: object) -> None:
        """Enter a backward pass that begins.

        Args:
            key: identifies the microbatch: its batch, or a substitute for one from elsewhere.

        Raises:
            ValueError: the same microbatch was counted with other numbers, or a part of the step by samples and a part
                by the user's numbers.
        """
        step = self.step
        # A new microbatch after the last one of a step that was not taken abandons that step. With every=1 each
        # microbatch is the last one, and further ones are added until an optimizer steps.
        if key not in step.claims and (not step.is_open or (step.is_full and self.is_mean)):
            step = self._begin(step.following())
        # A second loss of a microbatch, or a second pass through its graph: entered twice, its samples would count
        # twice.
        known = step.claims.get(key)
        if known is not None:
            if (known.samples, known.total) != (claim.samples, claim.total):
                raise ValueError(
                    f"one batch has the weights {known.samples:g} and {claim.samples:g}; several losses of a batch "
                    "have one weight, so add them up, each in its proportion, and call backward once; if they are of "
                    "several batches that come from no prepared loader, let the lines of each run in `with "
                    "accelerator.accumulate():`"
                )
            return
        # Samples and the user's numbers, such as tokens, have different units: their sum W would mean nothing.
        if self.is_mean and any(each.is_given != claim.is_given for each in step.claims.values()):
            raise ValueError(
                "one microbatch of this step has a weight of its own, another one has none; pass backward(..., "
                "weight=) for each of them, or for none"
            )
        step.claims[key] = claim
        if claim.batch is not None:
            step.units.setdefault(claim.batch.loop, claim.total)

    def scale(self, claim: Claim) -> float:
        """Return the factor for everything that the backward pass of that microbatch computes."""
        unit = self.step.unit
        return claim.total / unit if self.is_mean and unit and not self.is_sum else 1.0

    def join(self, batch: Batch) -> None:
        """Note that a batch of another loader has a loss in the backward pass that was entered last.

        Raises:
            ValueError: the means over the step of the two need different scales.
        """
        claim, first = next(reversed(self.step.claims.values())), self.step.unit
        total = float(batch.total or self._size)
        unit = self.step.units.setdefault(batch.loop, total)
        # The ratios total / unit and claim.total / first, cross-multiplied: counts are integers, so this is exact.
        if self.is_mean and total * first != claim.total * unit:
            raise ValueError(
                "one backward pass of an accumulation has losses of two loaders, whose batches differ in size from "
                f"those before by different factors ({claim.total:g} after {first:g} samples, {total:g} after "
                f"{unit:g}); train them with an Accelerator each, or drop the loaders' last batches"
            )

    def factor(self) -> float:
        """Return the factor for the accumulated gradients, in the reduction that makes them those of the step."""
        if self.is_sum:
            return 1.0
        if not self.is_mean:
            return 1 / self._size
        total = sum(each.total for each in self.step.claims.values())
        return self.step.unit / (self._size * total) if total else 0.0

    def held_factor(self) -> float:
        """Return the factor of a further reduction in the same step for gradients that were reduced before."""
        # Reduced gradients are equal on all ranks, so that the sum over the ranks multiplies them by the size.
        return self.factor() * self._size

    def part(self) -> float:
        """Return this rank's fraction of the samples of the step: the weight of its loss in the sum over the ranks."""
        claims = list(self.step.claims.values())
        if self.is_sum:
            return float(claims[-1].samples) if claims else 1.0  # 0 for a batch that only repeats others
        counted = claims if self.is_mean else claims[-1:]
        total = sum(each.total for each in counted)
        return sum(each.samples for each in counted) / total if total else 1 / self._size

    def place(self) -> str:
        """Describe where this rank is: equal on all ranks, unless they have lost step."""
        batches = [each.batch for each in self.step.claims.values() if each.batch is not None]
        step = f"step {self.step.number}"
        if not batches:
            return f"{step} ({self.count} microbatches of no loader)" if self.count > 1 else step
        return f"{step} ({name_batches(batches, self.step.before)})"

    def num_dealt(self) -> int:
        """Return the number of batches of the user's loader in the step."""
        return sum(1 if each.batch is None else each.batch.dealt for each in self.step.claims.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing counts in this step, on any rank: then there is no mean whose gradient could be taken."""
        return bool(self.count) and not self.step.unit

    def is_full(self) -> bool:
        """Whether the current microbatch ends the step: by its number, or since the batch ends its loop; or none is
        open.

        If the loader has to find out, this may wait, and all ranks must call it.
        """
        step = self.step
        if step.is_open and not step.is_full:
            # `is_last` may wait for the loader, so it is asked only where the count does not decide.
            step.is_full = self.count >= self.every or (step.last is not None and step.last.is_last())
        return step.is_full or not step.is_open

    def close(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self.step.stepped.add(optimizer)
        self.step.is_closed = True
        for claim in self.step.claims.values():
            if claim.batch is not None:
                # After the end of a loop, a spent batch is no longer assumed to be the source of a tensor
                # (`Deliveries.candidates`).
                claim.batch.is_spent = True

    def clear(self) -> None:
        """Note that gradients were zeroed: the next microbatch begins a step."""
        if self.step.is_open:
            self._begin(self.step.following())

    def restart(self) -> None:
        """Start over: the rank's loop begins again; where it was before, the ranks need not agree."""
        self._begin(Step())
