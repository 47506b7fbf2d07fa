"""Starts threads all together or not at all, even if an interrupt arrives at any point.

`threading.Thread.start` is written in Python, so Ctrl-C may arrive at any moment in the main thread: before the thread
is created, which Python then lists forever as about to start; or while it holds the lock that the new thread waits for.
So another thread, which receives no interrupts, calls it.
"""

from __future__ import annotations

import _thread
import subprocess
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from unisono.comm.outcome import Outcome
from unisono.errors import UnisonoError


def check_threads(who: str, uses_processes: bool = False) -> None:
    """Raise UnisonoError where a library (gevent, eventlet) has replaced Python's threads, or processes: one that waits
    would stop all others, or never hear of them."""
    for name, used, home in (
        ("threading.get_ident", threading.get_ident, "_thread"),
        ("subprocess.Popen", subprocess.Popen, "subprocess"),
    )[: 1 + uses_processes]:
        if used.__module__ != home:
            raise UnisonoError(
                f"{who} needs Python's own threads and processes, and {used.__module__} has replaced {name}: what "
                "waits for them would never end. Run it before that, as before monkey.patch_all(); or in a process "
                "that does not do it, by subprocess.run([sys.executable, 'train.py'])"
            )


def start_threads(threads: Sequence[threading.Thread]) -> None:
    """Start the threads, in order. If an interrupt is raised, either none was started, or all are being started.
    UnisonoError: they would not be threads, as by `check_threads`."""
    check_threads(f"the thread {threads[0].name}")
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


def saving_threads() -> list[threading.Thread]:
    """The threads that are writing a checkpoint, which the end of a process waits for."""
    return [each for each in threading.enumerate() if each.name == "unisono-checkpoint"]
