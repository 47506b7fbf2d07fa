"""A run now, as text: what each rank is doing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from unisono.report.run import RankRecord, Run
from unisono.report.summary import label
from unisono.report.text import aligned
from unisono.report.timeline import BACKWARD, COMPUTE, EVALUATE, FETCH, FORWARD, MOVE, REDUCE, STEP

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
        spans += "; for a rank that has ended, all its time, also outside loops"
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
