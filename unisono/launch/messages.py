"""What is said to the user: once in the life of a process, or while somebody waits.

*Threads:* any; at worst two say the same at one moment.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)

_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning, unless it has been logged before."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def say_if_watched(text: str) -> None:
    """A line for somebody who sits before it: on a terminal or in a notebook; elsewhere `logging` has it as INFO."""
    if _is_watched():
        print(f"unisono: {text}", file=sys.stderr, flush=True)
    else:
        logger.info("%s", text)


def _is_watched() -> bool:
    try:
        return "ipykernel" in sys.modules or sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or a closed one
        return False
