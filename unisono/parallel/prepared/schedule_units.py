"""The unit that a learning rate schedule counts, and how far one optimizer step advances it.

A plain script builds its schedule from `len(loader)`, in batches of its loader: one device uses one per step. R ranks
use R of them in a round, and k microbatches make a step, so a step consumes up to R k of them:

    "batch"        the batches that the step consumed: the schedule was built from the plain loader's length
    "device_step"  k of these, which one device would have used for one step; Accelerate's convention
    "step"         1: the schedule was built from the number of steps that this run takes

The unit of a schedule is known if all units are equal, or, with k = 1, if its length is a multiple of the length from
which the script could have built it. Otherwise the user specifies it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from unisono.torch_private import MILESTONES, SCHEDULERS

Unit = Literal["batch", "device_step", "step"]


class Taken(NamedTuple):
    """The progress of an optimizer.

    Attributes:
        steps: the number of steps taken.
        batches: the number of batches of the user's loaders that these steps consumed.
        device_steps: the number of steps that one device would have taken.
    """

    steps: int = 0
    batches: int = 0
    device_steps: int = 0

    def after_step(self, batches: int, microbatches: int) -> Taken:
        """The progress after one more step, on `batches`; `microbatches` of them make a step of one device."""
        device_steps = math.ceil(batches / microbatches)
        return _taken((self.steps + 1, self.batches + batches, self.device_steps + device_steps))

    def since(self, before: Taken, unit: Unit) -> int:
        """The number of units by which one call advances: the rounded mean per optimizer step since `before`, or 1.

        A script that calls its scheduler every n optimizer steps does so on one device, too. There the same batches
        make more steps, and so more calls, all of which one call here replaces.
        """
        counted = {"batch": self.batches - before.batches, "device_step": self.device_steps - before.device_steps}
        steps = self.steps - before.steps
        return round(counted.get(unit, steps) / steps) if steps else 1


_taken = partial(tuple.__new__, Taken)  # without a Python call, in each step


class Lengths(NamedTuple):
    """The lengths of an epoch.

    Attributes:
        batches: the length of the user's loader.
        rounds: the length of the prepared loader.
    """

    batches: int
    rounds: int

    def steps(self, microbatches: int) -> int:
        """The number of optimizer steps that these ranks take."""
        return math.ceil(self.rounds / microbatches)

    def device_steps(self, microbatches: int) -> int:
        """The number of optimizer steps that one device would take."""
        return math.ceil(self.batches / microbatches)


def unit_of(scheduler: Any, lengths: Lengths, microbatches: int, is_later: bool) -> Unit:
    """The unit that the schedule counts.

    Args:
        lengths: the lengths of the loader that the loop runs over.
        microbatches: the number of microbatches in a step.
        is_later: whether the script had read the length of a prepared loader before it prepared the scheduler.

    Raises:
        ValueError: the unit is unknown; the message names the lengths.
    """
    steps = lengths.steps(microbatches)
    # All units are equal then: the number of device steps lies between these two.
    if lengths.batches == steps:
        return "step"
    total = length_of(scheduler)
    counted: dict[int, Unit] = {lengths.batches: "batch"}
    if is_later:
        # Of several ranks no unit counts rounds: "batch" only marks that length then, and is refused below.
        counted = {lengths.rounds: "batch", steps: "step"}
    fitting = [unit for epoch, unit in counted.items() if total is not None and total % epoch == 0]
    counts_rounds = is_later and lengths.rounds != lengths.batches and fitting != ["step"]
    # With accumulation a length may be a multiple of another unit's by chance, as total_steps=epochs * len(loader) + 1.
    if microbatches > 1 or len(fitting) != 1 or counts_rounds:
        raise ValueError(_describe_unknown_unit(scheduler, total, lengths, microbatches))
    return fitting[0]


def length_of(scheduler: Any) -> int | None:
    """The number of steps after which the schedule ends; None if it has no end, or an unknown one."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, CosineAnnealingLR):
        return scheduler.T_max
    if isinstance(scheduler, LinearLR | PolynomialLR):
        return scheduler.total_iters
    if isinstance(scheduler, SequentialLR):
        last = length_of(getattr(scheduler, SCHEDULERS)[-1])
        return None if last is None else getattr(scheduler, MILESTONES)[-1] + last
    if isinstance(scheduler, LambdaLR):  # transformers' schedules are of this kind
        totals = {_given_length(each) for each in scheduler.lr_lambdas}
        return totals.pop() if len(totals) == 1 else None
    return None


def _given_length(function: Any) -> int | None:
    keywords: Mapping[str, Any] = function.keywords if isinstance(function, partial) else {}
    total = keywords.get("num_training_steps")
    return total if isinstance(total, int) else None


def _describe_unknown_unit(scheduler: Any, total: int | None, lengths: Lengths, microbatches: int) -> str:
    ends = "has no readable length" if total is None else f"ends after {total} steps"
    steps, device_steps = lengths.steps(microbatches), lengths.device_steps(microbatches)
    counted = f" ({device_steps} steps of {microbatches} microbatches)" if microbatches > 1 else ""
    between = f"'device_step' if from {device_steps}, " if microbatches > 1 else ""
    ways = f"'batch' if it was built from {lengths.batches}, {between}'step' if from {steps}"
    return (
        f"the {type(scheduler).__name__} {ends}, and it is unknown what it counts: an epoch has {lengths.batches} "
        f"batches of the loader as you wrote it{counted}, and {steps} optimizer steps on these ranks; pass "
        f"Accelerator(schedule_unit=...): {ways}"
    )
