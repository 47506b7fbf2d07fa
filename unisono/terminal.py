"""Where this process's stderr comes out: on a terminal, though it is a pipe here, or anywhere else.

A worker's stderr goes through its caller, who knows; `launch` says it here, and what draws asks.
"""

from __future__ import annotations

import os

_USUAL = 80

_columns = 0  # of the caller's terminal


def columns_of(descriptor: int) -> int:
    """The width of the terminal that a descriptor is; 0 where it is none."""
    try:
        return os.get_terminal_size(descriptor).columns or _USUAL
    except OSError:
        return 0


def set_columns(columns: int) -> None:
    """The stderr of this process comes out on a terminal of that width; 0: on none."""
    global _columns
    _columns = columns


def columns_behind_pipe() -> int:
    """The width of the terminal that stderr comes out on by way of another process; 0 where there is none."""
    return _columns
