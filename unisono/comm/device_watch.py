"""Tracks how far a rank's device has got, and ensures that it does not wait indefinitely.

On an accelerator a collective's call returns when it has been submitted. The host waits later, wherever it needs a
number: inside the driver, where the failure of a peer wakes no thread. So a separate thread puts a mark after what has
been submitted, also by torch's engines, and checks whether the device has reached it: then what began before it is
done. Meanwhile it looks for a peer's failure; if there is one, it ends the wait. None of this delays a step.

*Threads:* `unisono-device-watch`, a daemon, until `close`; `num_done` and `is_behind` are for any.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unisono.comm.thread_start import start_threads
from unisono.errors import BrokenWorldError
from unisono.protocols import Backend

_LOOK_S = 0.5
_PATIENCE_S = 30.0  # for a loop that submits a lot at once, and then computes for long without a collective


class DeviceWatch:
    """Watches a rank's device from its start until `close`, or until it has ended the wait. `count` returns how many
    collectives have been submitted to the device; `end_wait` looks for a peer's failure and, if there is one, ends the
    device's wait, and returns True."""

    def __init__(
        self,
        backend: Backend,
        device: torch.device,
        count: Callable[[], int],
        end_wait: Callable[[], bool],
        look_s: float = _LOOK_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.num_done = 0  # of the collectives, that the device is known to have finished
        self.is_behind = False  # whether it has been busy so long that it may be waiting in one
        self._patience_s = patience_s
        self._mark = partial(backend.mark, device)
        self._is_reached, self._count, self._end_wait = backend.is_reached, count, end_wait
        self._awaited: tuple[Any, int, float] | None = None  # a mark, what was submitted before it, and when
        self._is_over = threading.Event()
        args = self, partial(backend.activate, device), look_s
        self._thread = threading.Thread(target=_watch, args=args, name="unisono-device-watch", daemon=True)
        start_threads([self._thread])
        atexit.register(self.close)  # it must not be in the driver when the driver shuts down

    def close(self) -> None:
        """Stop watching. Idempotent; from any thread."""
        self._is_over.set()
        atexit.unregister(self.close)
        # `end_wait`, which runs on the watch's own thread, may call this.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look(self) -> bool:
        """Check once; return whether there is anything left to watch."""
        if self._awaited is None:
            begun = self._count()  # before the mark: what begins in between may come after it
            self._awaited = self._mark(), begun, time.monotonic()
            return True
        mark, begun, since = self._awaited
        if self._is_reached(mark):
            self._awaited, self.num_done, self.is_behind = None, begun, False
            return True
        # A device that is busy without a collective is computing: it waits for no peer.
        self.is_behind = begun > self.num_done and time.monotonic() - since >= self._patience_s
        return not self._end_wait()


def _watch(watch: DeviceWatch, activate: Callable[[], None], look_s: float) -> None:
    """Body of the thread. An error of the device ends it: the rank's own thread gets the same error."""
    try:
        activate()
        while not watch._is_over.wait(look_s) and watch.look():
            pass
    except RuntimeError:
        watch.is_behind = False


class WokenError(BrokenWorldError):
    """Wakes a rank whose device was waiting for a peer that has failed: when its group is aborted, the wait in the
    driver yields numbers that were never computed. It is created by the interpreter, without arguments, so `words` and
    `reason` are the class's: a process has one world, which breaks only once."""

    words = ""
    reason: BaseException | None = None

    def __init__(self) -> None:
        super().__init__(self.words)
        self.__cause__ = self.reason


def wake(thread: int, error: BrokenWorldError) -> None:
    """Make that thread raise the error's message, with its cause, as soon as it runs Python code."""
    WokenError.words, WokenError.reason = str(error), error.__cause__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(WokenError))
