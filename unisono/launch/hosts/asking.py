"""SIGTERM to an agent: a wish that it passes on to its workers, where they heed it, and else the end.

Torch's agent ends its workers and itself by a signal, which leaves the other agents waiting for a machine that does not
come back. Workers that call `should_stop` agree with those of all machines to stop, and end well everywhere; so the
agent only passes the signal on and does what it does at any good end: it meets the others, and goes.

It goes at once where that fails: a worker of this machine has, or has not ended when the grace is over. What the
signal means then, it means at once where a worker does not heed it, or is only being started.

*Threads:* the main one; the methods named `on_*` are handlers of signals there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import SignalException

from unisono.launch.hosts.failure_file import has_failed, is_marked

_LOOK_S = 0.1
_MARGIN_S = 2.0  # after the grace, for the guards, who see to it


class StopWish:
    """What this agent's workers are asked, and since when.

    Args:
        grace_s: what workers have after they were asked.
    """

    def __init__(self, grace_s: float) -> None:
        self._patience_s = grace_s + _MARGIN_S
        self._deadline: float | None = None
        self._workers: list[str] = []

    def of(self, failure_files: Iterable[str]) -> None:
        """It is about these workers, which are being started; where they would leave word of a failure is given."""
        self._workers = list(failure_files)

    @property
    def is_granted(self) -> bool:
        """Whether the workers have stopped early, as they were asked to, here or on any machine."""
        return any(is_marked(each, "stopped") for each in self._workers)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """SIGTERM is a wish during the block."""
        signal.signal(signal.SIGALRM, self.on_alarm)
        signal.signal(signal.SIGTERM, self.on_sigterm)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            return
        is_heeded = all(is_marked(each, "heeds") and not has_failed(each) for each in self._workers)
        if not is_heeded or not _pass_on(signal.SIGTERM):
            _end()
        self._deadline = time.monotonic() + self._patience_s
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)

    def on_alarm(self, signum: int, frame: FrameType | None) -> None:
        """Look whether the workers do as they were asked."""
        is_late = self._deadline is not None and time.monotonic() > self._deadline
        if is_late or any(has_failed(each) for each in self._workers):
            signal.setitimer(signal.ITIMER_REAL, 0)  # what follows must not be interrupted
            _end()


def kill_workers() -> None:
    """SIGKILL to the workers alone: their guards tell of it, and bury what they leave."""
    for guard in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(guard.pid) == guard.pid:
                for worker in guard.children():
                    worker.kill()


def _end() -> None:
    """What torch's own handler of the signal does: the agent ends its workers, and then itself."""
    raise SignalException(f"Process {os.getpid()} got signal: SIGTERM", sigval=signal.SIGTERM)


def _pass_on(signum: signal.Signals) -> bool:
    """Send it to the workers and their guards, as the agent would; whether there were any."""
    found = False
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(child.pid) == child.pid:  # the agent gives each worker a session
                os.killpg(child.pid, signum)
                found = True
    return found
