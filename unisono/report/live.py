"""A run now: what each rank is doing, as text."""

from __future__ import annotations

from typing import Any

from unisono.report.diagnosis import diagnose
from unisono.report.run import RankRecord, Run
from unisono.report.summary import label
from unisono.report.text import aligned

_HEADINGS = ["rank", "device", "is", "step", "steps/s", "samples/s", "waits", "cores", "MB", "device MB"]


def describe(run: Run) -> str:
    """The run now, as text."""
    rows = [_HEADINGS, *map(_row, run.ranks)]
    lines = [f"{run.command}, {run.seconds:,.0f} s, {run.directory}", "", aligned(rows), "", diagnose(run)]
    return "\n".join([*lines, *(f"missing: {text}" for text in run.missing)])


def is_alive(record: RankRecord) -> bool:
    """Whether the rank has not ended, and goes on recording."""
    return record.end is None and not record.is_silent


def _row(record: RankRecord) -> list[str]:
    """Of the last line, and the changes since the one before it; of a rank that has ended, since its beginning."""
    if not record.samples:
        return [str(record.rank), "", record.end or "begins", *[""] * (len(_HEADINGS) - 3)]
    now = record.samples[-1]
    nothing: dict[str, Any] = {"t": 0.0, "steps": 0, "samples": 0, "cpu_s": 0.0, "seconds": {}}
    before = record.samples[-2] if len(record.samples) > 1 and record.end is None else nothing
    passed = max(now["t"] - before["t"], 1e-3)
    rates = [(now[name] - before[name]) / passed for name in ("steps", "samples", "cpu_s")]
    waited = now["seconds"].get("fetch", 0.0) - before["seconds"].get("fetch", 0.0)
    numbers = [f"{now['steps']:,}", f"{rates[0]:,.1f}", f"{rates[1]:,.0f}", f"{min(1.0, waited / passed):.0%}"]
    device = f"{now['memory'] / 1e6:,.0f}" if now.get("peak_memory") else ""
    use = [f"{max(0.0, rates[2]):.1f}", f"{now['rss'] / 1e6:,.0f}", device]
    return [str(record.rank), now["device"], _state(record), *numbers, *use]


def _state(record: RankRecord) -> str:
    if record.end is not None:
        return record.end[:60]
    if record.is_silent:
        return f"silent for {record.age_s:,.0f} s"
    now = record.samples[-1]
    return now["doing"] or (label(now["phase"]) if now["phase"] else "outside loops")
