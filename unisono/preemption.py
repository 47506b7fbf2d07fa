"""Preemption: SIGTERM as a wish that a loop comes to when it can, and not as the end of the process.

A scheduler that needs the machine sends SIGTERM, to every process of a job or to its first one, and SIGKILL a little
later. Once this process *heeds* the signal, it only notes that it came; the loop asks at its step boundaries, saves,
and leaves in its own time.

Loader workers must live as long, or the loop would fail before it can save. Those that are forked while this process
heeds the signal, or after `shield_loader_workers`, are deaf to it, but for their parent's own, with which torch ends a
worker that is stuck. An ignored signal would not do: torch gives each loader worker a handler of its own, written in
C++, which ends it. So the signal is blocked there, which no handler can undo, and a thread takes it instead.

Only torch's loader workers are shielded, of all that this process forks: a blocked signal stays blocked in whatever
program a process becomes, and a user's own `multiprocessing.Pool` is ended by it.

*Threads:* the signal's handler runs in the main thread, between two steps of Python; a main thread that computes in
native code, or waits in a collective, comes to it later. Everything else may be called from any thread.

Invariants:
1. Before the first `heed`, this process is what it was: no handler, and what is forked is not touched.
2. What the process is asked to do meanwhile, it is asked once: a second SIGTERM changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from unisono.errors import UnisonoError

_LOADER_WORKER = "torch.utils.data._utils.worker"  # the module of the function that a loader worker of torch runs

_is_requested = False
_is_agreed = False
_is_heeded = False
_shields_loader_workers = False
_is_shielded = False  # this process is a shielded loader worker
_previous: Any = signal.SIG_DFL  # what SIGTERM did before
_callbacks: list[Callable[[], None]] = []
_forking = threading.local()  # each thread's signal mask from before the fork that it makes


def heed() -> None:
    """From now on SIGTERM only sets a flag, which `is_requested` reads. Idempotent.

    A handler of the user's that is there already is called as well. Loader workers are shielded from now on.

    Raises:
        UnisonoError: this is the first call, and not in the main thread.
    """
    global _is_heeded, _previous
    if _is_heeded:
        return
    if threading.current_thread() is not threading.main_thread():
        raise UnisonoError(
            f"SIGTERM cannot be heeded from thread {threading.current_thread().name!r}: Python lets only the main "
            "thread of a process install a signal's handler; call should_stop() once in the main thread before, "
            "outside of DataParallel"
        )
    shield_loader_workers()
    before = signal.signal(signal.SIGTERM, _note)
    _previous = signal.SIG_DFL if before is None else before  # None: installed by native code, and cannot be had back
    _is_heeded = True
    for callback in _callbacks:
        callback()


@contextmanager
def scope() -> Iterator[None]:
    """SIGTERM is what it was after the block: whoever comes to heed it there does so no longer.

    A request that the block has not answered by an agreed stop is sent again, to whatever takes SIGTERM then.
    """
    global _is_heeded, _is_requested, _is_agreed
    was_heeded, was_agreed, _is_agreed = _is_heeded, _is_agreed, False
    try:
        yield
    finally:
        is_unanswered = _is_requested and not _is_agreed
        _is_agreed = was_agreed
        if _is_heeded and not was_heeded:
            _is_heeded = _is_requested = False
            signal.signal(signal.SIGTERM, _previous)
            if is_unanswered:
                os.kill(os.getpid(), signal.SIGTERM)


def takes(handler: object) -> bool:
    """Whether that is the handler of a process that heeds SIGTERM."""
    return handler is _note


def is_requested() -> bool:
    """Whether this process has been asked to stop: SIGTERM has come since it is heeded, or `request` was called."""
    return _is_requested


def request() -> None:
    """Ask this process to stop, as SIGTERM does; for anyone who learns of a preemption in another way."""
    global _is_requested
    _is_requested = True


def agree() -> None:
    """Note that the ranks have agreed to stop early, for whoever reports to the launcher."""
    global _is_agreed
    _is_agreed = True


def is_agreed() -> bool:
    """Whether this process is coming to an agreed early end."""
    return _is_agreed


def on_heed(callback: Callable[[], None]) -> None:
    """Call it when SIGTERM is heeded for the first time; at once, where it is heeded already."""
    if _is_heeded:
        callback()
    else:
        _callbacks.append(callback)


def shield_loader_workers() -> None:
    """Make torch's loader workers that this process forks from now on deaf to SIGTERM, but for this process's own.

    Where they are ended with their parent however it ends, as in a worker of `spawn`, this can be done long before, and
    whether, SIGTERM is heeded: workers that are running when it comes to that are then shielded, too.
    """
    global _shields_loader_workers
    if not _shields_loader_workers and hasattr(os, "register_at_fork"):
        _shields_loader_workers = True
        os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_begin_child)


def _note(signum: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM."""
    request()
    if callable(_previous):
        _previous(signum, frame)


def _begin_fork() -> None:
    """Block SIGTERM: until the child has said what it is to it, it must neither be lost nor end the child."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _end_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    """What a fork of this process does first: a loader worker shields itself, any other is as if nobody had heeded."""
    global _is_shielded, _is_heeded
    was_shielded, _is_shielded = _is_shielded, _is_loader_worker(sys._getframe(1))
    if _is_shielded:
        threading.Thread(target=listen_to_parent, name="unisono-sigterm", daemon=True).start()
        return
    if _is_heeded:
        _is_heeded = False
        signal.signal(signal.SIGTERM, _previous)
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask - ({signal.SIGTERM} if was_shielded else set()))


def _is_loader_worker(forking: FrameType) -> bool:
    """Whether that frame, which has called `os.fork`, is multiprocessing's and starts a loader worker of torch."""
    process = forking.f_locals.get("process_obj")
    return getattr(getattr(process, "_target", None), "__module__", None) == _LOADER_WORKER


def listen_to_parent() -> None:
    """Body of the thread that takes SIGTERM in a shielded loader worker, and drops it.

    The parent's own ends the process, as torch's handler would.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
