"""The one way in which times stand in the files of a run, and in its lines of JSON: ISO 8601, UTC, milliseconds."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> str:
    """The present moment, as "2026-11-21T17:46:01.250+00:00"."""
    return to_text(time.time())


def to_text(at: float) -> str:
    """A moment that `time.time` has given."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def to_seconds(text: str) -> float:
    """The other way; what `to_text` has written comes back to the millisecond."""
    return datetime.fromisoformat(text).timestamp()
