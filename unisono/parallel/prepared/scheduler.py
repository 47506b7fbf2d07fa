"""PreparedScheduler: one optimizer step is one scheduler step, also where steps accumulate or are skipped."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.parallel.prepared.stepping import Stepper

Scheduler = LRScheduler | ReduceLROnPlateau


class PreparedScheduler:
    """Behaves as `scheduler` does, but that `step` does nothing where its optimizer has not stepped since the last one:
    between microbatches, and behind an overflow.

    Args:
        scheduler: of a prepared optimizer.
        stepper: the optimizer's.
    """

    def __init__(self, scheduler: Scheduler, stepper: Stepper) -> None:
        self.scheduler = scheduler
        self._stepper = stepper
        self._taken = stepper.num_steps
        self._asked = stepper.num_asked
        self._epoch = self._last_epoch()
        stepper.schedulers.append(self)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """`scheduler.step`.

        Raises:
            RuntimeError: the scheduler was stepped by hand, or no optimizer step was asked for since its last one.
        """
        name, stepper = type(self.scheduler).__name__, self._stepper
        self.check_hand()
        if stepper.num_asked == self._asked:
            raise RuntimeError(
                f"the {name} is stepped without an optimizer step since its last one; call step() once behind each "
                "optimizer.step(), or once for each epoch"
            )
        self._asked = stepper.num_asked
        if stepper.num_steps == self._taken:
            return
        self._taken = stepper.num_steps
        self.scheduler.step(*args, **kwargs)
        self._epoch = self._last_epoch()

    def check_hand(self) -> None:
        """Has nobody stepped the scheduler that was prepared?

        Raises:
            RuntimeError: somebody has.
        """
        if self._last_epoch() != self._epoch:
            raise RuntimeError(
                f"the {type(self.scheduler).__name__} was stepped by hand, from {self._epoch} to {self._last_epoch()}; "
                "call step() on what prepare() returned, once for each optimizer step, or once for each epoch"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`scheduler.load_state_dict`."""
        self.scheduler.load_state_dict(state)
        self._epoch = self._last_epoch()

    def _last_epoch(self) -> int | None:
        return getattr(self.scheduler, "last_epoch", None)  # a ChainedScheduler has none

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # asked for by copy and pickle before there is one
            raise AttributeError(name)
        return getattr(self.scheduler, name)
