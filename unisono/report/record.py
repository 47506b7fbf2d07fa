"""The record of a rank: what it does, second by second, in files that can be read during the run.

    rank-0.jsonl         one JSON object per line: who the rank is; then, every second, the numbers of its `RankSummary`
                         so far, and what is new since the line before; of rank zero, the commit of its directory, and
                         what the script has given its trackers as settings; at last, how it ended. A restart appends.
                         If the group has failed, its launcher adds what it knows: see `write_fault`
    rank-0.spans.jsonl   at the end, a line: the latest spans of its threads
    digests.jsonl        of rank zero, with virtual ranks: what its bits depend on, its command, the digests of some
                         steps (`training/digests.py`), and each checkpoint that was saved or loaded

`report/run.py` reads them, and `report/digests.py` the last one.

*Threads:* any may call; a lock keeps lines whole.

Invariants:

1. Nothing here ends or delays a run: an error, such as one of the file system, is reported once; the record ends there.
2. Times come from `time.perf_counter`, except the time of day in the first line: setting a clock changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import torch

from unisono.report.gathering import summarise
from unisono.report.steps import StepsDone
from unisono.report.summary import CLOCK, DIGESTS, SLOWER
from unisono.report.timeline import EVALUATE, LOG, SAVE, STEP, Track
from unisono.world import World

MAX_STEPS = 1000  # whose times are in one line
_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class Recorder:
    """Writes the record of the rank of a world into a directory; and what torch.profiler sees of some of its steps,
    numbered from 1, into `rank-0.trace.json`. `steps` are those that the rank has done."""

    def __init__(
        self, world: World, directory: Path, profiled: range | None = None, steps: StepsDone | None = None
    ) -> None:
        self._world = world
        self._steps = steps or StepsDone()
        self._before_load = 0  # steps of this attempt that were taken before a state was loaded
        self._at_profiled: Callable[[int], None] | None = None
        self._path = directory / f"rank-{world.rank}.jsonl"
        self._spans = directory / f"rank-{world.rank}.spans.jsonl"
        world.timeline.is_recorded = True
        world.timeline.at_step, world.timeline.at_load = self._note_step, self._note_load
        self._lock = threading.RLock()
        self._began_ns = self._read_ns = time.perf_counter_ns()
        self._left_ns = 0  # of the step that had not ended at the last reading
        self._next_s = 0.0
        self._is_broken = False
        self._settings: dict[str, Any] | None = None  # as written last
        if world.rank == 0:
            digests = directory / DIGESTS
            world.timeline.write_digests = lambda facts: self._write_to(digests, json.dumps(facts) + "\n")
        if world.restart_count:
            self._write_to(self._path, "\n")  # ends a line that a kill has cut off
            if world.rank == 0 and digests.exists():
                self._write_to(digests, "\n")
        if profiled:
            self._profile_steps(profiled)
        self._write(
            began=time.time(),
            rank=world.rank,
            host=platform.node(),
            world_size=world.world_size,
            restart=world.restart_count,
            command=sys.argv,
            cores=os.cpu_count(),
            versions={"unisono": version("unisono"), "torch": torch.__version__, "python": platform.python_version()},
        )

    def sample(self) -> None:
        """Write a line, if the last one is a second old."""
        now = (time.perf_counter_ns() - self._began_ns) / 1e9
        if now >= self._next_s and not self._is_broken:
            self._next_s = now + max(_INTERVAL_S, now / SLOWER)
            self._write_sample()
            for look in list(self._world.timeline.at_sample):
                look(self._path.parent)

    def end(self, error: BaseException | None) -> None:
        """Write the last lines, and the spans."""
        if self._at_profiled is not None:
            logger.warning(
                "the run has ended before the last step to be profiled: there is no trace of rank %d", self._world.rank
            )
        self._write_sample()
        end = "finished" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
        self._write(end=end, checkpoint=self._world.timeline.last_saved)
        spans: dict[str, Any] = {"restart": self._world.restart_count}
        for number, track in enumerate(self._world.timeline.tracks()):
            spans[f"{track.name} {number}"] = [
                [phase, self._seconds(start), round((stop - start) / 1e9, 6)]
                for phase, start, stop in track.spans.copy()
            ]
        self._write_to(self._spans, json.dumps(spans) + "\n")

    def _profile_steps(self, steps: range) -> None:
        """Start torch.profiler before the first of these steps, and write its trace after the last; in the loop's
        thread."""
        profiler = torch.profiler.profile()

        def at_step(number: int) -> None:
            try:
                if number == steps.start - 1:
                    profiler.start()
                    with torch.profiler.record_function(f"{CLOCK}{time.perf_counter_ns() - self._began_ns}"):
                        pass
                elif number == steps.stop - 1:
                    self._at_profiled = None
                    profiler.stop()
                    profiler.export_chrome_trace(str(self._path.with_suffix(".trace.json")))
            except Exception as error:  # a full disk, or another profiler that runs
                self._at_profiled = None
                logger.warning("steps %d to %d are not profiled: %s", steps.start, steps.stop - 1, error)

        self._at_profiled = at_step
        at_step(0)

    def _note_step(self, number: int, done: int | None) -> None:
        """In the loop's thread, after each step: without I/O."""
        self._steps.note((self._steps.loaded or 0) + number - self._before_load if done is None else done)
        if self._at_profiled is not None:
            self._at_profiled(number)

    def _note_load(self, done: int) -> None:
        self._steps.load(done)
        self._before_load = sum(track.counts.get("steps", 0) for track in self._world.timeline.tracks())

    def _write_sample(self) -> None:
        try:
            with self._lock:
                if self._world.rank == 0 and self._settings != self._world.timeline.settings:
                    self._settings = self._world.timeline.settings
                    self._write(settings=self._settings, commit=_commit())
                self._write(**self._numbers())
        except Exception as error:  # of a device that has failed, or of /proc: the thread continues, for the pulse
            self._give_up(error)

    def _numbers(self) -> dict[str, Any]:
        loop, first_ns = self._loop_track(), self._steps.first_ns
        return {
            "t": self._seconds(time.perf_counter_ns()),
            "phase": "" if loop is None else loop.current or "",
            "doing": getattr(self._world.comm, "current", None) or "",
            "done": self._steps.done,
            "loaded": self._steps.loaded,
            "place": self._place_of_loop(loop),
            "first_step": None if first_ns is None else self._seconds(first_ns),
            "step_seconds": self._new_steps(loop),
            "logged": self._new_logged(),
            "machine_cpu": psutil.cpu_percent() / 100,
            **_usage(),
            **asdict(summarise(self._world, is_own_thread=False)),
        }

    def _loop_track(self) -> Track | None:
        """The track of the rank's own loop: of the thread that has spent the most time in loops."""
        loops = [track for track in self._world.timeline.tracks() if track.name == "loop"]
        return max(loops, key=lambda track: sum(track.totals.copy().values()), default=None)

    def _place_of_loop(self, loop: Track | None) -> dict[str, int | None] | None:
        """Of the outermost loop, if it trains."""
        timing = loop.innermost if loop is not None else None
        while timing is not None and timing.around is not None:
            timing = timing.around
        return None if timing is None or timing.place is None else timing.place.as_numbers()

    def _new_steps(self, loop: Track | None) -> list[float]:
        """Seconds of each step that has ended since the last reading, without evaluating, logging and saving."""
        if loop is None:
            return []
        # A copy is one operation of the interpreter; the loop's thread continues.
        new = list(takewhile(lambda span: span.stop > self._read_ns, reversed(loop.spans.copy())))[::-1]
        found: list[float] = []
        for phase, start, stop in new:
            self._read_ns = stop
            if phase not in (EVALUATE, LOG, SAVE):
                self._left_ns += stop - start
            if phase == STEP:
                found.append(round(self._left_ns / 1e9, 6))
                self._left_ns = 0
        return found[:: -(-len(found) // MAX_STEPS) or 1]

    def _new_logged(self) -> list[list[Any]]:
        logged = self._world.timeline.logged
        return [
            [self._seconds(at), step, values] for at, step, values in (logged.popleft() for _ in range(len(logged)))
        ]

    def _seconds(self, at_ns: int) -> float:
        return round((at_ns - self._began_ns) / 1e9, 6)

    def _write(self, **facts: Any) -> None:
        self._write_to(self._path, json.dumps(facts, default=str) + "\n")

    def _write_to(self, path: Path, text: str) -> None:
        with self._lock:
            if self._is_broken:
                return
            try:
                with path.open("a") as file:
                    file.write(text)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._is_broken:
            return
        self._is_broken = True
        logger.warning("the record %s is incomplete from here on, the run continues: %s", self._path, error)


def write_fault(directory: Path, rank: int, **facts: Any) -> None:
    """Add to the record of a rank that its group has failed, once the group has ended: what its launcher knows of it,
    even if the rank was killed. Raises OSError.

    Args:
        rank: the first one of the machine.
        facts: `restart` and `world_size` of the attempt; `what` failed; `at`, when it was noticed, as a time of day in
            seconds of `host`; whether it `is_secondary`; the steps `done`, those of the state that was `loaded`, and
            when the `first_step` ended.
    """
    with (directory / f"rank-{rank}.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"fault": facts}) + "\n")  # it may have been killed in the middle of a line


def _usage() -> dict[str, float]:
    """CPU seconds of this process and its children, such as loader workers, and bytes of main memory of all of them."""
    cpu_s, rss = sum(os.times()[:4]), psutil.Process().memory_info().rss
    for pid in _children():
        with contextlib.suppress(psutil.Error):  # it has ended
            child = psutil.Process(pid)
            cpu_s += sum(child.cpu_times()[:2])
            rss += child.memory_info().rss
    return {"cpu_s": round(cpu_s, 2), "rss": rss}


def _children() -> list[int]:
    """The pids of this process's children, without scanning all processes of the machine; [] if not on Linux."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a thread, or the file system, is not there
        for each in Path("/proc/self/task").iterdir():
            found += map(int, (each / "children").read_text().split())
    return found


@cache
def _commit() -> str:
    """The commit that git has for the working directory; "" without one, or if git is slow: the pulse waits for it."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=1).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
