"""What a user is to know once in the life of a process, however many groups of workers it concerns.

*Threads:* any; at worst two say the same at one moment.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning, unless it has been logged before."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)
