"""Two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from unisono.report.run import Run
from unisono.report.summary import LOOP_PHASES, label
from unisono.report.text import OWN_NAMED, aligned


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
