"""PreparedScheduler: the learning rates of one device on any number of ranks, with accumulated and skipped steps.

A plain script builds its schedule from `len(loader)`, in batches of its loader: one device uses one per step. R ranks
use R of them in a round, and k microbatches make a step, so a step consumes up to R k of them:

    "batch"        the batches that the step consumed: the schedule was built from the plain loader's length
    "device_step"  k of these, which one device would have used for one step; Accelerate's convention
    "step"         1: the schedule was built from the number of steps that this run takes

Its length does not show which: 8 may be an epoch of 8 batches, or two of 4 steps. So where the units differ, the user
names one, unless the schedule is constant.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from unisono.comm.outcome import add_note_once
from unisono.torch_private import STEP_WRAPPED
from unisono.training.prepared.stepper import Stepper

logger = logging.getLogger(__name__)

Unit = Literal["batch", "device_step", "step"]
Scheduler = LRScheduler | ReduceLROnPlateau
_FACTORS = {ConstantLR: "factor", **dict.fromkeys((ExponentialLR, MultiStepLR, StepLR), "gamma")}
"""What multiplies the learning rates of a schedule: a factor of 1 is constant."""

_ROUNDING = 1e-6  # the relative difference allowed between the ranks' metrics


class PreparedScheduler:
    """Behaves like `scheduler` on one device.

    Inside a loop, `step` advances as far as the calls on one device would have by then; between loops it advances by
    one. If the optimizer's `step` was called since the last call, but took no step (between microbatches, after an
    overflow), the call does nothing. Without a unit it is an error where the units differ.
    """

    def __init__(self, scheduler: Scheduler, stepper: Stepper, unit: Unit | None = None) -> None:
        self.scheduler = scheduler
        self._stepper = stepper
        self._unit = unit
        self._taken = stepper.taken
        self._asked = stepper.num_asked
        self._epoch = self._last_epoch()
        stepper.checks.append(self.check_hand)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """`scheduler.step`. A position, as in `step(epoch + batch / batches)`, is passed on.

        Raises:
            RuntimeError: the scheduler was stepped by hand; or, inside a loop, the optimizer's `step` was not called
                since the last call.
            ValueError: the unit of the schedule is unknown; or the ranks pass different metrics.
        """
        self.check_hand()
        has_metric = isinstance(self.scheduler, ReduceLROnPlateau)
        if (args or kwargs) and not has_metric:
            self.scheduler.step(*args, **kwargs)
            self._epoch = self._last_epoch()
            return
        stepper, before = self._stepper, self._taken
        name, loop = type(self.scheduler).__name__, stepper.loop_of_last_step()
        was_asked = stepper.num_asked != self._asked
        if not was_asked and loop is not None:
            when = "again without an optimizer step in between" if stepper.num_asked else "before its optimizer"
            raise RuntimeError(
                f"the {name} was stepped {when}; call step() once after each optimizer.step(), or once for each epoch"
            )
        unit = self._unit
        if loop is not None and unit is None and not (has_metric or is_constant(self.scheduler)):
            every, ranks = int(stepper.steps.step.policy.every), stepper.world.comm.size
            unit = unit_of(self.scheduler, loop.lengths(), every, ranks)
        self._asked, self._taken = stepper.num_asked, stepper.taken
        if was_asked and before.steps == stepper.taken.steps:
            return
        if has_metric:
            args, kwargs = (self._common_metric(*args, **kwargs),), {}
        units = 1 if loop is None else stepper.taken.since(before, unit or "step")
        try:
            for _ in range(units):
                self.scheduler.step(*args, **kwargs)
        except ValueError as error:
            if units > 1:  # it was built from fewer steps than it counts
                add_note_once(
                    error,
                    f"with schedule_unit={unit!r} one step of these ranks counts as {units}: build the {name} from the "
                    "length of the loader before prepare(), or pass schedule_unit='step'",
                )
            raise
        self._epoch = self._last_epoch()

    def _common_metric(self, metrics: Any, epoch: Any = None) -> float:
        """Rank zero's metric; those of other ranks may differ from it only by rounding. A small collective."""
        own, world = float(metrics), self._stepper.world
        if world.world_size == 1:
            return own
        world.comm.announce(f"the step of the {type(self.scheduler).__name__}")
        seen = [float(each) for each in world.comm.all_gather_object(own)]
        if not all(math.isclose(each, seen[0], rel_tol=_ROUNDING) or math.isnan(each) for each in seen):
            raise ValueError(
                f"ReduceLROnPlateau got {own:g} on rank {world.rank}, and {min(seen):g} to {max(seen):g} on all ranks, "
                "which would use different learning rates from then on; pass one value to all of them: "
                "accelerator.reduce(loss), or a metric of what gather_for_metrics returns"
            )
        return seen[0]

    def check_hand(self) -> None:
        """Refuse to continue if the wrapped scheduler was stepped directly."""
        if self._last_epoch() != self._epoch:
            raise RuntimeError(
                f"the {type(self.scheduler).__name__} was stepped by hand, from {self._epoch} to {self._last_epoch()}; "
                "call step() on what prepare() returned, once for each optimizer step, or once for each epoch"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`scheduler.load_state_dict`."""
        self.scheduler.load_state_dict(state)
        self._epoch = self._last_epoch()

    def follow(self) -> None:
        """Record that the optimizer has resumed the steps of another run."""
        self._asked, self._taken = self._stepper.num_asked, self._stepper.taken

    def _last_epoch(self) -> int | None:
        return getattr(self.scheduler, "last_epoch", None)  # a ChainedScheduler has none

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # copy and pickle look it up before it exists
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class UnpreparedSchedule:
    """Warns of a scheduler that was left out of `prepare` and changes the rates within a loop, not only after it: it
    has left torch's mark on the optimizer, but no check."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper, self._loop, self._rates = stepper, stepper.loop_of_last_step(), list[float]()
        stepper.checks.append(self.look)

    def look(self) -> None:
        """Called before each of the first two steps."""
        stepper, loop, rates = self._stepper, self._loop, self._rates
        self._loop = stepper.loop_of_last_step()
        self._rates = [float(each["lr"]) for each in stepper.optimizer.param_groups]
        if not stepper.taken.steps:
            return
        is_alone = len(stepper.checks) == 1 and hasattr(stepper.optimizer.step, STEP_WRAPPED)
        stepper.checks.remove(self.look)
        size, is_mean = stepper.world.comm.size, stepper.steps.policy.is_mean
        batches, rounds = (None if loop is None else loop.lengths()) or (size, 1)
        is_changed = loop is not None and loop is self._loop and rates != self._rates
        if stepper.steps.virtual is not None and is_alone and is_changed:
            raise RuntimeError(
                f"a scheduler of the {type(stepper.optimizer).__name__} was not prepared: with virtual_ranks it "
                "advances with each batch of a rank, so it depends on their number; pass it to accelerator.prepare()"
            )
        if stepper.world.rank or not (is_alone and is_changed and (is_mean or batches != rounds)):
            return
        when = f"on every microbatch, though {stepper.steps.step.policy.every} make a step"
        if not is_mean:
            when = f"once in a step of {size} ranks, where one device takes {batches / rounds:.3g} steps"
        logger.warning(
            "a scheduler of the %s was not prepared: it advances %s; pass it to accelerator.prepare(), and, if its "
            "schedule counts the steps of this run, Accelerator(schedule_unit='step')",
            type(stepper.optimizer).__name__,
            when,
        )


def is_constant(scheduler: Any) -> bool:
    """Whether the schedule is known to leave the learning rates as they are, whatever it counts."""
    if type(scheduler) is LambdaLR:
        return not any(map(_reads_its_step, scheduler.lr_lambdas))
    return getattr(scheduler, _FACTORS.get(type(scheduler), ""), None) == 1


class _Unknown:
    """A number of steps that cannot be computed with."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("this number of steps is unknown")

    __bool__ = __eq__ = __hash__ = __index__ = __int__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def _reads_its_step(rate: Any) -> bool:
    """Whether a function of LambdaLR depends on the number of steps that it is called with."""
    try:
        return not isinstance(rate(_Unknown()), int | float)
    except Exception:
        return True


def unit_of(scheduler: Any, lengths: tuple[int, int] | None, microbatches: int, ranks: int) -> Unit:
    """The unit that the schedule counts, if all units are equal, as on one rank without accumulation; else ValueError.

    Args:
        lengths: of the loader that the loop runs over: as the user wrote it, and prepared; None if it has no length.
        microbatches: the number of microbatches in a step.
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
        between = f"'device_step' if from {device_steps}, " if device_steps != steps else ""
        ways = f"'batch' if the schedule was built from {batches}, {between}'step' if from {steps}"
        has = (
            f"an epoch has {batches} batches of the loader as you wrote it, and {steps} optimizer steps on these ranks"
        )
    raise ValueError(f"it is unknown what the {name} counts: {has}; pass Accelerator(schedule_unit=...): {ways}")
