"""Whether a terminal understands codes that move its cursor, and whether its user wants colours."""

from __future__ import annotations

import os
from typing import IO


def understands_codes(file: IO[str]) -> bool:
    """Whether the file is a terminal that is not a dumb one."""
    return file.isatty() and os.environ.get("TERM") != "dumb"


def wants_colours(file: IO[str]) -> bool:
    """Whether to write colours: to such a terminal, unless NO_COLOR is set to anything."""
    return understands_codes(file) and not os.environ.get("NO_COLOR")
