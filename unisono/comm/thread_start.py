"""Starts threads all together or not at all, even if an interrupt arrives at any point.

`threading.Thread.start` is written in Python, so Ctrl-C may arrive at any moment in the main thread: before the thread
is created, which Python then lists forever as about to start; or while it holds the lock that the new thread waits for.
So another thread calls it, which receives no interrupts.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from unisono.outcome import Outcome


def start_threads(threads: Sequence[threading.Thread]) -> None:
    """Start the threads, in order. If an interrupt is raised, either none was started, or all are being started."""
    if threading.current_thread() is not threading.main_thread():
        _start_all(threads)
        return
    outcome: SimpleQueue[Outcome[None]] = SimpleQueue()
    # A single C call, before or after which an interrupt arrives.
    _thread.start_new_thread(lambda: outcome.put(Outcome.capture(_start_all, threads)), ())
    outcome.get().unwrap()


def _start_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
