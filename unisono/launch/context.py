"""What `spawn(..., join=False)` gives: the running workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unisono import preemption
from unisono.launch.supervisor import Supervisor

ASKED = b"\nunisono: the workers stop at their next should_stop(); Ctrl-C again ends them now\n"


class ProcessContext:
    """The running workers of `spawn(..., join=False)`. A context manager: joins, or stops on an error."""

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

    def pids(self) -> list[int | None]:
        """The workers' process ids, by rank; after a restart, those of the new ones."""
        return self._supervisor.pids()

    @property
    def log_directory(self) -> Path | None:
        """Where the logs of this run are, in a directory of its own below `log_dir`; None where none was given."""
        return self._supervisor.log_directory

    def join(self, timeout: float | None = None) -> list[Any] | None:
        """Wait for the workers.

        On the main thread, and unless the program has a handler of its own, SIGTERM meanwhile asks workers that call
        `should_stop` for an early end; others are ended by it, with this process, as ever.

        Args:
            timeout: seconds to wait at most; None waits to the end.

        Returns:
            The results by rank, or None when the time is over and workers still run.

        Raises:
            BaseException: what a worker raised; as for `spawn`.
            KeyboardInterrupt: after Ctrl-C here, when the workers have been stopped; a second Ctrl-C kills them. Where
                workers call `should_stop`, the first one only asks for an early end, as SIGTERM does. What another
                signal's handler raises here stops them just the same.
        """
        with self._stop_on_signal():
            self._supervisor.start()  # here, so that no Ctrl-C can fall between the start and the wait
            is_over = self._supervisor.wait(timeout)
        return self._supervisor.result() if is_over else None

    def stop(self) -> None:
        """Stop the workers: SIGTERM, then SIGKILL after the grace.

        `join` then raises WorkerDiedError; or StoppedError, where workers that call `should_stop` have come to their
        early end within the grace.
        """
        self._supervisor.stop()

    def start(self) -> None:
        """Start the workers, as `join` does where that has not been done; `spawn` has called it."""
        with self._stop_on_signal():
            self._supervisor.start()

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """Stop the workers when a signal's handler, that of Ctrl-C for one, raises in the block."""
        try:
            with _sigterm_asks(self._supervisor), _interrupt_asks(self._supervisor):
                yield
        except BaseException as error:
            self._supervisor.end(Supervisor.interrupt if isinstance(error, KeyboardInterrupt) else Supervisor.stop)
            raise


@contextmanager
def _interrupt_asks(supervisor: Supervisor) -> Iterator[None]:
    """The first Ctrl-C asks workers that heed a stop for it; where none does, and the second time, it interrupts."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    was_asked = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal was_asked
        if was_asked or not supervisor.heeds_stop():
            signal.default_int_handler(signum, frame)
        was_asked = True
        supervisor.ask_to_stop()
        with suppress(OSError):
            os.write(2, ASKED)  # a stream may be in the middle of a write here

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _sigterm_asks(supervisor: Supervisor) -> Iterator[None]:
    """SIGTERM asks workers that heed it to stop; where none does, it ends this process, and so the workers.

    A process that heeds SIGTERM itself continues doing so.
    """
    before = signal.getsignal(signal.SIGTERM)
    is_heeding = preemption.takes(before)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not (is_heeding or before is signal.SIG_DFL):
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if is_heeding or supervisor.heeds_stop():
            supervisor.ask_to_stop()
            if callable(before):
                before(signum, frame)
        else:
            supervisor.note_end("SIGTERM")
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    try:
        if is_heeding and preemption.is_requested():
            supervisor.ask_to_stop()
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
