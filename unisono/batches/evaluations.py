"""Evaluations: loops without backward passes, and whether the ranks have met for what these have counted.

A rank evaluates its part of the data, and what its loop counts itself, `right += ...`, covers that part only. If the
ranks gather and reduce nothing from the start of the loop until they train again, or end, a line says so, once for each
loop of the program.

*Threads:* the rank's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unisono.comm.stacks import own_frames

logger = logging.getLogger(__name__)


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
