"""What the failures of a run have cost: for each restart what failed, the steps that were repeated, and the time.

The lowest rank in the records stands for all: they take their steps together. Seconds count from the start of its first
attempt, when all ranks had joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.report.run import Attempt


@dataclass(frozen=True)
class Restart:
    """One restart of all ranks."""

    number: int  # from 1
    what: str  # had failed, in a few words; "" if nothing is recorded, as when a machine has come back
    noticed_s: float | None  # when that was noticed; None if nothing is recorded
    ranks: tuple[int, int]  # their number before and after; 0 of an attempt that failed before ranks had joined
    step: int  # optimizer steps that were done then; an attempt that took none leaves those of the one before it
    continued: int | None  # steps of the state that the next attempt has loaded, or 0; None if it took no step
    repeated: int  # steps that it does again: `step - continued`; 0 where `continued` is None
    seconds: float | None  # from the fault to the end of the first step after it; None if there is none

    def __str__(self) -> str:
        before, after = self.ranks
        when = "" if self.noticed_s is None else f" after {self.noticed_s:,.1f} s"
        ranks = f", {after} rank(s) instead of {before}" if before and after and before != after else ""
        what = self.what or "the ranks have started again"
        text = f"restart {self.number}: {what}{when}, at step {self.step:,}{ranks}; "
        if self.continued is None:
            return f"{text}no step followed"
        took = "" if self.seconds is None else f", {self.seconds:,.1f} s to the end of the next step"
        return f"{text}continued from step {self.continued:,}, {self.repeated:,} repeated{took}"


@dataclass(frozen=True)
class Restarts:
    """All restarts of a run.

    Attributes:
        all: in their order.
        goodput: the fraction of the time that made progress: that of the steps that were kept, out of the time from the
            start of the first attempt, when all its ranks had joined, to the last line of the record. The time of an
            attempt's steps runs from the start of its first step to the end of its last one, with what the loop did
            between steps, such as evaluating and saving; its last kept step is the one that a later attempt continues
            from. So steps that were done again, and the time to notice a fault, to start and to load, are lost.
    """

    all: list[Restart]
    goodput: float

    @property
    def repeated(self) -> int:
        """The number of steps that were done again."""
        return sum(each.repeated for each in self.all)

    @property
    def summary(self) -> str:
        """All of them in a line; "" if there are none."""
        if not self.all:
            return ""
        took = [each.seconds for each in self.all if each.seconds is not None]
        longest = f" (median; {max(took):,.1f} s at most)" if len(took) > 1 else ""
        to_next = f", {median(took):,.1f} s from a fault to the end of the next step{longest}" if took else ""
        return (
            f"{len(self.all)} restart(s), {self.repeated:,} steps repeated{to_next}, "
            f"{self.goodput:.1%} of the time made progress"
        )


def restarts_of(attempts: Sequence[Attempt]) -> Restarts:
    """The restarts between these attempts."""
    known = [_Known(each, attempts) for each in attempts]
    found, furthest = [], 0
    for number, (before, after) in enumerate(pairwise(known), 1):
        furthest = before.done if before.has_stepped else furthest
        next_s = next((each.first_s for each in known[number:] if each.has_stepped), None)
        took = None if next_s is None or before.fault_s is None else max(0.0, next_s - before.fault_s)
        what, ranks = before.fault.get("what", ""), (before.world_size, after.world_size)
        continued = after.loaded if after.has_stepped else None
        repeated = 0 if continued is None else max(0, furthest - continued)
        found.append(Restart(number, what, before.fault_s, ranks, furthest, continued, repeated, took))
    kept_s, kept = 0.0, None
    for each in reversed(known):
        if each.has_stepped:
            kept_s += each.seconds_of_steps(kept)
            kept = each.loaded if kept is None else min(kept, each.loaded)
    whole_s = known[-1].end_s if known else 0.0
    return Restarts(found, kept_s / whole_s if whole_s else 0.0)


class _Known:
    """What is known of one attempt, in seconds since the first one began."""

    def __init__(self, attempt: Attempt, attempts: Sequence[Attempt]) -> None:
        began = next((each.ranks[0].began for each in attempts if each.ranks), 0.0)
        record = attempt.ranks[0] if attempt.ranks else None
        self.fault, faults = attempt.fault, attempt.faults
        # By the clock of the rank's own machine, if that machine knows of the fault.
        near = [each for each in faults if record is not None and each["host"] == record.host] or faults[:1]
        last = record.samples[-1] if record is not None and record.samples else {}
        self.fault_s: float | None = min(each["at"] for each in near) - began if near else None
        self.world_size: int = self.fault.get("world_size") or (record.facts.get("world_size", 0) if record else 0)
        self.done: int = max([last.get("done") or 0, *(each["done"] for each in faults)])
        loaded = [last.get("loaded"), *(each["loaded"] for each in faults)]
        self.loaded: int = max((each for each in loaded if each is not None), default=0)
        self.begin_s = record.began - began if record is not None else self.fault_s or 0.0
        first_s = last.get("first_step")
        if first_s is not None:
            self.first_s: float | None = self.begin_s + first_s
        else:
            self.first_s = next((each["first_step"] - began for each in near if each["first_step"]), None)
        self.end_s = max(self.begin_s + last.get("t", 0.0), self.fault_s or 0.0)
        self._points = list(self._steps_over_time(record.samples if record is not None else []))

    @property
    def has_stepped(self) -> bool:
        return self.first_s is not None

    def _steps_over_time(self, samples: Sequence[dict[str, Any]]) -> Iterator[tuple[float, int]]:
        """When how many steps were done."""
        if self.first_s is not None:
            took = next((seconds for each in samples for seconds in each["step_seconds"]), 0.0)
            yield self.first_s - took, self.loaded
            yield self.first_s, self.loaded + 1
            times = ((self.begin_s + each["t"], each["done"]) for each in samples)
            yield from ((time, done) for time, done in times if time > self.first_s)
            yield self.end_s, self.done

    def seconds_of_steps(self, kept: int | None) -> float:
        """The time from the start of the first step to the end of the last kept one, None for all; between two lines of
        the record, steps count as equally long."""
        last = self.done if kept is None else min(kept, self.done)
        begin, before = self._points[0]
        at = begin
        for time, done in self._points:
            if done >= last:
                return max(0.0, at + (time - at) * (last - before) / (done - before) - begin) if done > before else 0.0
            at, before = time, max(before, done)
        return max(0.0, at - begin)
