"""Saves that run concurrently with the loop: one at a time, and none of their errors is lost.

Ownership: a `Writer` owns the thread of the save in progress. It is not a daemon, so an exiting process waits for it.

*Threads:* the loop calls; `run_save` is the thread's body, and returns an `Outcome`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from unisono.outcome import Outcome

logger = logging.getLogger(__name__)

ENDED, WRITING, FAILED = range(3)


class Writer:
    """Runs saves in a thread."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._ended: list[Outcome[Any]] = []

    def start(self, save: Callable[[], Any], what: str) -> None:
        """Run a save in a separate thread. No other may be in progress."""
        assert self._thread is None
        # Not a daemon: the interpreter's exit waits for the save.
        self._thread = threading.Thread(
            target=run_save, args=(save, what, self._ended), name="unisono-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._failure = self._ended.pop().error or self._failure

    @property
    def state(self) -> int:
        """ENDED, WRITING or FAILED."""
        if self._thread is not None and self._thread.is_alive():
            return WRITING
        self.wait()
        return ENDED if self._failure is None else FAILED

    def take_failure(self) -> BaseException | None:
        """The error of a save that has ended, once."""
        failure, self._failure = self._failure, None
        return failure


def run_save(save: Callable[[], Any], what: str, ended: list[Outcome[Any]]) -> None:
    """Body of the thread: adds one `Outcome`. A failure is also logged, since it may never be asked for."""
    outcome = Outcome.capture(save)
    ended.append(outcome)
    if outcome.error is not None:
        logger.error(
            "%s has failed: %s: %s; the error is raised at the next step or save, or by close()",
            what,
            type(outcome.error).__name__,
            outcome.error,
        )
