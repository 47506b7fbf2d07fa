"""Steps of optimizers that no rank knows of: in a loop over its part of the data, each rank would train its own model.

*Threads:* a rank's is looked at in the thread that has begun its loops.
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

_here = threading.local()  # not by a thread's number, which the next thread may get


class LoneSteps:
    """Those of one rank. It sees nothing before `follow`, nor where steps are an Accelerator's.

    Attributes:
        are_prepared: whether an Accelerator reduces for the steps, or knows that they need nothing.
    """

    def __init__(self) -> None:
        self.are_prepared = False
        self._num_begun: Callable[[], int] | None = None
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def follow(self, num_begun: Callable[[], int] | None) -> None:
        """Look at the steps of this thread from now on, by that count of collectives, which only grows; None:
        unknown."""
        if num_begun is not None and self._num_begun is None:
            self._num_begun = num_begun
            _here.steps = weakref.ref(self)
            _look_at_steps()

    def look(self, optimizer: Optimizer) -> None:
        """Warn, once, of an optimizer that steps again although the ranks have exchanged nothing since it has."""
        if self.are_prepared or self._num_begun is None:
            return
        begun = self._num_begun()
        if self._last.get(optimizer) != begun:
            self._last[optimizer] = begun
            return
        self._num_begun = None
        logger.warning(
            "the %s steps again, and the ranks have exchanged nothing since its last step, though each has its part of "
            "a loader's batches: each rank trains a model of its own; call unisono.optimizer_step(optimizer) in place "
            "of optimizer.step(), or use DistributedDataParallel, or let an Accelerator prepare them",
            type(optimizer).__name__,
        )


@cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, *_: Any) -> None:
    held = getattr(_here, "steps", None)
    if held is not None and (found := held()) is not None:
        found.look(optimizer)
