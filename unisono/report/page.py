"""The record of a run as one HTML page, which needs no network: charts by uPlot, which it contains."""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from unisono.report.live import logged_line
from unisono.report.run import RankRecord, Run
from unisono.report.summary import LOOP_PHASES, colours_of, label

_MAX_POINTS = 20_000  # per line of a chart; beyond, every n-th is drawn
_BINS = 40
_MAX_LOGGED = 6
_PARTS = {"train", "training", "valid", "validation", "val", "eval", "evaluation", "test"}


def write_page(run: Run, path: str | Path) -> Path:
    """Write the page; return its absolute path. OSError if it cannot be written."""
    return write_html("page.html", run.command, page_data(run), path)


def write_html(name: str, title: str, data: dict[str, Any], path: str | Path) -> Path:
    """Write the page of that name among the assets, with its data; return its absolute path. OSError if it cannot be
    written."""
    assets = Path(__file__).with_name("assets")
    parts = {
        "title": html.escape(title),
        "uplot_css": (assets / "uPlot.min.css").read_text("utf-8"),
        "uplot_js": (assets / "uPlot.min.js").read_text("utf-8"),
        "page_css": (assets / "page.css").read_text("utf-8"),
        "page_js": (assets / "page.js").read_text("utf-8"),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = (assets / name).read_text("utf-8")
    for part, value in parts.items():
        text = text.replace("{{" + part + "}}", value)
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def page_data(run: Run) -> dict[str, Any]:
    """What the page shows, as JSON."""
    report = run.report
    phases = [*LOOP_PHASES, *report.named_phases]
    began = datetime.fromtimestamp(run.began, UTC)
    facts = [
        f"began {began:%Y-%m-%d %H:%M:%S} UTC",
        f"{run.seconds:,.1f} s",
        f"{len(run.ranks)} rank(s)",
        f"{report.samples:,} samples, {report.samples_per_second:,.0f} per second in loops"
        if report.ranks
        else "no loop",
        *filter(None, [run.restarts.summary]),
        *run.failures,
        *filter(None, [logged_line(run)]),
        *(f"{name} {number}" for name, number in run.versions.items()),
        *([f"commit {run.commit[:12]}"] if run.commit else []),
        *(f"{name}={value}" for name, value in run.settings.items()),
    ]
    return {
        "facts": facts,
        "verdict": run.verdict,
        "seconds": run.seconds,
        "phases": legend_of(report.named_phases),
        "table": _table(run, phases),
        "restarts": _restarts(run),
        "ranks": [_timeline_of(run, each, phases) for each in run.ranks],
        "missing": run.missing,  # after the timelines, which are read for them
        "charts": list(filter(None, _charts(run))),
    }


def legend_of(named: Sequence[str]) -> list[list[str]]:
    """The labels and colours of a loop's phases, and of these named ones."""
    colours = colours_of(named)
    return [[label(phase), colours[phase]] for phase in (*LOOP_PHASES, *named)]


def _table(run: Run, phases: Sequence[str]) -> list[list[str]]:
    rows = [["rank", "end", "device", *map(label, phases), "steps", "samples", "samples/s in loops", "memory"]]
    for each in run.ranks:
        found = each.summary
        if found is None:
            rows.append([str(each.rank), _end(each.end or "no record"), *[""] * (len(rows[0]) - 2)])
            continue
        rate = found.samples / found.loop_seconds if found.loop_seconds else 0.0
        shares = [f"{found.share(phase):.1%}" for phase in phases]
        memory = max(sample["rss"] for sample in each.samples)
        counts = [f"{found.steps:,}", f"{found.samples:,}", f"{rate:,.0f}", f"{memory / 1e6:,.0f} MB"]
        rows.append([str(each.rank), _end(each.end or "running"), run.device_of(each), *shares, *counts])
    return rows


def _end(end: str) -> str:
    """Short: the facts have the whole error."""
    return end.partition(":")[0]


def _restarts(run: Run) -> list[list[str]]:
    """A table of the restarts; [] if there are none."""
    rows = [["restart", "after", "step", "ranks", "from step", "repeated", "to the next step", "what failed"]]
    for each in run.restarts.all:
        before, after = each.ranks
        seconds = ["" if one is None else f"{one:,.1f} s" for one in (each.noticed_s, each.seconds)]
        ranks = f"{before or '?'} to {after or '?'}" if before != after else f"{after}"
        begin = "" if each.continued is None else f"{each.continued:,}"
        numbers = [f"{each.step:,}", ranks, begin, f"{each.repeated:,}", seconds[1]]
        rows.append([str(each.number), seconds[0], *numbers, each.what])
    return rows if len(rows) > 1 else []


def _timeline_of(run: Run, record: RankRecord, phases: Sequence[str]) -> dict[str, Any]:
    """What each second was spent on, from the samples; and the spans of the rank's loop."""
    number = {phase: place for place, phase in enumerate(phases)}
    loops = [spans for track, spans in record.spans().items() if track.startswith("loop")]
    spans = [span for span in max(loops, key=len, default=[]) if span.phase in number]
    seconds = []
    for attempt in (*record.earlier, record):
        offset = run.offset(attempt)
        for before, after in pairwise([{"t": 0.0, "seconds": {}}, *attempt.samples]):
            spent = [max(0.0, after["seconds"].get(each, 0.0) - before["seconds"].get(each, 0.0)) for each in phases]
            length = max(after["t"] - before["t"], sum(spent), 1e-9)
            times = [round(offset + before["t"], 3), round(offset + after["t"], 3)]
            seconds.append([*times, [round(each / length, 3) for each in spent]])
    return {
        "name": f"rank {record.rank}",
        "seconds": seconds,
        "spans_from": round(offset + spans[0].start / 1e9, 6) if spans else 1e12,
        "spans": {
            "phase": [number[span.phase] for span in spans],
            "start": [round(offset + span.start / 1e9, 6) for span in spans],
            "length": [round((span.stop - span.start) / 1e9, 6) for span in spans],
        },
    }


def _charts(run: Run) -> list[dict[str, Any] | None]:
    return [
        *charts_of_logged(run),
        _chart_of_steps(run),
        _histogram_of_steps(run),
        _chart_over_time(run, "Throughput", "samples/s", _rates),
        _chart_over_time(run, "Main memory", "MB", lambda each: [one["rss"] / 1e6 for one in each.samples]),
        _chart_over_time(run, "CPU", "cores", _cores),
        _chart_over_time(run, "Memory of the device", "MB", lambda each: [one["memory"] / 1e6 for one in each.samples])
        if any(one.get("peak_memory") for each in run.ranks for one in each.samples)
        else None,
    ]


def charts_of_logged(*runs: Run, names: Sequence[str] = ("",)) -> list[dict[str, Any]]:
    """Charts of the first numbers that the loop has logged, losses before others; one chart for those that differ only
    in the part of the data. Those of several runs, under their names, share a chart."""
    logged = [_logged_of(run) for run in runs]
    together: dict[str, dict[str, None]] = {}
    for each in logged:
        for name in each:
            together.setdefault(_without_part(name), {})[name] = None
    charts = []
    for title in sorted(together, key=lambda title: "loss" not in title.lower())[:_MAX_LOGGED]:
        parts = [*together[title]]
        lines = [
            ([f"{of} {part}".strip()], [place, number] if len(runs) > 1 else [], _thinned(each[part], len(runs)))
            for place, (of, each) in enumerate(zip(names, logged, strict=True))
            for number, part in enumerate(parts)
            if part in each
        ]
        x = sorted({at for *_, points in lines for at in points})
        series = [[*head, [points.get(at) for at in x], *look] for head, look, points in lines]
        found = [one for each in logged for part in parts for one in each.get(part, {}).values() if one is not None]
        is_log = min(found) > 0 and max(found) > 100 * min(found)
        charts.append(_chart(title if len(parts) > 1 else parts[0], "", "step", x, series, log=is_log))
    return charts


def _logged_of(run: Run) -> dict[str, dict[float, float | None]]:
    """By name, what was a number at any step; None where it was not. For repeated steps, what was logged last."""
    attempts = [each for rank in run.ranks[:1] for each in (*rank.earlier, rank)]
    lines = (line for each in attempts for sample in each.samples for line in sample["logged"])
    found: defaultdict[str, dict[float, float | None]] = defaultdict(dict)
    for number, (_, step, values) in enumerate(lines):
        for name, value in values.items():
            found[name][number if step is None else step] = value if is_number(value) else None
    return {name: points for name, points in found.items() if any(one is not None for one in points.values())}


def _thinned(points: dict[float, float | None], runs: int) -> dict[float, float | None]:
    """Here, since steps of several runs may alternate: every n-th of all of them may come from one run only."""
    return dict(sorted(points.items())[:: -(-len(points) * runs // _MAX_POINTS) or 1])


def _without_part(name: str) -> str:
    """The name without the part of the data: "loss" of "train_loss" and of "val/loss"."""
    words = re.split(r"[_/. -]+", name)
    return "_".join(each for each in words if each.lower() not in _PARTS) or name


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it can be drawn: neither NaN, which JSON does not have, nor beyond what a browser can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _chart_of_steps(run: Run) -> dict[str, Any] | None:
    times = {each.rank: [1e3 * seconds for _, seconds in each.steps()] for each in run.ranks}
    length = max(map(len, times.values()), default=0)
    if not length:
        return None
    series = [
        [f"rank {rank}", [round(each, 3) for each in found] + [None] * (length - len(found))]
        for rank, found in times.items()
    ]
    return _chart("Time of a step", "ms", "step", list(range(1, length + 1)), series)


def _histogram_of_steps(run: Run) -> dict[str, Any] | None:
    times = np.array([1e3 * seconds for each in run.ranks for _, seconds in each.steps()])
    if not len(times):
        return None
    shown = times[times <= np.quantile(times, 0.99)]
    counts, edges = np.histogram(shown, bins=_BINS)
    middles = ((edges[:-1] + edges[1:]) / 2).round(4).tolist()
    title = "Distribution of step times, without the slowest 1 %"
    return _chart(title, "steps", "ms", middles, [["steps", counts.tolist()]], bars=True)


def _rates(record: RankRecord) -> list[float]:
    pairs = pairwise([{"t": 0.0, "samples": 0}, *record.samples])
    return [(after["samples"] - before["samples"]) / max(after["t"] - before["t"], 1e-9) for before, after in pairs]


def _cores(record: RankRecord) -> list[float]:
    pairs = pairwise([{"t": 0.0, "cpu_s": record.samples[0]["cpu_s"]}, *record.samples])
    return [max(0.0, after["cpu_s"] - before["cpu_s"]) / max(after["t"] - before["t"], 1e-9) for before, after in pairs]


def _chart_over_time(run: Run, title: str, unit: str, values: Any) -> dict[str, Any] | None:
    """A line for each rank, on one axis of time: a rank has no value at another one's times."""
    points: dict[int, dict[float, float]] = {}
    for record in (each for rank in run.ranks for each in (*rank.earlier, rank) if each.samples):
        offset, found = run.offset(record), points.setdefault(record.rank, {})
        for one, value in zip(record.samples, values(record), strict=True):
            found[round(offset + one["t"], 1)] = round(float(value), 3)
    x = sorted({at for found in points.values() for at in found})
    series = [[f"rank {rank}", [found.get(at) for at in x]] for rank, found in points.items()]
    return _chart(title, unit, "s", x, series) if x else None


def _chart(
    title: str, unit: str, xlabel: str, x: list[Any], series: list[list[Any]], bars: bool = False, log: bool = False
) -> dict[str, Any]:
    every = -(-len(x) // _MAX_POINTS)
    thinned = [[name, values[::every], *look] for name, values, *look in series]
    return {
        "title": title, "unit": unit, "xlabel": xlabel, "x": x[::every], "series": thinned, "bars": bars, "log": log,
    }  # fmt: skip
