"""Whether this process's stderr reaches a terminal, although it is a pipe here.

A worker's stderr passes through its caller, which knows; `launch` records it here for the code that draws.
"""

from __future__ import annotations

import os

_USUAL = 80

_columns = 0  # the width of the caller's terminal


def columns_of(descriptor: int) -> int:
    """The width of a descriptor's terminal; 0 if it is not a terminal."""
    try:
        return os.get_terminal_size(descriptor).columns or _USUAL
    except OSError:
        return 0


def set_columns(columns: int) -> None:
    """Record that the stderr of this process reaches a terminal of that width; 0 means none."""
    global _columns
    _columns = columns


def columns_behind_pipe() -> int:
    """The width of the terminal that stderr reaches through another process; 0 if there is none."""
    return _columns
