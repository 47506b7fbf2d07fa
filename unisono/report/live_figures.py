"""What rank zero knows of a run that is going, in a few words."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from unisono.report.gathering import summarise
from unisono.report.run import summary_of
from unisono.report.summary import CAUSES, PEERS, RankSummary, slowest_of
from unisono.world import World

_EVERY_S = 1.0
_NOTABLE = 0.1  # the share of the time from which a cause of waiting is named
_TAIL = 262144  # bytes of a record: several lines of at most ten thousand each
_LINES = 11  # of them, over which the ranks are compared
_PATIENCE = 200  # times as long as the last comparison took: when the next one is due


class LiveFigures:
    """What rank zero knows of the run meanwhile, from the counters of its own timeline.

    *Threads:* the loop's; `_find_slowest` runs on the one that writes the record.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._first = self._last = summarise(world, is_own_thread=False)
        self._next = time.monotonic() + _EVERY_S
        self._parts: list[str] = []
        self._slowest: int | None = None
        self._compare_at = 0.0
        world.timeline.at_sample.append(self._find_slowest)

    def parts(self, is_last: bool = False) -> list[str]:
        """The figures of about the last second, the most important first; at last, those of the time since the
        beginning. [] if there are none yet."""
        if is_last or time.monotonic() >= self._next:
            now = summarise(self._world, is_own_thread=False)
            self._parts = self._describe(_between(self._first if is_last else self._last, now), now.steps)
            self._last, self._next = now, time.monotonic() + _EVERY_S
        return self._parts

    def close(self) -> None:
        """No longer read the records of the ranks; may be called again."""
        with contextlib.suppress(ValueError):
            self._world.timeline.at_sample.remove(self._find_slowest)

    def _describe(self, passed: RankSummary, steps: int) -> list[str]:
        if not passed.loop_seconds:
            return []
        logged, slowest = self._world.timeline.last_logged, self._slowest
        loss = next((name for name in logged if "loss" in name.lower() and isinstance(logged[name], float)), None)
        rate = passed.samples / passed.loop_seconds * self._world.world_size
        waits = {cause: passed.waited(cause) / passed.loop_seconds for cause in CAUSES}
        cause = max(waits, key=waits.__getitem__)
        is_named = slowest and cause == PEERS  # rank zero does not wait for itself
        what = f"rank {slowest}" if is_named else _WAITS[cause]
        return [
            *([] if loss is None else [f"{loss}={logged[loss]:.4g}"]),
            f"waits {sum(waits.values()):.0%}" + (f" for {what}" if waits[cause] >= _NOTABLE else ""),
            *([] if slowest is None or is_named else [f"rank {slowest} is slow"]),
            f"{rate:,.0f} samples/s",
            f"step {steps:,}",
        ]

    def _find_slowest(self, directory: Path) -> None:
        """Compare the records of all ranks. Without all of them, as where machines do not share the directory, there is
        no slowest one."""
        if time.monotonic() < self._compare_at:
            return
        slowest, began = None, time.thread_time()  # a thread that was stopped for a while has cost nothing
        with contextlib.suppress(Exception):  # a rank that has not begun, a line that is cut off, a division by no time
            own = {}
            for rank in range(self._world.world_size):
                passed = _between(*_ends_of(directory / f"rank-{rank}.jsonl"))
                own[rank] = (passed.loop_seconds - passed.waited(PEERS)) / passed.loop_seconds
            slowest = slowest_of(own)
        self._slowest, self._compare_at = slowest, time.monotonic() + _PATIENCE * (time.thread_time() - began)


_WAITS = dict(zip(CAUSES, ("data", "transfers", "other ranks"), strict=True))


def _between(before: RankSummary, after: RankSummary) -> RankSummary:
    """What has happened from one summary of a rank to a later one."""

    def passed(first: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
        return {name: value - first.get(name, 0.0) for name, value in then.items()}

    return replace(
        after,
        samples=after.samples - before.samples,
        seconds=passed(before.seconds, after.seconds),
        waits=passed(before.waits, after.waits),
    )


def _ends_of(path: Path) -> tuple[RankSummary, RankSummary]:
    """The first and the last line of the latest part of a record. Its errors are those of a record that has none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().split(b"\n")[1:-1]  # the first may be cut off, or has the facts; the last is being written
    lines = [each for each in lines if each.startswith(b'{"t"')][-_LINES:]  # those of a second
    first, last = (summary_of(json.loads(line)) for line in (lines[0], lines[-1]))
    return first, last
