"""Starting: threads that start all together or not at all, wherever an interrupt strikes.

`threading.Thread.start` is python itself, in which Ctrl-C may come at any moment to the main thread: before the thread
is made, which python then lists for ever as about to begin; or where it holds the lock that the new thread waits for.
So here another thread calls it, to which no interrupt comes.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from unisono.outcome import Outcome


def start_threads(threads: Sequence[threading.Thread]) -> None:
    """Start them, in order. Who is interrupted in it has started none, or all are on their way."""
    if threading.current_thread() is not threading.main_thread():
        _start_all(threads)
        return
    told: SimpleQueue[Outcome[None]] = SimpleQueue()
    _thread.start_new_thread(_tell, (threads, told))  # one call of C, before or after which an interrupt comes
    told.get().unwrap()


def _tell(threads: Sequence[threading.Thread], told: SimpleQueue[Outcome[None]]) -> None:
    told.put(Outcome.capture(_start_all, threads))


def _start_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
