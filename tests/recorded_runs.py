"""Reads what `log_dir` contains of a run (`unisono/launch/watching/run_directory.py`)."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RecordedRun:
    """`facts` is `run.json`; samples are in the order in which they were written."""

    facts: dict[str, Any]
    samples: list[dict[str, Any]]


def read_run(path: str | Path) -> RecordedRun:
    path = Path(path)
    facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    return RecordedRun(facts, _read_lines(path / "samples.jsonl"))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, if it exists; an incomplete line is skipped."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # not JSON, or not UTF-8
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]
