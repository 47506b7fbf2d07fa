"""A run as a trace in Chrome's format, for https://ui.perfetto.dev: a process per rank, a row per thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.report.run import RankRecord, Run
from unisono.report.summary import CLOCK, label


def write_trace(run: Run, path: str | Path) -> Path:
    """Write the spans of all ranks; return the absolute path. Times are in microseconds since the start of the run.
    What cannot be read is left out, and added to `run.missing`.

    The format is that of "Trace Event Format" (Google, 2016): complete events ("X"), and names ("M").
    """
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"traceEvents": list(_events(run)), "displayTimeUnit": "ms"}))
    return target


def _events(run: Run) -> Iterator[dict[str, Any]]:
    for record in run.ranks:
        offset = 1e6 * run.offset(record)
        yield {"ph": "M", "name": "process_name", "pid": record.rank, "args": {"name": f"rank {record.rank}"}}
        for thread, (track, spans) in enumerate(record.spans().items()):
            common = {"pid": record.rank, "tid": thread}
            yield {"ph": "M", "name": "thread_name", **common, "args": {"name": track}}
            for span in spans:
                times = {"ts": offset + span.start / 1e3, "dur": (span.stop - span.start) / 1e3}
                yield {"ph": "X", "name": label(span.phase), **common, **times}
        yield from _profiled_events(record, offset)


def _profiled_events(record: RankRecord, offset_us: float) -> Iterator[dict[str, Any]]:
    """A rank's events of torch.profiler, if it was asked for: its processes become ones of the rank."""
    path = record.path.with_suffix(".trace.json")
    if not path.exists():
        return
    try:
        events = json.loads(path.read_text())["traceEvents"]
        # By one event of known time: the profiler's clock may be milliseconds off, where it follows a GPU.
        clock = next(each for each in events if each.get("name", "").startswith(CLOCK))
    except (ValueError, StopIteration):
        record.cut.append(f"{path.name} is cut off")
        return
    shift_us = offset_us + int(clock["name"].removeprefix(CLOCK)) / 1e3 - clock["ts"]
    for event in events:
        moved = {"ts": event["ts"] + shift_us} if "ts" in event else {}
        yield {**event, **moved, "pid": f"rank {record.rank}: {event.get('pid', '')}"}
