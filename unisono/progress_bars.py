"""Bars for two cases that tqdm lacks: through a pipe that prefixes lines and ends on a terminal, and in a log.

tqdm moves the cursor up and down for nested bars, and begins each drawing with a carriage return. If lines get a prefix
and are interleaved with those of others, both produce empty prefixed lines. These bars write complete lines: ended by a
carriage return if the next one is to replace them, otherwise by a newline.

Importing this imports tqdm. Neither bar starts tqdm's monitor, a thread.
"""

from __future__ import annotations

import time
from typing import Any

from tqdm import auto
from tqdm.asyncio import tqdm_asyncio
from tqdm.utils import disp_len

_MARK = len("[rank 0] ")
_LOG_EVERY_S = 30.0


def is_notebook() -> bool:
    """Whether tqdm has found a notebook that can show its bars."""
    return auto.tqdm is not tqdm_asyncio


def width_within(columns: int) -> int:
    """The width of a bar on a terminal, after the prefix of its line; the last column would wrap."""
    return max(columns - _MARK - 1, 10)


class PipedBar(tqdm_asyncio):  # type: ignore[misc] # tqdm has no annotations
    """One line that is updated in place. It is erased with leave=False."""

    # Without tqdm's monitor thread: it lowers miniters, which is 1 already.
    monitor_interval = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._drawn = 0  # columns of the current text
        if options.get("disable", False) is None:  # "where there is no terminal"
            options["disable"] = False
        super().__init__(*args, **{"miniters": 1, **options})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or `msg` in its place. Returns False: tqdm has nothing left to do."""
        text = str(self) if msg is None else msg
        width = disp_len(text)
        end = "" if self.disable and text else "\r"  # the last line, which tqdm ends by a newline
        if text or self._drawn:
            self.fp.write(text + " " * (self._drawn - width) + end)
            self.fp.flush()
        self._drawn = width
        return False

    def clear(self, nolock: bool = False) -> None:
        """Erase the bar, for a line that takes its place."""
        if not self.disable:
            self.display("")


class LogBar(tqdm_asyncio):  # type: ignore[misc]
    """A line from time to time, and one at the end, except for a bar with leave=False."""

    monitor_interval = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._written_at: float | None = None
        super().__init__(*args, **{"miniters": 1, "mininterval": _LOG_EVERY_S, **options})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line, if it is time for one. Returns False: tqdm has nothing left to do."""
        now = time.monotonic()
        if self._written_at is None:
            self._written_at = now  # counted from the start: the first line reports progress
        is_last = self.disable  # tqdm ends it by a newline
        text = str(self) if msg is None else msg
        if text and (is_last or now - self._written_at >= self.mininterval):
            self._written_at = now
            self.fp.write(text + "\n" * (not is_last))
            self.fp.flush()
        return False

    def clear(self, nolock: bool = False) -> None:
        """Leave the written lines."""
