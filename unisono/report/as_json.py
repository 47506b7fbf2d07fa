"""What is known of a run, as data for other programs: `unisono report --json`, `unisono top --once --json`.

The names are documented in docs/profiling.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from unisono.report.run import RankRecord, Run, place_of

FORMAT = 1
"""The version of the names: a new number if one of them changes its meaning or is left out."""


def as_json(run: Run) -> dict[str, Any]:
    """Everything but what was recorded second by second."""
    report, restarts = run.report, run.restarts
    return {
        "format": FORMAT,
        "directory": str(run.directory.resolve()),
        "command": run.command,
        "settings": _finite(run.settings),
        "versions": run.versions,
        "commit": run.commit,
        "last_logged": _finite(run.last_logged[1]),
        "began": run.began,
        "seconds": run.seconds,
        "samples_per_second": report.samples_per_second if report.ranks else 0.0,
        "verdict": run.verdict,
        "failures": run.failures,
        "missing": run.missing,
        "restarts": [asdict(each) for each in restarts.all],
        "steps_repeated": restarts.repeated,
        "goodput": restarts.goodput,
        "ranks": [_rank(each) for each in run.ranks],
    }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: its name, as a string."""
    names = {name: str(value) for name, value in values.items() if isinstance(value, float) and not isfinite(value)}
    return {**values, **names}


def _rank(record: RankRecord) -> dict[str, Any]:
    last = record.samples[-1] if record.samples else {}
    place = place_of(record)
    numbers = {} if record.summary is None else asdict(record.summary)
    numbers.pop("spans", None)
    times = sorted(seconds for _, seconds in record.steps())
    return {
        **numbers,
        "rank": record.rank,
        "host": record.host,
        "end": record.end,
        "is_lost": record.is_lost,
        "phase": last.get("phase", ""),
        "doing": last.get("doing", ""),
        "steps_done": last.get("done"),
        "place": None if place is None else asdict(place),
        "median_step_seconds": times[len(times) // 2] if times else None,
        "checkpoint": record.checkpoint,
    }
