"""What a torch collective returns: work that is done, or that a thread of the group does in the background.

*Threads:* those that call collectives, and the one that does the work, in the order in which it was submitted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from unisono.outcome import Outcome


class Done(dist.Work):
    """Work that was completed before it is returned."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Pending(dist.Work):
    """Work in the background."""

    def __init__(self, tensors: Any, operation: Callable[[], None]) -> None:
        super().__init__()
        self._tensors = tensors
        self._operation = operation
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._outcome: Outcome[None] | None = None
        self._is_over = threading.Event()
        self.has_been_told = threading.Event()  # set once the future's callbacks, which run in this thread, are done

    def do(self) -> None:
        """Do the work, on the thread of the group."""
        self._outcome = Outcome.capture(self._operation)
        # Before the future: its callbacks run on this thread, and may wait for this work.
        self._is_over.set()
        if self._outcome.error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(self._outcome.error)
        self.has_been_told.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the work, and raise its error if it failed."""
        self._is_over.wait(timeout.total_seconds() if timeout else None)
        if self._outcome is None:
            raise dist.DistNetworkError(f"the collective was not complete after {timeout}")
        self._outcome.unwrap()
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def is_success(self) -> bool:
        return self._outcome is not None and self._outcome.error is None

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Background:
    """Does one piece of work after another, on a thread that starts with the first."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Pending | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Pending | None = None

    def begin(self, work: Pending) -> Pending:
        """Submit work; it is done after what was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_do_all, args=(self._given,), name="unisono-collectives", daemon=True
            )
            self._thread.start()
        self._last = work
        self._given.put(work)
        return work

    @property
    def is_here(self) -> bool:
        """Whether this is its thread, as when a callback of a future calls the next collective."""
        return threading.current_thread() is self._thread

    def finish(self) -> None:
        """Wait until all submitted work is done, including its callbacks."""
        if self._last is not None and not self.is_here:
            self._last.has_been_told.wait()
            self._last = None

    def close(self) -> None:
        """Let the thread end."""
        self._given.put(None)


def _do_all(given: SimpleQueue[Pending | None]) -> None:
    while (work := given.get()) is not None:
        work.do()
