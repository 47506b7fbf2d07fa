"""Where the time of a run went: every rank's timeline in a few numbers, gathered to rank zero.

Where a device has a clock, the phases are those that it went through, and not the thread that submits to it.

What a loop waited for is split by cause: its data's source, the move to the device, its peers. A loop waits for peers
in two places: for the reader that it shares with them, and where gradients are reduced.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from unisono.launch.watching.monitor import own_samples
from unisono.timeline import (
    COMPUTE,
    DEVICE,
    EVALUATE,
    FETCH,
    LOG,
    MOVE,
    PHASES,
    REDUCE,
    SAVE,
    STEP,
    Span,
    Track,
    Waits,
    wait_counter,
)
from unisono.world import World, current_world

LOOP_PHASES = (FETCH, COMPUTE, REDUCE, STEP)
"""The phases that tile a loop's time with the named ones, in the order of a step; `MOVE` runs beside them."""

_LABELS = {FETCH: "waiting for data", MOVE: "moving", COMPUTE: "loop body", REDUCE: "reducing", STEP: "stepping"}
_LABELS |= {EVALUATE: "evaluating", LOG: "logging", SAVE: "saving"}


def label(phase: str) -> str:
    """How a report calls a phase; those that a user has named have their own names."""
    return _LABELS.get(phase, phase)


CAUSES = SOURCE, TRANSFER, PEERS = Waits._fields
"""What a loop waits for, as `RankSummary.waits` names it."""

_PEER_BOUND = 0.3  # the same for peers that are as fast as one another: some reducing belongs to every step
_BOUND = 0.1  # the part of the loops' time from which on a cause of waiting is what the run is bound by


@dataclass(frozen=True, repr=False)
class RankSummary:
    """One rank's share of a run.

    Attributes:
        rank, device, pid: who.
        seconds: by phase, named ones too; all but "move", which is the transfer thread's, add up to the time in loops.
        samples, batches, steps: how many it took; a repeated sample of a split tail counts as none.
        skipped_steps: that nothing was learned from, since all weights were 0.
        repeated: samples that only repeated others, to keep step or to fill a batch.
        dropped: samples of its share that no batch held, because the tail was left out.
        waits: seconds by cause, of `CAUSES`; they add up to the phase "fetch".
        nbytes: of the batches that it took, as they were loaded.
        mean_queue: batches that waited in the loader, on average, when the loop asked for one.
        memory: bytes in use when it was summarised.
        peak_memory: the most bytes that its device has had in use at once; 0 where the family does not count them.
        peak_rss: the most bytes of memory that its process and those below it were seen to have; 0 where nobody looked.
        mean_cpu_percent: of one core, that they kept busy.
        counters: what the runtime of its device has counted in its process: graphs compiled, say.
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
    repeated: int = 0
    dropped: int = 0
    skipped_steps: int = 0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    nbytes: int = 0
    mean_queue: float = 0.0
    peak_memory: int = 0
    peak_rss: int = 0
    mean_cpu_percent: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def loop_seconds(self) -> float:
        """Seconds in loops over this package's loaders, and in named phases."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != MOVE)

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{label(phase)} {self.share(phase):.0%}" for phase in self.seconds if self.share(phase) >= 0.005
        )
        return (
            f"<rank {self.rank} on {self.device}: {self.samples:,} samples, {self.steps:,} steps in "
            f"{self.loop_seconds:.2f} s; {shares or 'no loop'}>"
        )

    def share(self, phase: str) -> float:
        """The part of the loops' time that went to a phase, 0 to 1."""
        return self.seconds.get(phase, 0.0) / self.loop_seconds if self.loop_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes of batches per second in loops."""
        return self.nbytes / self.loop_seconds if self.loop_seconds else 0.0

    def waited(self, cause: str) -> float:
        """Seconds that its loops waited for a cause, of `CAUSES`; for its peers, those of reducing too."""
        return self.waits[cause] + (self.seconds[REDUCE] if cause == PEERS else 0.0)


@dataclass(frozen=True, repr=False)
class Report:
    """All ranks' summaries, in rank order."""

    ranks: list[RankSummary]

    def __repr__(self) -> str:
        return (
            f"<report of {len(self.ranks)} rank(s): {self.samples:,} samples, "
            f"{self.samples_per_second:,.0f} samples/s; {self.verdict}>"
        )

    @property
    def named_phases(self) -> list[str]:
        """The phases with names in which time has passed, in the order in which ranks came to them."""
        found = (phase for each in self.ranks for phase, seconds in each.seconds.items() if seconds)
        return [phase for phase in dict.fromkeys(found) if phase not in PHASES]

    @property
    def samples(self) -> int:
        """Samples that all ranks took together."""
        return sum(each.samples for each in self.ranks)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, over the time that the slowest spent in its loops."""
        slowest = max(each.loop_seconds for each in self.ranks)
        return self.samples / slowest if slowest else 0.0

    @property
    def dropped(self) -> int:
        """Samples that were left out with the tail, of all ranks."""
        return sum(each.dropped for each in self.ranks)

    @property
    def repeated(self) -> int:
        """Samples that only repeated others, of all ranks."""
        return sum(each.repeated for each in self.ranks)

    @property
    def skipped_steps(self) -> int:
        """Steps that nothing was learned from; all ranks skip the same."""
        return max((each.skipped_steps for each in self.ranks), default=0)

    @property
    def counters(self) -> dict[str, int]:
        """What the runtimes have counted, over all processes."""
        by_process = {each.pid: each.counters for each in self.ranks}  # ranks that are threads report the same
        total: Counter[str] = Counter()
        for counted in by_process.values():
            total.update(counted)
        return dict(total)

    def waited(self, cause: str) -> float:
        """The part of all loops' time that was waited for a cause, of `CAUSES`; 0 to 1."""
        total = sum(each.loop_seconds for each in self.ranks)
        return sum(each.waited(cause) for each in self.ranks) / total if total else 0.0

    @property
    def slowest(self) -> int | None:
        """The rank that kept the others waiting: that spent most time in its loops and not waiting for its peers.

        None where that is no tenth more than what the others spent.
        """
        own = {each.rank: each.loop_seconds - each.waited(PEERS) for each in self.ranks}
        rank = max(own, key=own.__getitem__)
        others = [seconds for each, seconds in own.items() if each != rank]
        return rank if others and own[rank] > 1.1 * max(others) else None

    @property
    def verdict(self) -> str:
        """What the run waited for, in one sentence, with what would help."""
        if not any(each.loop_seconds for each in self.ranks):
            return "nothing is known of what the run waited for: there was no loop over a loader of this package"
        source, transfer, peers = [self.waited(cause) for cause in CAUSES]
        if self.counters and max(source, transfer) < _BOUND:
            return (
                f"compute-bound, or peer-bound: {source + transfer:.0%} of the step waits for data. A lazy device "
                "computes where its graph is cut, so that computing counts as reducing and stepping"
            )
        if peers >= max(source, transfer, _PEER_BOUND if self.slowest is None else _BOUND):
            slowest = "" if self.slowest is None else f"; rank {self.slowest} is the slowest"
            return f"peer-bound: {peers:.0%} of the step goes to reducing and to waiting for other ranks{slowest}"
        if max(source, transfer) < _BOUND:
            others = f", {peers:.0%} for other ranks" if len(self.ranks) > 1 else ""
            return f"compute-bound: {source + transfer:.0%} of the step waits for data{others}{self._longest_named()}"
        if source >= transfer:
            return f"input-bound: {source:.0%} of the step waits for the dataset; more loader workers would help"
        return (
            f"transfer-bound: {transfer:.0%} of the step waits for batches to be moved; more transfer_threads, or "
            "samples of a smaller type, would help"
        )

    def _longest_named(self) -> str:
        """The named phase that takes most time, where it is worth a look."""
        total = sum(each.loop_seconds for each in self.ranks)
        shares = {name: sum(each.seconds.get(name, 0.0) for each in self.ranks) / total for name in self.named_phases}
        longest = max(shares, key=shares.__getitem__, default="")
        return f"; {shares[longest]:.0%} goes to {label(longest)}" if shares.get(longest, 0.0) >= _BOUND else ""


def summarise(world: World | None = None) -> RankSummary:
    """This rank's summary up to now."""
    world = world or current_world()
    own = world.timeline.loop()
    if own.on_device is not None:
        own.on_device.read()
    tracks, samples = world.timeline.tracks(), own_samples(world.rank)
    counts: Counter[str] = Counter()
    for track in tracks:
        counts.update(track.counts.copy())
    seconds, waited = _seconds(tracks)
    return RankSummary(
        rank=world.rank,
        device=str(world.device),
        pid=os.getpid(),
        seconds=seconds,
        memory=world.backend.memory(world.device),
        peak_memory=world.backend.peak_memory(world.device),
        spans=[(track.name, list(track.spans.copy())) for track in tracks],
        samples=counts["samples"],
        batches=counts["batches"],
        steps=counts["steps"],
        repeated=counts["repeated"],
        dropped=counts["dropped"],
        skipped_steps=counts["skipped steps"],
        waits={cause: waited * counts[wait_counter(cause)] / 1e9 for cause in CAUSES},
        nbytes=counts["bytes"],
        mean_queue=counts["queued"] / counts["batches"] if counts["batches"] else 0.0,
        peak_rss=max((sample.rss for sample in samples), default=0),
        mean_cpu_percent=fmean(sample.cpu_percent for sample in samples[1:]) if samples[1:] else 0.0,
        counters=world.backend.counters(),
    )


def _seconds(tracks: Sequence[Track]) -> tuple[dict[str, float], float]:
    """Seconds by phase, and the part of the loops' waiting for data in which their devices had nothing to do."""
    on_device = [each for each in tracks if each.name == DEVICE and each.totals]
    on_host = [each for each in tracks if each.name != DEVICE]
    seconds = {}
    named = dict.fromkeys(phase for each in on_host for phase in each.totals.copy() if phase not in PHASES)
    for phase in (*LOOP_PHASES, MOVE, *named):
        chosen = on_device if on_device and phase != MOVE else on_host
        seconds[phase] = sum(each.totals.get(phase, 0) for each in chosen) / 1e9
    waiting = sum(each.totals.get(FETCH, 0) for each in on_host) / 1e9
    return seconds, seconds[FETCH] / waiting if on_device and waiting else 1.0


def gather_report(world: World | None = None) -> Report | None:
    """Gather every rank's summary; a collective that all ranks call. The report on rank zero, None on the others.

    Raises:
        BrokenWorldError: a peer failed or departed.
    """
    world = world or current_world()
    ranks = world.comm.all_gather_object(summarise(world))
    return Report(ranks) if world.rank == 0 else None
