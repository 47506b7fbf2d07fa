"""The unit that a learning rate schedule counts, and how far one optimizer step advances it.

A plain script builds its schedule from `len(loader)`, in batches of its loader: one device uses one per step. R ranks
use R of them in a round, and k microbatches make a step, so a step consumes up to R k of them:

    "batch"        the batches that the step consumed: the schedule was built from the plain loader's length
    "device_step"  k of these, which one device would have used for one step; Accelerate's convention
    "step"         1: the schedule was built from the number of steps that this run takes

Its length does not tell which: 8 may be an epoch of 8 batches, or two of 4 steps. So where the units differ, the user
says it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

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


def unit_of(scheduler: Any, lengths: tuple[int, int] | None, microbatches: int, ranks: int) -> Unit:
    """The unit that the schedule counts, if all of them are equal, as on one rank without accumulation.

    Args:
        lengths: of the loader that the loop runs over: as the user wrote it, and prepared; None if it has none.
        microbatches: the number of microbatches in a step.

    Raises:
        ValueError: they are not; the message names the lengths.
    """
    if microbatches == 1 and (ranks == 1 or (lengths is not None and lengths[0] == lengths[1])):
        return "step"
    name, ways = type(scheduler).__name__, "'batch' or 'step'"
    has = "the loader has no length"
    if lengths is not None:
        batches, rounds = lengths
        steps, device_steps = math.ceil(rounds / microbatches), math.ceil(batches / microbatches)
        if batches == steps:  # the number of device steps lies between these two
            return "step"
        between = f"'device_step' if from {device_steps}, " if microbatches > 1 else ""
        ways = f"'batch' if the schedule was built from {batches}, {between}'step' if from {steps}"
        has = (
            f"an epoch has {batches} batches of the loader as you wrote it, and {steps} optimizer steps on these ranks"
        )
    raise ValueError(f"it is unknown what the {name} counts: {has}; pass Accelerator(schedule_unit=...): {ways}")
