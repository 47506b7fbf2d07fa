"""The time format of a run's files and JSON lines: ISO 8601, UTC, milliseconds."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> str:
    """The current time, as "2026-11-21T17:46:01.250+00:00"."""
    return to_text(time.time())


def to_text(at: float) -> str:
    """Format a time as returned by `time.time`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def to_seconds(text: str) -> float:
    """The inverse of `to_text`, exact to the millisecond."""
    return datetime.fromisoformat(text).timestamp()
