"""The bar that tqdm lacks: through a pipe that prefixes lines and ends on a terminal, and in a log.

tqdm moves the cursor up and down for nested bars, and begins each drawing with a carriage return. If lines get a prefix
and are interleaved with those of others, both produce empty prefixed lines. This bar writes complete lines: ended by a
carriage return if the next one is to replace them, otherwise by a newline. Importing this imports tqdm.
"""

from __future__ import annotations

import time
from typing import Any

from tqdm import auto as auto  # for `progress`
from tqdm.asyncio import tqdm_asyncio
from tqdm.utils import disp_len

from unisono.report.live_figures import LiveFigures

_MARK = len("[rank 0] ")
_LOG_EVERY_S = 30.0


class _WithFigures:
    """A bar of tqdm that also shows the live figures of the run, if there is room for them."""

    def __init__(self, *args: Any, figures: LiveFigures | None = None, **options: Any) -> None:
        self._figures = figures  # first: tqdm draws in its __init__
        super().__init__(*args, **options)
        if figures is not None and self.disable:  # type: ignore[attr-defined]
            figures.close()

    @property
    def format_dict(self) -> Any:
        """What tqdm draws, and those of the figures that there is room for; of a bar that has ended, those of its
        loop."""
        drawn: Any = super().format_dict  # type: ignore[misc]
        if self._figures is not None:
            used = disp_len(tqdm_asyncio.format_meter(**{**drawn, "ncols": 0})) + len("||")
            for part in self._figures.parts(self.disable):  # type: ignore[attr-defined]
                used += len(f", {part}")
                if drawn["ncols"] is None or used < drawn["ncols"]:
                    drawn["postfix"] = f"{drawn['postfix']}, {part}" if drawn["postfix"] else part
        return drawn

    def close(self) -> None:
        if disp_len is None:  # the interpreter ends, and has emptied this module: nothing can be drawn
            return
        super().close()  # type: ignore[misc]
        if self._figures is not None:
            self._figures.close()


class Bar(_WithFigures, auto.tqdm):  # type: ignore[misc] # tqdm has no annotations
    """tqdm's own bar."""


class LineBar(_WithFigures, tqdm_asyncio):  # type: ignore[misc] # tqdm has no annotations
    """One line that is redrawn in place, and erased with leave=False; or in a log a line from time to time, and one at
    the end, except with leave=False.

    Args:
        columns: the width of the terminal that shows the line; 0 for a log.
        figures: the live figures of the run to show.
    """

    # Without tqdm's monitor thread: it lowers miniters, which is 1 already.
    monitor_interval = 0

    def __init__(self, *args: Any, columns: int = 0, **options: Any) -> None:
        self._is_redrawn, self._drawn = columns > 0, 0  # the columns of the current text
        self._written_at: float | None = None
        # After the prefix of the line; the last column would wrap.
        usual = {"ncols": max(columns - _MARK - 1, 10)} if columns else {"mininterval": _LOG_EVERY_S}
        if columns and options.get("disable", False) is None:  # "where there is no terminal"
            options["disable"] = False
        super().__init__(*args, **{"miniters": 1, **usual, **options})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or `msg` in its place, if it is time for it. Returns False: tqdm has nothing left to do."""
        now, is_last = time.monotonic(), self.disable  # the last line is ended by tqdm
        text = str(self) if msg is None else msg
        if self._written_at is None:
            self._written_at = now  # counted from the start: the first line of a log reports progress
        is_due = self._is_redrawn or is_last or now - self._written_at >= self.mininterval
        if is_due and (text or self._drawn):
            width = disp_len(text) if self._is_redrawn else 0
            end = "" if is_last and text else "\r" if self._is_redrawn else "\n"
            self.fp.write(text + " " * (self._drawn - width) + end)
            self.fp.flush()
            self._written_at, self._drawn = now, width
        return False

    def clear(self, nolock: bool = False) -> None:
        """Erase the bar, for a line that takes its place; lines of a log stay."""
        if self._is_redrawn and not self.disable:
            self.display("")
