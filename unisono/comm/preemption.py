"""Preemption: SIGTERM as a request that a loop handles when it can, not as the end of the process.

A scheduler that needs the machine sends SIGTERM, to every process of a job or to its first one, and SIGKILL a little
later. Once this process *handles* the signal, it only notes its arrival; the loop checks at step boundaries. The first
Ctrl-C is such a request, too, unless the program has its own handler, or the caller takes it.

Loader workers must live as long, or the loop would fail before it can save. Those that are forked while this process
handles the signal, or after `shield_loader_workers`, ignore it, except when it comes from their parent: torch ends a
stuck worker with it. SIG_IGN is not sufficient: torch gives each loader worker its own handler, in C++, which ends it.
So the signal is blocked there, which no handler can undo, and a thread takes it instead. No other fork is shielded: a
blocked signal stays blocked in whatever program it executes, and a user's `multiprocessing.Pool` is ended by it.

*Threads:* the signal's handler runs in the main thread, between two Python instructions; a main thread that computes in
native code, or waits in a collective, runs it later. Everything else may be called from any thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any

from unisono.errors import STOP_EXIT_CODE, UnisonoError
from unisono.torch_private import LOADER_WORKER_MODULE

_requested = 0  # the signal that came
_is_agreed = False
_is_handled = False
_shields_loader_workers = False
_is_shielded = False  # this process is a shielded loader worker
_takes_interrupts = True
_was_interrupted = False
_warnings: list[int] = []
_previous: dict[int, Any] = {}  # of each signal that is handled: what it did before
_callbacks: list[Callable[[], None]] = []
_served: list[SimpleQueue[Callable[[], object] | None]] = []  # where the main thread waits: see `serving`
_serving_lock = threading.Lock()
_forking = threading.local()  # each thread's signal mask from before the fork that it makes


def handle(warnings: Sequence[int] = ()) -> None:
    """From now on SIGTERM only sets a flag, which `is_requested` reads, and calls the user's handler. So does the first
    Ctrl-C; the second one interrupts. Idempotent. From another thread, it is done by the main one, where that waits in
    `serving`.

    The signals `warnings` set the flag, too, but call their handlers only after the ranks have agreed to stop.
    UnisonoError: this is the first call, it is not in the main thread, and the main thread does not serve.
    """
    global _is_handled
    if _is_handled:
        return
    if threading.current_thread() is not threading.main_thread():
        with _serving_lock:
            if not _served:
                raise UnisonoError(
                    f"SIGTERM cannot be handled from thread {threading.current_thread().name!r}: Python lets only the "
                    "main thread of a process install a signal's handler; call should_stop() once in the main thread "
                    "before, or DataParallel in the main thread; where an engine owns that, pass should_stop(asked=) "
                    "whether this rank was asked in another way"
                )
            is_done = threading.Event()
            _served[-1].put(partial(handle, warnings))
            _served[-1].put(is_done.set)
        is_done.wait()
        return
    shield_loader_workers()
    _warnings[:] = warnings
    interrupts = _takes_interrupts and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for signum in {signal.SIGTERM, *warnings, *([signal.SIGINT] if interrupts else [])}:
        before = signal.signal(signum, _note_signal)
        _previous[signum] = signal.SIG_DFL if before is None else before  # None: by native code, cannot be restored
    _is_handled = True
    for callback in _callbacks:
        callback()


@contextmanager
def serving(orders: SimpleQueue[Callable[[], object] | None]) -> Iterator[None]:
    """During the block, this thread calls what it gets from the queue; other threads may put `handle` into it.

    Has an effect in the main thread only, which waits for them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _serving_lock:
        _served.append(orders)
    try:
        yield
    finally:
        with _serving_lock:
            _served.remove(orders)
        while not orders.empty():  # the thread that put it waits for it
            if (order := orders.get()) is not None:
                order()


@contextmanager
def scope() -> Iterator[None]:
    """Restore the handling of SIGTERM after the block, if the block has begun to handle it.

    A request that the block has not answered by an agreed stop is sent again, to the handler of that time.
    """
    global _is_handled, _requested, _is_agreed
    was_handled, was_agreed, _is_agreed = _is_handled, _is_agreed, False
    try:
        yield
    finally:
        unanswered = 0 if _is_agreed else _requested
        _is_agreed = was_agreed
        if _is_handled and not was_handled:
            _requested = 0
            _restore()
            if unanswered:
                os.kill(os.getpid(), unanswered)


def takes(handler: object) -> bool:
    """Whether that is the handler of a process that handles SIGTERM."""
    return handler is _note_signal


def leave_interrupts() -> None:
    """Let Ctrl-C interrupt this process although SIGTERM is a request: its caller takes the first one."""
    global _takes_interrupts
    _takes_interrupts = False


def is_requested() -> bool:
    """Whether this process was asked to stop: SIGTERM has arrived since it began to handle it."""
    return _requested > 0


def agree() -> None:
    """Note that the ranks have agreed to stop early, for the report to the launcher."""
    global _is_agreed
    _is_agreed = True


def is_agreed() -> bool:
    """Whether this process is heading for an agreed early end."""
    return _is_agreed


def call(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn`; once the ranks have agreed to stop, `sys.exit()` in it, with 0 or 143, is a return like any other."""
    try:
        return fn(*args)
    except SystemExit as error:
        if not _is_agreed or error.code not in (None, 0, STOP_EXIT_CODE):
            raise
        return None


def on_handling(callback: Callable[[], None]) -> None:
    """Call `callback` when SIGTERM is handled for the first time; at once if it is handled already."""
    if _is_handled:
        callback()
    else:
        _callbacks.append(callback)


def shield_loader_workers() -> None:
    """Make torch's loader workers that this process forks from now on ignore SIGTERM, except from this process.

    If they end with their parent in any case, as in a worker of `spawn`, this can be done long before SIGTERM is
    handled, if it ever is: then workers that are running at that time are shielded, too.
    """
    global _shields_loader_workers
    if not _shields_loader_workers and hasattr(os, "register_at_fork"):
        _shields_loader_workers = True
        # Hooks cannot be unregistered, so they are registered once, and decide at each fork.
        os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_begin_child)


def _note_signal(signum: int, frame: FrameType | None) -> None:
    """The handler of the signals that are requests."""
    global _requested, _was_interrupted
    _requested = signum
    before = _previous[signum]
    if signum == signal.SIGINT and not _was_interrupted:
        _was_interrupted = True
        with suppress(OSError):  # not via sys.stderr, which may be in the middle of a write
            line = "asked by SIGINT, this process stops at its next should_stop(); Ctrl-C again ends it now"
            os.write(2, f"\nunisono: {line}\n".encode())
        return
    # SIG_DFL and SIG_IGN are not callable.
    if callable(before) and (_is_agreed or signum not in _warnings):
        before(signum, frame)


def _restore() -> None:
    global _is_handled, _was_interrupted
    _is_handled = _was_interrupted = False
    for signum, before in _previous.items():
        signal.signal(signum, before)


def _begin_fork() -> None:
    """Block SIGTERM: until the child has decided how to handle it, it must neither be lost nor end the child."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _end_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    """Run first in a fork of this process: a loader worker shields itself; any other restores the signal's handling."""
    global _is_shielded
    was_shielded, _is_shielded = _is_shielded, _is_loader_worker(sys._getframe(1))
    if _is_shielded:
        if signal.SIGINT in _previous:  # a terminal sends it to this process, too
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # SIGTERM stays blocked in all threads of this process, so only `sigwaitinfo` takes it.
        threading.Thread(target=listen_to_parent, name="unisono-sigterm", daemon=True).start()
        return
    if _is_handled:
        _restore()
    # A child of a shielded loader worker is not shielded, so it must not inherit the blocked signal.
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask - ({signal.SIGTERM} if was_shielded else set()))


def _is_loader_worker(forking: FrameType) -> bool:
    """Whether the frame that called `os.fork` is multiprocessing's, starting a loader worker of torch."""
    # The module is that of the function that such a worker runs.
    process = forking.f_locals.get("process_obj")
    return getattr(getattr(process, "_target", None), "__module__", None) == LOADER_WORKER_MODULE


def listen_to_parent() -> None:
    """Body of the thread that takes SIGTERM in a shielded loader worker, and drops it.

    The parent's own ends the process, as torch's handler would.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
