"""Where the time of a run went: every rank's timeline in a few numbers, gathered to rank zero."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unisono.timeline import COMPUTE, FETCH, MOVE, REDUCE, STEP, Span
from unisono.world import World, current_world

LOOP_PHASES = (FETCH, COMPUTE, REDUCE, STEP)
"""The phases that tile a loop's time, in the order of a step; `MOVE` goes on beside them."""

LABELS = {FETCH: "waiting for data", MOVE: "moving", COMPUTE: "computing", REDUCE: "reducing", STEP: "stepping"}


@dataclass(frozen=True)
class RankSummary:
    """One rank's share of a run.

    Attributes:
        rank, device, pid: who.
        seconds: by phase; `LOOP_PHASES` add up to the time in loops, "move" is the transfer thread's.
        samples, batches, steps: how many it took; a repeated sample of a split tail counts as none.
        memory: bytes in use when it was summarised.
        spans: by track, "loop" and the helpers'; the latest `MAX_SPANS` of each, on the clock of its machine.
    """

    rank: int
    device: str
    pid: int
    seconds: dict[str, float]
    samples: int
    batches: int
    steps: int
    memory: int
    spans: list[tuple[str, list[Span]]]

    @property
    def loop_seconds(self) -> float:
        """Seconds in loops over this package's loaders."""
        return sum(self.seconds[phase] for phase in LOOP_PHASES)

    def share(self, phase: str) -> float:
        """The part of the loops' time that went to a phase, 0 to 1."""
        return self.seconds[phase] / self.loop_seconds if self.loop_seconds else 0.0


@dataclass(frozen=True)
class Report:
    """All ranks' summaries, in rank order."""

    ranks: list[RankSummary]

    @property
    def samples(self) -> int:
        """Samples that all ranks took together."""
        return sum(each.samples for each in self.ranks)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, over the time that the slowest spent in its loops."""
        slowest = max(each.loop_seconds for each in self.ranks)
        return self.samples / slowest if slowest else 0.0


def summarise(world: World | None = None) -> RankSummary:
    """This rank's summary up to now."""
    world = world or current_world()
    tracks = world.timeline.tracks()
    counts = {name: sum(track.counts.get(name, 0) for track in tracks) for name in ("samples", "batches", "steps")}
    return RankSummary(
        rank=world.rank,
        device=str(world.device),
        pid=os.getpid(),
        seconds={phase: sum(track.totals.get(phase, 0) for track in tracks) / 1e9 for phase in (*LOOP_PHASES, MOVE)},
        memory=world.backend.memory(world.device),
        spans=[(track.name, list(track.spans.copy())) for track in tracks],
        **counts,
    )


def gather_report(world: World | None = None) -> Report | None:
    """Gather every rank's summary; a collective that all ranks call. The report on rank zero, None on the others.

    Raises:
        BrokenWorldError: a peer failed or departed.
    """
    world = world or current_world()
    ranks = world.comm.all_gather_object(summarise(world))
    return Report(ranks) if world.rank == 0 else None
