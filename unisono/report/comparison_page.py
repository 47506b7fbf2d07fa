"""Two runs side by side, as one HTML page, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.report.comparison import rows_of, share
from unisono.report.page import charts_of_logged, is_number, legend_of, write_html
from unisono.report.run import Run
from unisono.report.summary import LOOP_PHASES

NAMES = ("first", "second")  # as the words on their bits call them
_NOTHING = "–"


def write_comparison(runs: tuple[Run, Run], paths: Sequence[str], bits: str, path: str | Path) -> Path:
    """Write the page; return its absolute path. OSError if it cannot be written.

    Args:
        runs: the first and the second run.
        paths: their places, as the user names them.
        bits: whether their bits differ, in words.
        path: of the page.
    """
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
