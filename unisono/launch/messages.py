"""Messages to the user.

*Threads:* any; at worst two log the same message at the same time.
"""

from __future__ import annotations

import logging
import os

from unisono.errors import RemoteTraceback
from unisono.outcome import chain_of

logger = logging.getLogger(__name__)

_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning, unless it has been logged before."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def shorten_traceback(error: BaseException) -> None:
    """Drop the frames of this process from the error of a worker, which shows its own; UNISONO_TRACEBACK=full shows
    all frames of both."""
    sources = [each for each in chain_of(error) if isinstance(each, RemoteTraceback)]
    if shows_all_frames():
        for each in sources:
            each.shown = each.text
    elif sources:
        error.__traceback__ = None


def shows_all_frames() -> bool:
    """Whether the user has asked for the frames of this package."""
    return os.environ.get("UNISONO_TRACEBACK") == "full"
