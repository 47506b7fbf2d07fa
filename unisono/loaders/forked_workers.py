"""Forking loader workers from a multithreaded process, without a worker that waits forever for a lock.

A forked process has one thread, but inherits the state of all locks: a lock that another thread held stays locked in it
forever. torch's loader workers begin with `torch.manual_seed` and `numpy.random.seed`, and send tensors through shared
memory. Any thread that draws, seeds or shares a tensor holds one of the locks that these need: two replicas that seed
and begin a loop at the same time suffice to make a worker wait forever.

So loader workers are forked by one thread at a time. It holds the locks that Python can hold during the fork, and waits
for threads that draw from torch's generator, whose lock it cannot hold. Then each worker acquires all of them once, and
reports to its parent. One that does not report is killed, and forked again.

*Threads:* any; one at a time is in `one_at_a_time`. `LoaderWorker.run` runs in the forked process.
"""

from __future__ import annotations

import faulthandler
import itertools
import mmap
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from pathlib import Path
from typing import Any

import torch
import torch.utils.data.graph_settings

from unisono.backends.seeding import seeding_locks
from unisono.errors import BusyError
from unisono.loaders import fetcher
from unisono.torch_private import WORKER_LOOP, share_memory_lock, share_memory_map

# Seconds to wait for the report of each fork.
_PATIENCE_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # a slow machine may exceed the first ones, without harm
_LOCK_S = 1.0  # for each lock
_STACK_S = 2.0
_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 9  # used by no other component
_OURS = f"{Path(__file__).parent}/"

_Process: Any = getattr(context, "ForkProcess", object)  # Windows has none
_Context: Any = getattr(context, "ForkContext", object)

_lock = threading.Lock()
_forking: int | None = None  # the thread that forks a loader worker
_held: list[Any] = []  # the locks that it holds meanwhile


class LoaderWorker(_Process):  # type: ignore[misc]
    """A forked process whose start returns once the process has acquired the locks that it needs."""

    _report: int = -1  # the writing end of a pipe, for its report

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._cell = mmap.mmap(-1, 8)  # both processes see it
        # Opened before the fork, so both processes share the file and its offset.
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with this
        weakref.finalize(self, self.stacks.close)

    @property
    def place(self) -> int:
        """The number, in its batch or stream, of the sample that the process is reading."""
        return int.from_bytes(self._cell[:8], sys.byteorder)

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - multiprocessing's name
        for patience_s in _PATIENCE_S:
            popen = _fork_in_time(process, patience_s)
            if popen is not None:
                return popen
        raise RuntimeError(
            f"a loader worker was forked {len(_PATIENCE_S)} times and did not begin: each time another thread of this "
            "process held a lock that it needs (of torch's or numpy's generators, of stdout or stderr); let no thread "
            "draw or print continuously while the loop runs, or pass multiprocessing_context='forkserver', or "
            "num_workers=0"
        )

    def run(self) -> None:
        """Acquire once each lock that is needed before the user's code runs, report, and begin."""
        with share_memory_lock:
            share_memory_map.clear()  # left by threads that do not exist here
        # These acquire the generators' locks; the seeds do not matter, since torch seeds each worker again.
        torch.manual_seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                # Acquires the stream's lock, which a thread that printed may have held.
                stream.flush()
        fetcher.at = memoryview(self._cell).cast("q")
        # Before the report: without a handler, the signal would end the worker.
        faulthandler.register(_SIGNAL, self.stacks, all_threads=False)
        os.write(self._report, b".")
        os.close(self._report)
        super().run()


class Context(_Context):  # type: ignore[misc]
    """multiprocessing's "fork" context, with processes that report before their start returns."""

    Process = LoaderWorker


def context_of(given: Any) -> Any:
    """The multiprocessing context for a DataLoader whose own is `given`: None, a name, or a context."""
    method = given if isinstance(given, str) else (given or multiprocessing).get_start_method()
    return Context() if method == "fork" else given


def stack_of(worker: Any) -> str:
    """The current stack of a loader worker, as lines to append to a message; empty if unknown."""
    if not isinstance(worker, LoaderWorker) or not worker.is_alive():
        return ""
    # The worker shares the offset, so its next stack begins at 0, too.
    worker.stacks.seek(0)
    worker.stacks.truncate()
    os.kill(worker.pid, _SIGNAL)
    deadline = time.monotonic() + _STACK_S
    while time.monotonic() < deadline:
        time.sleep(0.01)
        # Not by the file's offset, which the worker shares and may be writing at.
        text = os.pread(worker.stacks.fileno(), 1 << 20, 0).decode(errors="replace")
        if WORKER_LOOP in text:  # the loop that every loader worker is in
            lines = text[: text.index(WORKER_LOOP)].splitlines()[1:-1]
            return ", in (most recent call first):\n" + "\n".join(_without_ours(lines))
    return ""


def _without_ours(lines: list[str]) -> list[str]:
    """The lines of a stack before the first one in this package."""
    return list(itertools.takewhile(lambda line: _OURS not in line, lines)) or lines


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other threads from starting loader workers during the block: they would inherit half-made pipes. BusyError
    if another thread has been starting its own for a minute."""
    if not _lock.acquire(timeout=2 * sum(_PATIENCE_S)):
        raise BusyError("another thread of this process has been starting loader workers for a minute")
    try:
        yield
    finally:
        _lock.release()


def _fork_in_time(process: Any, patience_s: float) -> Any:
    """Return the process's Popen once it has reported or died; if it is stuck, kill it and return None."""
    global _forking
    from multiprocessing.popen_fork import Popen  # here: Windows has none

    reading, writing = os.pipe()
    process._report = writing
    popen: Any = None
    try:
        _forking = threading.get_ident()
        popen = Popen(process)
        _forking = None
        # Closed before the wait, so that the death of the worker, which holds the other copy, ends the wait, too.
        os.close(writing)
        writing = -1
        if select.select([reading], [], [], patience_s)[0]:
            # Cleared, so that `finally` does not kill it.
            popen, begun = None, popen
            return begun
        return None
    finally:
        _forking = None
        os.close(reading)
        if writing >= 0:
            os.close(writing)
        if popen is not None:
            popen.kill()
            popen.wait()


def _locks() -> Iterator[Any]:
    """The locks accessible from Python that a loader worker needs before its first line."""
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.get_bit_generator().lock
    yield from seeding_locks()
    yield share_memory_lock


def _hold_locks() -> None:
    """Run before the fork of a loader worker; no other thread runs Python code between the last line and the fork."""
    # The hooks run at each fork of the process, also at those of other threads and libraries.
    if _forking != threading.get_ident():
        return
    # A lock that stays busy is left out: the worker then does not report if it inherits it, and is forked again.
    _held.extend(lock for lock in _locks() if lock.acquire(timeout=_LOCK_S))
    torch.default_generator.get_state()  # waits for the generator's lock, which cannot be held across the fork


def _release_locks() -> None:
    """Run after the fork, in both processes."""
    while _forking == threading.get_ident() and _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_locks, after_in_parent=_release_locks, after_in_child=_release_locks)
