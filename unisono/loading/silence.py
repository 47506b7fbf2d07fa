"""Says where a loop is that has waited long for a batch which is read in its own process; of loader workers,
`workers.py` says so.

*Threads:* the pulse's, in the processes that this package has started.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from time import perf_counter_ns
from traceback import walk_stack
from types import FrameType

from unisono.comm.stacks import own_frames
from unisono.loading import channel, fetcher, part_reader, sources, workers
from unisono.report.timeline import FETCH, Timeline, Track

LONG_NS = 30 * 10**9
_READING = {fetcher.__file__, part_reader.__file__, sources.__file__}

logger = logging.getLogger(__name__)


class Silence:
    """Looks at the loops of one rank, and says once of each wait that it is long."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._told: set[tuple[Track, int]] = set()

    def look(self) -> None:
        """Warn of the loops that have waited for long."""
        for track in self._timeline.tracks():
            loop, since = track.innermost, track.since
            waited_ns = perf_counter_ns() - since
            if loop is None or track.phase != FETCH or waited_ns < LONG_NS or (track, since) in self._told:
                continue
            self._told.add((track, since))
            with suppress(Exception):  # the threads run on meanwhile
                if (reading := _reading(loop.thread)) is not None:
                    logger.warning("no batch has come for %.0f s: %s", waited_ns / 1e9, _where(reading))


def watch(timeline: Timeline) -> None:
    """Look at the loops of that rank at each pulse from now on. Idempotent."""
    if not timeline.at_pulse:
        timeline.at_pulse.append(Silence(timeline).look)


def _reading(loop: int) -> FrameType | None:
    """Where the thread is that reads for the loop in that thread; None if loader workers do."""
    frames = sys._current_frames()
    readers = [each.ident for each in threading.enumerate() if each.name == "unisono-reader"]
    for thread in (loop, *readers):
        top = frames.get(thread or 0)
        files = {frame.f_code.co_filename for frame, _ in walk_stack(top)} if top else set()
        if files & _READING and channel.__file__ not in files:  # not one that waits for the other
            return None if workers.__file__ in files else top
    return None


def _where(reading: FrameType) -> str:
    samples = "the loop reads a batch"
    for frame, _ in walk_stack(reading):
        if frame.f_code.co_filename == fetcher.__file__ and "request" in frame.f_locals:
            samples = f"the loop reads the samples with indices {fetcher.few(frame.f_locals['request'].indices)}"
    return f"{samples}; {workers.in_words(own_frames(reading))}"
