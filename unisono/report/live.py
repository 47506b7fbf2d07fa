"""A run now, as text: what each rank is doing; and what rank zero itself knows, in a few words."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from unisono.report.run import RankRecord, Run, summary_of
from unisono.report.summary import CAUSES, PEERS, RankSummary, label, slowest_of, summarise
from unisono.report.text import aligned
from unisono.report.timeline import BACKWARD, COMPUTE, EVALUATE, FETCH, FORWARD, MOVE, REDUCE, STEP
from unisono.world import World

_EVERY_S = 1.0
_NOTABLE = 0.1  # a cause of waiting is named from this share of the time on
_TAIL = 262144  # bytes of a record: several lines, of at most some ten thousand
_LINES = 11  # of them: the ranks are compared over that time
_PATIENCE = 200  # times as long as the last comparison took: when the next one is due

_HEADINGS = ["rank", "device", "is", "step", "steps/s", "samples/s", "waits", "cores", "MB", "device MB", "time"]
_BAR = 16  # characters
_LETTERS = {FETCH: "w", COMPUTE: "c", FORWARD: "f", BACKWARD: "b", REDUCE: "r", STEP: "s", EVALUATE: "e"}
_OTHER = "o"
_PAINTS = {"w": 31, "c": 34, "f": 35, "b": 36, "r": 33, "s": 32, "e": 37, _OTHER: 90}  # of a terminal
_TOGETHER = "\N{NO-BREAK SPACE}"  # a letter and its meaning
_MEANINGS = {letter: label(phase) for phase, letter in _LETTERS.items()} | {_OTHER: "others"}


def describe(run: Run, columns: int = 0, is_coloured: bool = False) -> list[str]:
    """The run now, as lines of at most that many columns, or of any width; in the colours of a terminal, if wanted."""
    rows = [_HEADINGS, *(_row(run, each) for each in run.ranks)]
    kept = [name for name, *cells in zip(*rows, strict=True) if any(cells)]
    table = aligned([[cell for name, cell in zip(_HEADINGS, row, strict=True) if name in kept] for row in rows])
    letters = {letter for row in rows[1:] for letter in row[-1]}
    legend = ", ".join(f"{letter}{_TOGETHER}{meaning}" for letter, meaning in _MEANINGS.items() if letter in letters)
    spans = "rates: of the last second"
    if any(each.end is not None for each in run.ranks):
        spans += "; of a rank that has ended, of all its time, also outside loops"
    sentences = [
        *filter(None, [_place_line(run), logged_line(run), run.restarts.summary, legend and f"time: {legend}", spans]),
        run.verdict,
    ]
    sentences += [f"missing: {text}" for text in run.missing]
    folded = [line for each in sentences for line in (textwrap.wrap(each, columns) if columns else [each])]
    title = f"{run.command}, {run.seconds:,.0f} s, {run.directory}"
    lines = [each[: columns or None] for each in [title, "", *table.splitlines(), "", *folded]]
    if is_coloured:
        lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
        wide = max(map(len, table.splitlines())) - _BAR  # the bars are last, and to the right
        for place in range(3, 3 + len(run.ranks)) if letters else ():
            lines[place] = lines[place][:wide] + re.sub(r"(\w)\1*", _paint_letters, lines[place][wide:])
        lines = [re.sub(f"\\b(\\w)(?={_TOGETHER})", _paint_letters, each) for each in lines]
    return [each.replace(_TOGETHER, " ") for each in lines]


def _paint_letters(letters: re.Match[str]) -> str:
    return f"\x1b[7;{_PAINTS.get(letters[1], 39)}m{letters[0]}\x1b[0m"


def _place_line(run: Run) -> str:
    """The epoch, and the time to its end; "" if no rank trains, or it has ended."""
    place = run.place
    if place is None or all(each.end is not None for each in run.ranks):
        return ""
    left = ""
    if place.seconds_left is not None:
        left = f", about {timedelta(seconds=round(place.seconds_left))} to the end of the epoch"
    of = "" if place.length is None else f" of {place.length:,}"
    return f"epoch {place.epoch}: batch {place.batch:,}{of}{left}"


def logged_line(run: Run) -> str:
    """The numbers that were logged last; "" if there are none."""
    step, values = run.last_logged
    numbers = [
        f"{name}={value:.4g}"
        for name, value in values.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)  # else it is no float
    ]
    return f"logged{'' if step is None else f' at step {step:,}'}: {', '.join(numbers)}" if numbers else ""


def _bar(seconds: Mapping[str, float]) -> str:
    """The shares of phases, as letters."""
    shares: dict[str, float] = {}
    for phase, spent in seconds.items():
        if phase != MOVE and spent > 0:
            letter = _LETTERS.get(phase, _OTHER)
            shares[letter] = shares.get(letter, 0.0) + spent
    total, drawn, bar = sum(shares.values()), 0.0, ""
    for letter in (*_LETTERS.values(), _OTHER):
        drawn += shares.get(letter, 0.0)
        bar += letter * (round(drawn / total * _BAR) - len(bar) if total else 0)
    return bar


def is_alive(record: RankRecord) -> bool:
    """Whether the rank has not ended, and continues to record."""
    return record.end is None and not record.is_silent


def _row(run: Run, record: RankRecord) -> list[str]:
    """Of the last line, and the changes since the one before it; of a rank that has ended, since its beginning."""
    if not record.samples:
        return [str(record.rank), "", record.end or "begins", *[""] * (len(_HEADINGS) - 3)]
    now = record.samples[-1]
    nothing: dict[str, Any] = {"t": 0.0, "steps": 0, "samples": 0, "cpu_s": 0.0, "seconds": {}}
    before = record.samples[-2] if len(record.samples) > 1 and record.end is None else nothing
    passed = max(now["t"] - before["t"], 1e-3)
    rates = [(now[name] - before[name]) / passed for name in ("steps", "samples", "cpu_s")]
    spent = {phase: each - before["seconds"].get(phase, 0.0) for phase, each in now["seconds"].items()}
    waited = sum(spent.get(phase, 0.0) for phase in (FETCH, REDUCE))
    numbers = [f"{now['steps']:,}", f"{rates[0]:,.1f}", f"{rates[1]:,.0f}", f"{min(1.0, waited / passed):.0%}"]
    device = f"{now['memory'] / 1e6:,.0f}" if now.get("peak_memory") else ""
    use = [f"{max(0.0, rates[2]):.1f}", f"{now['rss'] / 1e6:,.0f}", device]
    return [str(record.rank), run.device_of(record), _state(record), *numbers, *use, _bar(spent)]


def _state(record: RankRecord) -> str:
    if record.end is not None:
        return " ".join(record.end.split())[:60]
    if record.is_silent:
        return f"silent for {record.age_s:,.0f} s"
    if record.is_lost:
        return "gone"
    now = record.samples[-1]
    return now["doing"] or (label(now["phase"]) if now["phase"] else "outside loops")


class LiveFigures:
    """What rank zero knows of the run while it runs, from the counters of its own timeline.

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
        """The figures of about the last second, the most important first; at the end, those since the beginning. [] if
        there are none yet."""
        if is_last or time.monotonic() >= self._next:
            now = summarise(self._world, is_own_thread=False)
            self._parts = self._describe(_summary_between(self._first if is_last else self._last, now), now.steps)
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
                passed = _summary_between(*_ends_of(directory / f"rank-{rank}.jsonl"))
                own[rank] = (passed.loop_seconds - passed.waited(PEERS)) / passed.loop_seconds
            slowest = slowest_of(own)
        self._slowest, self._compare_at = slowest, time.monotonic() + _PATIENCE * (time.thread_time() - began)


_WAITS = dict(zip(CAUSES, ("data", "transfers", "other ranks"), strict=True))


def _summary_between(before: RankSummary, after: RankSummary) -> RankSummary:
    """What happened from one summary of a rank to a later one."""

    def passed(first: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
        return {name: value - first.get(name, 0.0) for name, value in then.items()}

    return replace(
        after,
        samples=after.samples - before.samples,
        seconds=passed(before.seconds, after.seconds),
        waits=passed(before.waits, after.waits),
    )


def _ends_of(path: Path) -> tuple[RankSummary, RankSummary]:
    """The first and the last line of the latest part of a record. Its errors are those of a record without lines."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().split(b"\n")[1:-1]  # the first may be cut off, or has the facts; the last is being written
    lines = [each for each in lines if each.startswith(b'{"t"')][-_LINES:]  # those of a second
    first, last = (summary_of(json.loads(line)) for line in (lines[0], lines[-1]))
    return first, last
