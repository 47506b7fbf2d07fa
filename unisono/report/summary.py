"""Where the time of a run went: every rank's timeline in a few numbers, gathered to rank zero.

If a device has a clock, the phases are measured on the device, not on the thread that submits work to it.

The time a loop spent waiting is split by cause: its data source, the move to the device, its peers. A loop waits for
peers in two places: for the reader that it shares with them, and where gradients are reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from unisono.report.timeline import (
    BACKWARD,
    COMPUTE,
    EVALUATE,
    FETCH,
    FORWARD,
    LOG,
    MOVE,
    PHASES,
    REDUCE,
    SAVE,
    STEP,
    Span,
    Waits,
)

DIGESTS = "digests.jsonl"  # the file of a run's digests
SLOWER = 10_000  # a line is written after at least this part of the run's time, so that long runs have small files
CLOCK = "unisono: nanoseconds of the record "  # begins the name of an event of torch.profiler with its time
LOOP_PHASES = (FETCH, COMPUTE, REDUCE, STEP)
"""The phases that, with the named ones, tile a loop's time, in the order of a step; `MOVE` runs concurrently."""

_LABELS = {FETCH: "waiting for data", MOVE: "moving", COMPUTE: "loop body", REDUCE: "reducing", STEP: "stepping"}
_LABELS |= {EVALUATE: "evaluating", LOG: "logging", SAVE: "saving"}
_LABELS |= {FORWARD: "forward pass", BACKWARD: "backward pass"}
_COLOURS = {FETCH: "#d1495b", COMPUTE: "#2e86ab", REDUCE: "#edae49", STEP: "#66a182", MOVE: "#8d96a3"}
_NAMED = ("#9c6ade", "#3d5a80", "#f28482", "#6d6875", "#b5838d")  # for named phases, in turn


def label(phase: str) -> str:
    """Return a report's label for a phase; a phase named by the user keeps its name."""
    return _LABELS.get(phase, phase)


def colours_of(named: Sequence[str]) -> dict[str, str]:
    """The colours of a loop's phases and of these named ones, in pages and pictures."""
    return _COLOURS | dict(zip(named, cycle(_NAMED), strict=False))


CAUSES = SOURCE, TRANSFER, PEERS = Waits._fields
"""What a loop can wait for; the keys of `RankSummary.waits`."""

_PEER_BOUND = 0.3  # the threshold if all peers are equally fast: some reducing is part of every step
_TOO_SHORT_S = 0.01
_BOUND = 0.1  # a cause of waiting counts as the bottleneck from this fraction of the loops' time on
_ADVICE = {
    SAVE: "saving-bound: {:.0%} of the time goes to saving; save less often, or pass save_state(is_async=True)",
    LOG: "logging-bound: {:.0%} of the time goes to logging; log less often",
    EVALUATE: "evaluation-bound: {:.0%} of the time goes to evaluating; evaluate less often, or on fewer samples",
}


@dataclass(frozen=True, repr=False)
class RankSummary:
    """One rank's share of a run."""

    rank: int
    device: str
    pid: int
    # By phase, including named ones; all but "move", which the transfer thread spends, add up to the time in loops.
    seconds: dict[str, float]
    samples: int  # that it consumed, without repeated ones of a split tail; so are batches and steps
    batches: int
    steps: int
    memory: int  # bytes in use at the time of the summary
    spans: list[tuple[str, list[Span]]]  # the latest of each track, "loop" and the helpers', on its machine's clock
    repeated: int = 0  # samples that only repeated others, to keep in step or to fill a batch
    skipped_steps: int = 0  # without an update, since all weights were 0
    not_finite: int = 0  # the first step with a loss or gradient that was NaN or infinite, if this rank found it
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))  # seconds; together, "fetch"
    nbytes: int = 0  # of the batches it consumed, as loaded
    mean_queue: float = 0.0  # batches that were ready in the loader when the loop asked for one
    peak_memory: int = 0  # the most bytes of its device in use at once; 0 if the family does not count them
    host: str = ""
    counters: dict[str, int] = field(default_factory=dict)  # of the device's runtime in this process
    workers: list[str] = field(default_factory=list)  # what num_workers="auto" has chosen for each loader, and why

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
        """The fraction of the loops' time that went to a phase, 0 to 1."""
        return self.seconds.get(phase, 0.0) / self.loop_seconds if self.loop_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes of batches per second in loops."""
        return self.nbytes / self.loop_seconds if self.loop_seconds else 0.0

    def waited(self, cause: str) -> float:
        """Seconds that the rank's loops waited for a cause (see `CAUSES`); for peers, reducing is included."""
        return self.waits[cause] + (self.seconds[REDUCE] if cause == PEERS else 0.0)


@dataclass(frozen=True, repr=False)
class Report:
    """All ranks' summaries, in rank order."""

    ranks: list[RankSummary]

    def print(self) -> None:
        """Print where the time of each rank went, in % of its time in loops, the rates, and what the run waited for."""
        from unisono.report.text import table_of

        print(table_of(self), self.verdict, sep="\n")

    def save_picture(self, losses: Sequence[float], path: str | Path) -> Path:
        """Draw the loss by step, and each rank's time by phase, into a PNG file.

        Args:
            losses: the mean loss of each step's global batch.
            path: the file to write; its directory is created if needed.

        Returns:
            The absolute path.

        Raises:
            ImportError: matplotlib is not installed; the message has the pip command.
        """
        from unisono.report.picture import save_picture

        return save_picture(self, losses, path)

    def __repr__(self) -> str:
        return (
            f"<report of {len(self.ranks)} rank(s): {self.samples:,} samples, "
            f"{self.samples_per_second:,.0f} samples/s; {self.verdict}>"
        )

    @property
    def named_phases(self) -> list[str]:
        """The named phases that took any time, in the order in which ranks first entered them."""
        found = (phase for each in self.ranks for phase, seconds in each.seconds.items() if seconds)
        return [phase for phase in dict.fromkeys(found) if phase not in PHASES]

    @property
    def samples(self) -> int:
        """The number of samples that all ranks consumed together."""
        return sum(each.samples for each in self.ranks)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all ranks together, over the time that the slowest rank spent in its loops."""
        slowest = max(each.loop_seconds for each in self.ranks)
        return self.samples / slowest if slowest else 0.0

    @property
    def repeated(self) -> int:
        """The number of samples that only repeated others, over all ranks."""
        return sum(each.repeated for each in self.ranks)

    @property
    def skipped_steps(self) -> int:
        """The number of steps without an update; all ranks skip the same ones."""
        return max((each.skipped_steps for each in self.ranks), default=0)

    @property
    def counters(self) -> dict[str, int]:
        """The counters of the devices' runtimes, summed over all processes."""
        # ranks that are threads of one process report the same counters
        by_process = {(each.host, each.pid): each.counters for each in self.ranks}
        total: Counter[str] = Counter()
        for counted in by_process.values():
            total.update(counted)
        return dict(total)

    def waited(self, cause: str) -> float:
        """The fraction of all loops' time spent waiting for a cause (see `CAUSES`), 0 to 1."""
        total = sum(each.loop_seconds for each in self.ranks)
        return sum(each.waited(cause) for each in self.ranks) / total if total else 0.0

    def _share(self, phase: str) -> float:
        """The fraction of all loops' time that went to a phase."""
        total = sum(each.loop_seconds for each in self.ranks)
        return sum(each.seconds.get(phase, 0.0) for each in self.ranks) / total if total else 0.0

    @property
    def slowest(self) -> int | None:
        """The rank that kept the others waiting: its loops spent the most time on anything but waiting for peers.

        None unless that share of its time is over 10% more than any other rank's.
        """
        looped = [each for each in self.ranks if each.loop_seconds]  # of a rank that died, or has no disk: not so long
        return slowest_of({each.rank: 1 - each.waited(PEERS) / each.loop_seconds for each in looped})

    @property
    def verdict(self) -> str:
        """One sentence: what the run waited for, and what would help."""
        if not any(each.loop_seconds for each in self.ranks):
            return "it is unknown what the run waited for: there was no loop over a loader of this package"
        if max(each.loop_seconds for each in self.ranks) < _TOO_SHORT_S:
            return "it is unknown what the run waited for: its loops took no time"
        source, transfer, peers = [self.waited(cause) for cause in CAUSES]
        aside = max(_ADVICE, key=self._share)
        model = self._share(FORWARD) + self._share(BACKWARD)
        others = (self._share(phase) for phase in (COMPUTE, STEP, *self.named_phases) if phase != aside)
        if self._share(aside) > max(source, transfer, peers, model, *others):
            return _ADVICE[aside].format(self._share(aside))
        least = max(_BOUND, self._share(aside))
        if self.counters and max(source, transfer) < least:
            return (
                f"compute-bound, or peer-bound: {source + transfer:.0%} of the step waits for data. A lazy device "
                "computes where its graph is cut, so computing counts as reducing and stepping"
            )
        if peers >= max(source, transfer, least, _PEER_BOUND if self.slowest is None else 0):
            lever = "larger batches, or accumulation, would help"
            if self.slowest is not None:
                lever = f"rank {self.slowest} is the slowest: look at its data, and at what else its machine does"
            return f"peer-bound: {peers:.0%} of the step goes to reducing and to waiting for other ranks; {lever}"
        if max(source, transfer) < least:
            for_others = f", {peers:.0%} for other ranks" if len(self.ranks) > 1 else ""
            lever = "; mixed precision, compile=True or more devices would help"
            if FORWARD not in self.named_phases:
                lever += ", if the model takes the time: unisono.phase(...) around its lines shows whether it does"
            lever = self._longest_named() or lever
            return f"compute-bound: {source + transfer:.0%} of the step waits for data{for_others}{lever}"
        if source >= transfer:
            lever = "more loader workers would help"
            if any(each.workers for each in self.ranks):  # which are as many as help
                lever = "cheaper samples would help, and persistent_workers=True where epochs are short"
            return f"input-bound: {source:.0%} of the step waits for the dataset; {lever}"
        return (
            f"transfer-bound: {transfer:.0%} of the step waits for batches to be moved; samples of a smaller type "
            "would help"
        )

    def _longest_named(self) -> str:
        """Name the longest named phase, if it took enough time to matter; where the model's passes are known, perhaps
        the lines around them."""
        names = [*self.named_phases, *([COMPUTE, STEP] if FORWARD in self.named_phases else [])]
        shares = {name: self._share(name) for name in names}
        longest = max(shares, key=shares.__getitem__, default="")
        what = "lines around the model: name them, with unisono.phase(...)" if longest == COMPUTE else label(longest)
        is_model = longest in ("", FORWARD, BACKWARD)
        return "" if is_model or shares[longest] < _BOUND else f"; {shares[longest]:.0%} goes to {what}"


def slowest_of(own: Mapping[int, float]) -> int | None:
    """The rank that spent the largest share of its time on anything but waiting for peers, by over 10 %; None if there
    is none."""
    rank = max(own, key=own.__getitem__, default=-1)
    others = [seconds for each, seconds in own.items() if each != rank]
    return rank if others and own[rank] > 1.1 * max(others) else None
