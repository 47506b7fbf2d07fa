"""What ranks that have peers do as if they were alone; a line of the log says so, once.

*Evaluations*, loops without backward passes: a rank evaluates its part of the data, and what its loop counts itself,
`right += ...`, covers that part only. If the ranks gather and reduce nothing from the start of the loop until they
train again, or end, a line says so, once for each loop of the program.

*Lone steps* of optimizers that no rank knows of: in a loop over its part of the data, each rank would train its own
model; next to an Accelerator that has prepared nothing, each would do all the work.

*Threads:* the rank's; its steps are checked in the thread that has begun its loops.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.comm.stacks import own_frames

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


class Evaluations:
    """The evaluations of one rank. Before `follow`, and on all ranks but one, it sees nothing.

    Attributes:
        num_met: grows whenever the ranks have met for something that the program's loop has asked for, or a metric was
            updated: they meet for that later.
    """

    def __init__(self) -> None:
        self.num_met = 0
        self._num_begun: Callable[[], int] | None = None
        self._seen = 0
        self._places: dict[str, None] = {}  # of loops that have ended, and that nothing has been gathered from so far
        self._told = set[str]()

    def follow(self, num_begun: Callable[[], int] | None) -> None:
        """Take the collectives from that count, which only grows; None: unknown."""
        self._num_begun = num_begun

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Collectives in the block are not ones that the program has asked for."""
        if self._num_begun is None:
            yield
            return
        self._look()
        try:
            yield
        finally:
            self._seen = self._num_begun()

    def end(self, num_met: int) -> None:
        """Note that a loop has ended, in the frames of the caller, which began at that `num_met`."""
        place = next((str(each) for each in own_frames() if each.is_users), None)
        if num_met == self.num_met and place is not None and place not in self._told:
            self._places[place] = None

    def settle(self) -> None:
        """Report the loops that have ended, since the rank trains again, or ends."""
        if self._places:
            self._look()
        for place in self._places:
            self._told.add(place)
            logger.warning(
                "the loop in %s has ended, without backward passes, and the ranks have gathered and reduced nothing "
                "since it began: it has counted one rank's samples, not those of all ranks; count with "
                "unisono.Mean() or Accuracy(), or gather rows with accelerator.gather_for_metrics((predictions, "
                "labels)), or count the first loader.valid_samples rows of each batch alone, and add the counts up: "
                'accelerator.reduce(torch.tensor(count), "sum")',
                place,
            )
        self._places.clear()

    def _look(self) -> None:
        assert self._num_begun is not None
        if (begun := self._num_begun()) != self._seen:
            self._seen = begun
            self.num_met += 1
            self._places.clear()


class LoneSteps:
    """The lone steps of one rank. It sees nothing before `follow`, nor where an Accelerator has prepared an optimizer.

    Attributes:
        are_prepared: whether an Accelerator reduces for the steps, or knows that they need nothing.
    """

    def __init__(self) -> None:
        self.are_prepared = False
        self._num_begun: Callable[[], int] | None = None
        self._why, self._has_warned = "", False
        self._last: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def follow(self, num_begun: Callable[[], int] | None, why: str = PARTS) -> None:
        """Check the steps of this thread from now on, by that count of collectives, which only grows; None: unknown.
        The warning says `why` they should exchange something."""
        self._why = why
        if num_begun is not None and self._num_begun is None and not self._has_warned:
            self._num_begun = num_begun
            _here.steps = ref(self)
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
