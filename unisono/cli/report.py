"""`unisono report`: where the time of a run went, as a table and a page; or two runs beside each other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.report.diagnosis import diagnose
from unisono.report.page import write_page
from unisono.report.run import Run, read_run
from unisono.report.summary import LOOP_PHASES, label
from unisono.report.text import aligned, table_of
from unisono.report.trace import write_trace


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="where the time of a run went",
        description="Prints where the time of a run went, and writes it as one HTML page, which needs no network. The "
        "run has its files in a log directory: unisono run --log-dir logs, or spawn(output=Output('logs')). With a "
        "second run, prints both, and their ratio.",
    )
    parser.add_argument("run_directory", metavar="RUN", help="a run's directory, or a log directory: its latest run")
    parser.add_argument("other", metavar="RUN2", nargs="?", help="another run, to compare")
    parser.add_argument("-o", "--output", help="the page; default: RUN/report.html")
    parser.add_argument("--trace", metavar="FILE", help="also write a trace for https://ui.perfetto.dev")
    parser.set_defaults(parser=parser, run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    try:
        found = read_run(arguments.run_directory)
        if arguments.other is not None:
            print(compare(found, read_run(arguments.other)))
            return 0
        if found.report.ranks:
            print(table_of(found.report))
        print(diagnose(found))
        for text in found.missing:
            print(f"missing: {text}", file=sys.stderr)
        print(write_page(found, arguments.output or found.directory / "report.html"))
        if arguments.trace:
            print(write_trace(found, arguments.trace))
    except OSError as error:
        print(f"unisono report: {error}", file=sys.stderr)
        return 1
    return 0


def compare(first: Run, second: Run) -> str:
    """A table of both runs, and the ratio of the second to the first."""
    rows = [["", "first", "second", "ratio"]]
    for name, number_of, form in _NUMBERS:
        one, other = number_of(first), number_of(second)
        ratio = f"{other / one:.3f}" if one and not np.isnan(other / one) else ""
        rows.append([name, form.format(one), form.format(other), ratio])
    return aligned(rows)


def _share(phase: str) -> Callable[[Run], float]:
    return lambda run: float(np.mean([each.share(phase) for each in run.report.ranks] or [np.nan]))


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
    ("step, median, ms", _step_ms(0.5), "{:.3f}"),
    ("step, 95 %, ms", _step_ms(0.95), "{:.3f}"),
    *((label(phase), _share(phase), "{:.1%}") for phase in LOOP_PHASES),
    (
        "memory, MB",
        lambda run: max((one["rss"] for each in run.ranks for one in each.samples), default=0) / 1e6,
        "{:,.0f}",
    ),
]
