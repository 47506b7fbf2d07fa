"""Machine-readable lines: what workers write, and what this package logs, as one JSON object per line.

{"time": "2026-11-21T17:46:01.250+00:00", "rank": 1, "stream": "stderr", "text": "loss 0.25"}
{"time": "2026-11-21T17:46:02.000+00:00", "level": "WARNING", "logger": "unisono.launch.supervisor", "text": "..."}
"""

from __future__ import annotations

import json
import logging
import sys

from unisono.launch.watching import clock


def describe_line(rank: int, stream: str, line: bytes) -> bytes:
    """Format a line that a worker has written; if it was overwritten, its last content."""
    text = line.rstrip(b"\r\n").rpartition(b"\r")[2].decode(errors="replace")
    return json.dumps({"time": clock.now(), "rank": rank, "stream": stream, "text": text}).encode() + b"\n"


def log_as_json() -> None:
    """Send what this package logs to stderr in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logger = logging.getLogger(__name__.partition(".")[0])
    logger.handlers[:] = [handler]
    logger.propagate = False


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"level": record.levelname, "logger": record.name, "text": super().format(record)}
        return json.dumps({"time": clock.to_text(record.created), **facts})
