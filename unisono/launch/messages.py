"""Messages to the user: once per process, or while the user is waiting.

*Threads:* any; at worst two log the same message at the same time.
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
    """Print a line for an interactive user, on a terminal or in a notebook; elsewhere, log it as INFO."""
    if _is_watched():
        print(f"unisono: {text}", file=sys.stderr, flush=True)
    else:
        logger.info("%s", text)


def _is_watched() -> bool:
    try:
        return "ipykernel" in sys.modules or sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is missing or closed
        return False
