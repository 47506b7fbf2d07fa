"""How a group is ended: SIGTERM, or SIGINT, then after the grace period SIGKILL.

*Threads:* the supervisor's.
"""

from __future__ import annotations

import math
import signal
import time


class Ending:
    """Which signal is due next, and what was sent.

    Args:
        grace_s: seconds between two signals.

    Attributes:
        due: when to send the next signal, by `time.monotonic()`, a clock shared with the workers; None if none is due.
        was_asked: whether the caller has asked for the end, which gives the workers their grace period.
    """

    def __init__(self, grace_s: float) -> None:
        self.due: float | None = None
        self.sent: list[signal.Signals] = []
        self.began_at = math.inf
        self.was_asked = False
        self._grace_s = grace_s
        self._left = [signal.SIGTERM, signal.SIGKILL]

    @property
    def is_under_way(self) -> bool:
        """Whether a signal has been sent, or is about to be."""
        return bool(self.sent) or self.due is not None

    def begin_within(self, seconds: float) -> None:
        """Begin at the latest after so many seconds; the earliest such limit counts."""
        due = time.monotonic() + seconds
        self.due = due if self.due is None else min(due, self.due)

    def ask(self, signum: signal.Signals) -> None:
        """Begin now at the caller's request, with that signal; when it asks again, kill."""
        self.was_asked = True
        if self.sent:
            self._left = [signal.SIGKILL]
        else:
            self._left[0] = signum
        self.begin_within(0.0)

    def take_signal(self) -> signal.Signals | None:
        """The signal to send now; None if there is none left."""
        self.due = None
        if not self._left:
            return None
        signum = self._left.pop(0)
        self.sent.append(signum)
        self.began_at = min(self.began_at, time.monotonic())
        self.begin_within(self._grace_s)
        return signum
