"""Balance: ranks agree on how many virtual ranks each of them carries, by the time that a batch takes it.

A loop that trains measures its rounds. Every few of them, between two rounds, the ranks gather their medians, and each
computes the same table from these. With a new one, the loop continues as a run does that is resumed on other ranks: the
rest of its pass is dealt again.

*Threads:* the loop's.
"""

from __future__ import annotations

import logging
from statistics import median

import torch

from unisono.batches.virtual_ranks import VirtualRanks, rebalanced
from unisono.comm.operations import HOST
from unisono.report.timeline import COMPUTE, Track
from unisono.world import World

logger = logging.getLogger(__name__)

ROUNDS = 16  # that are measured before the ranks agree


class Balance:
    """The agreement of the ranks over one loader.

    Attributes:
        virtual: the virtual ranks, as the ranks have agreed to carry them; None before.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._times: list[float] = []
        self.virtual: VirtualRanks | None = None
        self.restart()

    def restart(self) -> None:
        """A loop begins."""
        self._before: tuple[int, int] | None = None  # the time computed, and the batches, up to a round

    def note_round(self, track: Track, batches: int, virtual: VirtualRanks) -> VirtualRanks | None:
        """Measure a round that has ended, after `batches` of its loop; returns the virtual ranks if the ranks are
        to carry them otherwise from now on. Sometimes a collective."""
        before, self._before = self._before, ((track.on_device or track).totals[COMPUTE], batches)
        if before is not None:  # not the first round of a loop, in which kernels are chosen
            self._times.append((self._before[0] - before[0]) / (batches - before[1]))
        if len(self._times) < ROUNDS:
            return None
        comm = self._world.comm
        comm.announce("the times that a batch takes")
        own = torch.tensor([median(self._times)], dtype=torch.float64, device=HOST)
        self._times.clear()
        times = torch.cat(comm.all_gather(own)).tolist()
        found = rebalanced(virtual, times)
        if found is virtual:
            return None
        if self._world.rank == 0:
            logger.info(
                "the ranks carry %s virtual ranks from now on, %s before: a batch takes them %s ms",
                [*map(len, found.table)], [*map(len, virtual.table)], [round(each / 1e6, 1) for each in times],
            )  # fmt: skip
        self.virtual = found
        return found
