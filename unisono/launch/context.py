"""`ProcessContext`: the running workers that `spawn(..., join=False)` returns."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unisono.comm import preemption
from unisono.launch.group import Group
from unisono.launch.supervisor import Supervisor


def say_asked(signum: int, grace_s: float | None = None) -> None:
    """Say on stderr, in a signal handler, what it makes the workers do; with `grace_s` they only have to end."""
    what = "stop at their next should_stop()" if grace_s is None else f"have {grace_s:g} s to end"
    begin, end = ("\n", "; Ctrl-C again ends them now") if signum == signal.SIGINT else ("", "")  # after the "^C"
    with suppress(OSError):  # not via sys.stderr, which may be in the middle of a write
        os.write(2, f"{begin}unisono: asked by {signal.Signals(signum).name}, the workers {what}{end}\n".encode())


@contextmanager
def handlers_set(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """During the block, signals have these handlers."""
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class ProcessContext:
    """The running workers of `spawn(..., join=False)`. As a context manager it joins at the end, or stops them on an
    error."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def __enter__(self) -> ProcessContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.join()
        else:
            self.stop()
            self._supervisor.wait()

    def __repr__(self) -> str:
        return f"ProcessContext(pids={self.pids()})"

    def pids(self) -> list[int | None]:
        """The workers' process ids, by rank; after a restart, those of the new workers."""
        return self._supervisor.pids()

    @property
    def log_directory(self) -> Path | None:
        """The directory with the logs of this run, under `log_dir`; None if no `log_dir` was given."""
        return self._supervisor.log_directory

    def join(self, timeout: float | None = None) -> list[Any] | None:
        """Wait for the workers.

        In the main thread, and unless the program has its own handler, SIGTERM during the wait asks workers that call
        `should_stop` to stop early. If no worker does, SIGTERM ends this process and with it the workers, as usual.

        Args:
            timeout: the longest time to wait, in seconds; None waits until the workers end.

        Returns:
            The results by rank, or None if the timeout expired and workers are still running.

        Raises:
            BaseException: what a worker raised; as for `spawn`.
            ClosedError: `stop` ended workers before fn returned.
            KeyboardInterrupt: after Ctrl-C in this process, once the workers have been stopped; a second Ctrl-C kills
                them. If workers call `should_stop`, the first Ctrl-C only asks them to stop early, as SIGTERM does. An
                exception raised by another signal's handler in this process stops them in the same way.
        """
        with self._stop_on_signal():
            self._supervisor.start()  # inside the block: a Ctrl-C cannot fall between start and wait
            is_over = self._supervisor.wait(timeout)
        return self._supervisor.verdict.unwrap() if is_over else None

    def stop(self) -> None:
        """Stop the workers: SIGTERM, then SIGKILL after the grace period. `join` then raises ClosedError, or
        StoppedError if workers that call `should_stop` stopped early within the grace period."""
        self._supervisor.request(Group.stop)

    def start(self) -> None:
        """Start the workers; so does `join`, if they are not running yet. `spawn` has already called it."""
        with self._stop_on_signal():
            self._supervisor.start()

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """Stop the workers when a signal handler, such as that of Ctrl-C, raises within the block."""
        try:
            with _signals_ask(self._supervisor):
                yield
        except BaseException as error:
            self._supervisor.end(Group.interrupt if isinstance(error, KeyboardInterrupt) else Group.stop)
            raise


@contextmanager
def _signals_ask(supervisor: Supervisor) -> Iterator[None]:
    """Let SIGTERM, and the first Ctrl-C, ask workers that handle a stop to do so. If none does, SIGTERM ends this
    process, and with it the workers, and Ctrl-C interrupts; SIGHUP, of a closed terminal, always ends it. A program's
    own handlers stay; its SIGTERM handler is called, too."""
    hangup = getattr(signal, "SIGHUP", signal.SIGTERM)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, hangup)}
    is_handling = preemption.takes(before[signal.SIGTERM])
    taken: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
        taken += [signal.SIGTERM] if is_handling or before[signal.SIGTERM] is signal.SIG_DFL else []
        taken += [hangup] if hangup != signal.SIGTERM and before[hangup] is signal.SIG_DFL else []
        interrupts = before[signal.SIGINT]
        taken += [signal.SIGINT] if interrupts is signal.default_int_handler or preemption.takes(interrupts) else []
    was_interrupted = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if signum == signal.SIGTERM and (is_handling or supervisor.handles_stop()):
            supervisor.request(Group.ask_to_stop)
            say_asked(signum)
            if callable(own := before[signal.SIGTERM]):
                own(signum, frame)
        elif signum in (signal.SIGTERM, hangup):
            say_asked(signum, supervisor.grace_s)
            if supervisor.has_snapshots():
                supervisor.end(Group.stop)  # which saves the last one
            # By the signal itself, so that the parent sees it as the cause of the end.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif was_interrupted or not supervisor.handles_stop():
            signal.default_int_handler(signum, frame)  # raises KeyboardInterrupt
        else:
            was_interrupted = True
            supervisor.request(Group.ask_to_stop)
            say_asked(signum)

    with handlers_set(dict.fromkeys(taken, handle)):
        # The request may have come before this handler was set.
        if signal.SIGTERM in taken and is_handling and preemption.is_requested():
            supervisor.request(Group.ask_to_stop)
        yield
