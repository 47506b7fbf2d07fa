"""Steps of optimizers that no rank knows of: in a loop over its part of the data, each rank would train its own model;
next to an Accelerator that has prepared nothing, each would do all the work.

*Threads:* a rank's steps are checked in the thread that has begun its loops.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

logger = logging.getLogger(__name__)

PARTS = (
    "though each has its part of a loader's batches: each rank trains a model of its own; call "
    "unisono.optimizer_step(optimizer) in place of optimizer.step(), or use DistributedDataParallel, or let an "
    "Accelerator prepare them"
)
NOTHING = (
    "and this Accelerator has prepared nothing: each rank does all of the work, alone; model, optimizer, loader = "
    "accelerator.prepare(model, optimizer, loader)"
)

_here = threading.local()  # not by a thread's number, which the next thread may get


class LoneSteps:
    """The lone steps of one rank. It sees nothing before `follow`, nor where an Accelerator has prepared an optimizer.

    Attributes:
        are_prepared: whether an Accelerator reduces for the steps, or knows that they need nothing.
    """

    def __init__(self) -> None:
        self.are_prepared = False
        self._num_begun: Callable[[], int] | None = None
        self._why, self._has_warned = "", False
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def follow(self, num_begun: Callable[[], int] | None, why: str = PARTS) -> None:
        """Check the steps of this thread from now on, by that count of collectives, which only grows; None: unknown.
        The warning says `why` they should exchange something."""
        self._why = why
        if num_begun is not None and self._num_begun is None and not self._has_warned:
            self._num_begun = num_begun
            _here.steps = weakref.ref(self)
            _look_at_steps()

    def look(self, optimizer: Optimizer) -> None:
        """Warn, once, of an optimizer that steps again although the ranks have exchanged nothing since then."""
        if self.are_prepared or self._num_begun is None:
            return
        begun = self._num_begun()
        if self._last.get(optimizer) != begun:
            self._last[optimizer] = begun
            return
        self._num_begun, self._has_warned = None, True
        logger.warning(
            "the %s steps again, and the ranks have exchanged nothing since its last step, %s",
            *(type(optimizer).__name__, self._why),
        )


@cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, *_: Any) -> None:
    held = getattr(_here, "steps", None)
    if held is not None and (found := held()) is not None:
        found.look(optimizer)
