"""The monitor: what each worker and its descendants use, sampled from outside, once a second.

Its samples show how memory grew before a worker died, and are written to a file for later inspection.

*Threads:* one daemon thread, `unisono-monitor`, started with the first worker, measures; any thread may read.

Invariants:

1. Measuring uses at most one percent of one core: after a round the thread rests for a hundred times the CPU time of
   that round.
2. A process that vanishes during a measurement is ignored; a worker that has ended gets no more samples.
3. The thread ends immediately when the monitor is closed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from unisono.launch.reports import Pulse
from unisono.launch.starting.process_ends import trees_of
from unisono.launch.watching.run_directory import to_text

_CURVE = 120  # samples kept per worker
_REST = 100  # as a multiple of the CPU time of measuring

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """What a worker and its descendants used at one moment.

    Attributes:
        rank: the worker's rank.
        at: when, as returned by `time.time`, to the millisecond; called "time" in the file, like all times there.
        cpu_percent: of one core, since the previous sample; 0 in a worker's first one.
        rss: bytes of memory; memory shared by several of the processes is counted for each.
        device_bytes: memory on the worker's device, if the worker has reported it.
        pid: the worker's process id.
        step: from the worker's latest pulse.
    """

    rank: int
    at: float
    cpu_percent: float
    rss: int
    device_bytes: int | None = None
    pid: int = 0
    step: int = 0

    def to_line(self) -> str:
        """As a line of the file."""
        facts = asdict(self)
        return json.dumps({"time": to_text(facts.pop("at")), **facts}) + "\n"


@dataclass
class _Watched:
    """A monitored worker; `process` is None once it has ended."""

    rank: int
    process: psutil.Process | None
    pulse: Pulse = field(default_factory=lambda: Pulse(0))
    curve: deque[Sample] = field(default_factory=lambda: deque(maxlen=_CURVE))
    spent: tuple[float, float] | None = None  # when it was last sampled, and the CPU seconds of its tree up to then


class Monitor:
    """Samples the workers that are added to it, until it is closed, at intervals of at least that many seconds. Samples
    are appended to `path`, one JSON object per line; None keeps them in memory only."""

    def __init__(self, path: Path | None, interval_s: float = 1.0) -> None:
        self._path = path
        self._interval_s = interval_s
        self._watched: dict[int, _Watched] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=_sample, args=(self,), name="unisono-monitor", daemon=True)

    def watch(self, rank: int, pid: int) -> None:
        """Sample this process from now on as the worker of that rank, in place of the previous one."""
        process = None
        with suppress(psutil.Error):  # it has already ended
            process = psutil.Process(pid)
        self._watched[rank] = _Watched(rank, process)
        if self._thread.ident is None and not self._is_closed.is_set():
            self._thread.start()

    def tell_pulse(self, rank: int, pulse: Pulse) -> None:
        """Store what a worker has reported about itself; its later samples include it."""
        if rank in self._watched:
            self._watched[rank].pulse = pulse

    def curve(self, rank: int) -> list[Sample]:
        """The latest samples of a worker, oldest first; also available after its end."""
        return list(self._watched[rank].curve) if rank in self._watched else []

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._is_closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _measure_all(self) -> None:
        """One round, on the monitor's thread."""
        living = [each for each in self._watched.copy().values() if each.process is not None]
        trees = trees_of(each.process.pid for each in living if each.process is not None)
        samples = []
        for each in living:
            assert each.process is not None
            # Our own object of the root: it notices that a pid was reused.
            sample = _measure(each, [each.process, *trees.get(each.process.pid, [])[1:]])
            if sample is None:
                each.process = None
            else:
                samples.append(sample)
                each.curve.append(sample)
        self._write(samples)

    def _write(self, samples: Iterable[Sample]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a") as file:
                file.write("".join(each.to_line() for each in samples))
        except OSError as error:
            logger.warning("samples of the workers are no longer written to %s: %s", self._path, error)
            # Reported once; the curves in memory still serve the error messages.
            self._path = None


def _sample(monitor: Monitor) -> None:
    """Body of the monitor's thread: alternates rounds and rests until the monitor is closed."""
    rest = monitor._interval_s / 5  # while the group's other workers start
    while not monitor._is_closed.wait(rest):
        spent = time.thread_time()
        monitor._measure_all()
        rest = max(monitor._interval_s, _REST * (time.thread_time() - spent))


def _measure(watched: _Watched, tree: list[psutil.Process]) -> Sample | None:
    """What the tree uses; None if its root has ended."""
    now, uses = time.monotonic(), [_use_of(process) for process in tree]
    if not uses[0][1]:  # without memory it is a zombie, or about to become one
        return None
    seconds = sum(seconds for seconds, _ in uses)
    before, watched.spent = watched.spent, (now, seconds)
    # The seconds of a process that leaves the tree are lost, so the total can decrease.
    percent = 100 * max(0.0, seconds - before[1]) / max(now - before[0], 1e-9) if before else 0.0
    return Sample(
        rank=watched.rank,
        at=round(time.time(), 3),
        cpu_percent=round(percent, 1),
        rss=sum(rss for _, rss in uses),
        device_bytes=watched.pulse.device_bytes,
        pid=tree[0].pid,
        step=watched.pulse.step,
    )


def _use_of(process: psutil.Process) -> tuple[float, int]:
    """The CPU seconds of a process, with those of its children that have ended, and its memory; zeros if it is gone."""
    with suppress(psutil.Error, OSError), process.oneshot():
        # Compares creation times, so a reused pid is not taken for the same process.
        if process.is_running():
            times = process.cpu_times()
            # Children that were waited for have left the tree, but their CPU time was the worker's.
            ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            return times.user + times.system + ended, process.memory_info().rss
    return 0.0, 0
