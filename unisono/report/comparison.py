"""Two runs side by side: as a table, and as one HTML page, which needs no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from unisono.report.page import charts_of_logged, is_number, legend_of, write_html
from unisono.report.run import Run
from unisono.report.summary import LOOP_PHASES, label
from unisono.report.text import OWN_NAMED, aligned

NAMES = ("first", "second")  # as the words on their bits call them
_NOTHING = "–"


def compare(first: Run, second: Run, names: Sequence[str] = ("first", "second")) -> str:
    """A table of both runs, under these names, and the ratio of the second to the first; then the verdict on each."""
    own = [phase for phase in OWN_NAMED if phase in {*first.report.named_phases, *second.report.named_phases}]
    rows = [["", *names, "ratio"], *rows_of(first, second, (*LOOP_PHASES, *own))]
    verdicts = [f"{name}: {run.verdict}" for name, run in zip(names, (first, second), strict=True)]
    return "\n".join([aligned(rows), "", *verdicts])


def rows_of(first: Run, second: Run, phases: Sequence[str] = ()) -> list[list[str]]:
    """The rows of the table, with the shares of these phases."""
    rows = []
    for name, number_of, form in [*_NUMBERS, *((label(phase), share(phase), "{:.1%}") for phase in phases)]:
        one, other = number_of(first), number_of(second)
        ratio = f"{other / one:.3f}" if one and not np.isnan(other / one) else ""
        rows.append([name, *("" if np.isnan(each) else form.format(each) for each in (one, other)), ratio])
    return rows


def share(phase: str) -> Callable[[Run], float]:
    """The mean share of the ranks' time in loops that went to a phase of a run; NaN if no rank has recorded it."""
    return lambda run: float(np.mean([each.share(phase) for each in run.report.ranks] or [np.nan]))


def _steps_per_second(run: Run) -> float:
    ranks = run.report.ranks
    seconds = max((each.loop_seconds for each in ranks), default=0.0)
    return max(each.steps for each in ranks) / seconds if seconds else 0.0


def _step_ms(quantile: float) -> Callable[[Run], float]:
    def found(run: Run) -> float:
        times = [seconds for each in run.ranks for _, seconds in each.steps()]
        return 1e3 * float(np.quantile(times, quantile)) if times else float("nan")

    return found


_NUMBERS: list[tuple[str, Callable[[Run], float], str]] = [
    ("ranks", lambda run: len(run.ranks), "{:,}"),
    ("seconds", lambda run: run.seconds, "{:,.1f}"),
    ("samples", lambda run: run.report.samples, "{:,}"),
    ("samples/s", lambda run: run.report.samples_per_second if run.report.ranks else 0.0, "{:,.0f}"),
    ("steps/s", _steps_per_second, "{:,.1f}"),
    ("step, median, ms", _step_ms(0.5), "{:.3f}"),
    ("step, 95 %, ms", _step_ms(0.95), "{:.3f}"),
    (
        "memory, MB",
        lambda run: max((one["rss"] for each in run.ranks for one in each.samples), default=0) / 1e6,
        "{:,.0f}",
    ),
]


def write_comparison(runs: tuple[Run, Run], paths: Sequence[str], bits: str, path: str | Path) -> Path:
    """Write the page; return its absolute path. OSError if it cannot be written. `paths` are the places of both runs,
    as the user names them; `bits` says whether their bits differ."""
    return write_html("comparison.html", " and ".join(paths), comparison_data(runs, paths, bits), path)


def comparison_data(runs: tuple[Run, Run], paths: Sequence[str], bits: str) -> dict[str, Any]:
    """What the page shows, as JSON."""
    named = [*dict.fromkeys(phase for run in runs for phase in run.report.named_phases)]
    phases = legend_of(named)
    shares = [[share(phase)(run) if run.report.ranks else 0.0 for phase in (*LOOP_PHASES, *named)] for run in runs]
    settings = _rows_side_by_side(*({name: _text(value) for name, value in _settings(run).items()} for run in runs))
    return {
        "runs": [[*each, _facts(run), run.verdict] for *each, run in zip(NAMES, paths, runs, strict=True)],
        "bits": bits.splitlines(),
        "missing": [
            f"{name}: {text}"
            for name, run in zip(NAMES, runs, strict=True)
            for text in (*run.failures, *filter(None, [run.restarts.summary]), *run.missing)
        ],
        "differing": [row for row in settings if row[1] != row[2]],
        "equal": [row for row in settings if row[1] == row[2]],
        "logged": _logged(*(run.last_logged for run in runs)),
        "numbers": rows_of(*runs),
        "phases": phases,
        "bars": shares,
        "shares": [
            [name, f"{one:.1%}", f"{other:.1%}", f"{other - one:+.1%}"]
            for (name, _), one, other in zip(phases, *shares, strict=True)
        ],
        "charts": charts_of_logged(*runs, names=NAMES),
    }


def _facts(run: Run) -> list[str]:
    devices = {run.device_of(each).rpartition(" ")[2].partition(":")[0] for each in run.ranks} - {""}
    return [
        f"began {datetime.fromtimestamp(run.began, UTC):%Y-%m-%d %H:%M:%S} UTC",
        f"{run.seconds:,.1f} s",
        " ".join([f"{len(run.ranks)} rank(s)", *(["on", *sorted(devices)] if devices else [])]),
    ]


def _settings(run: Run) -> dict[str, Any]:
    return {"command": run.command} | run.settings | run.versions | {"commit": run.commit[:12]}


def _rows_side_by_side(first: Mapping[str, str], second: Mapping[str, str]) -> list[list[str]]:
    names = [*dict.fromkeys([*first, *second])]
    rows = [[name, first.get(name) or _NOTHING, second.get(name) or _NOTHING] for name in names]
    return [row for row in rows if {*row[1:]} != {_NOTHING}]


def _logged(*both: tuple[int | None, Mapping[str, Any]]) -> list[list[str]]:
    """The values that were logged last, and the second minus the first."""
    first, second = ({**({} if step is None else {"step": step}), **values} for step, values in both)
    rows = _rows_side_by_side(*({name: _text(value) for name, value in each.items()} for each in (first, second)))
    for row in rows:
        one, other = first.get(row[0], ""), second.get(row[0], "")
        row.append(f"{other - one:+.4g}" if is_number(one) and is_number(other) else "")
    return rows


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
