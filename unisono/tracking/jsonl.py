"""Metrics in a file of JSON lines, which needs no library and survives the death of the process.

The first line describes the run: its project, its configuration, its start time. Each `log` adds one line::

    {"project": "digits", "config": {"lr": 0.1}, "started": "2026-01-31T12:00:00+00:00"}
    {"step": 1, "time": 0.734, "values": {"loss": 2.31}}

*Threads:* one at a time.

Invariants:

1. When `log` returns, its line has been passed to the operating system: killing the process loses no line.
2. A line that was only partly written, because the disk was full, is terminated before the next one, so it corrupts no
   other line.
3. Files of earlier runs are never modified.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from unisono.tracking.tracker import Value


class JsonLines:
    """The file `metrics.jsonl` of a run, at `path`; `metrics-2.jsonl` and so on if earlier runs have left theirs.

    Numbers that JSON cannot represent are written as strings: "NaN", "Infinity", "-Infinity".
    """

    name = "jsonl"

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path, self._file = _create(directory)
        self._is_torn = False
        self._began = monotonic()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._write({"project": project, "config": _name_non_finite(config), "started": started})

    @property
    def tracker(self) -> Path:
        """What `get_tracker("jsonl", unwrap=True)` returns."""
        return self.path

    def log(self, values: Mapping[str, Value], step: int | None) -> None:
        """Write one line; OSError if the line cannot be written."""
        elapsed_s = round(monotonic() - self._began, 3)
        self._write({"step": step, "time": elapsed_s, "values": _name_non_finite(values)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, default=str, allow_nan=False)
        line = b"\n" * self._is_torn + text.encode() + b"\n"
        self._is_torn = True
        # FileIO is not buffered, and may write only a part.
        while line:
            line = line[self._file.write(line) :]
        self._is_torn = False


def _create(directory: Path) -> tuple[Path, FileIO]:
    for number in count(1):
        path = directory / ("metrics.jsonl" if number == 1 else f"metrics-{number}.jsonl")
        with suppress(FileExistsError):
            # "x" creates the file or fails, so runs that start at once do not share one.
            return path, FileIO(path, "xb")
    raise AssertionError("unreachable")


def _name_non_finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent with their names, and keys with strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _name_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_name_non_finite(each) for each in value]
    return value
