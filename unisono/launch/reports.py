"""What a worker reports to its supervisor: messages through one pipe, the outcome last.

The worker's pulse is sent whenever it has changed: a thread reads counters that are kept anyway.

*Threads:* in the worker, the main thread and `unisono-pulse`, a daemon that wakes every interval; a lock keeps their
messages separate. It needs the GIL, so a worker that holds the GIL for long shows no progress, which is accurate.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from unisono.comm.noted_calls import NotedCall, last_calls
from unisono.world import World

_HEADER = struct.Struct("!BQ")  # a message's kind, the length of its data
_CHUNK = 1 << 20


class Kind(IntEnum):
    PULSE = 1  # a pickled `Pulse`
    HANDLES_STOP = 2  # SIGTERM is a request to this worker, which acts on it at its next step: see `should_stop`
    STOPPED = 3  # all ranks have agreed to stop, after that many steps; the outcome is that of an early end
    OUTCOME = 4  # an `Outcome` as bytes
    NOTE = 5  # text for the user, the same from each rank, shown only once


@dataclass(frozen=True)
class Pulse:
    """A worker's progress report."""

    progress: int  # increases with every collective, batch and step
    doing: str = ""  # the collective it is in
    calls: tuple[NotedCall, ...] = ()  # while it stands still, its program's last ones on groups of torch


class Reporter:
    """The worker's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """Send one message completely, or nothing if the caller is gone. Nothing is sent after the outcome."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self._descriptor < 0:
                return
            for part in (_HEADER.pack(kind, len(data)), data):
                left = memoryview(part)
                while left:
                    left = left[os.write(self._descriptor, left[:_CHUNK]) :]
            if kind is Kind.OUTCOME:
                os.close(self._descriptor)
                self._descriptor = -1


class Inbox:
    """The supervisor's end: raw data goes in, complete messages come out."""

    def __init__(self) -> None:
        self._received = bytearray()

    def read(self, descriptor: int) -> bool:
        """Read once; False at the end of the stream. BlockingIOError if there is nothing yet."""
        data = os.read(descriptor, _CHUNK)
        self._received += data
        return bool(data)

    def take(self) -> Iterator[tuple[Kind, Any]]:
        """Yield the messages that are complete now, as bytes; an outcome, as the memory that it was read into."""
        while len(self._received) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._received)
            end = _HEADER.size + length
            if len(self._received) < end:
                return
            data = memoryview(self._received)[_HEADER.size : end]
            if kind == Kind.OUTCOME:  # it may be large, and is the last message
                self._received = bytearray()
                yield Kind.OUTCOME, data
                return
            message = bytes(data)
            data.release()
            del self._received[:end]
            yield Kind(kind), message


@contextlib.contextmanager
def beating(
    world: World, reporter: Reporter, interval_s: float, record: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Report the pulse of `world` during the block, and call `record` each time."""
    is_over = threading.Event()
    thread = threading.Thread(
        target=_send_pulses, args=(world, reporter, interval_s, record, is_over), name="unisono-pulse", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()  # not joined: if it is in the middle of a message, the reporter's lock waits for that


def count_of(world: World, name: str) -> int:
    """How many "steps", "batches" or "samples" a rank has taken."""
    return sum(track.counts.get(name, 0) for track in world.timeline.tracks())


def _send_pulses(
    world: World, reporter: Reporter, interval_s: float, record: Callable[[], None], is_over: threading.Event
) -> None:
    """Body of the pulse's thread."""
    reported: Pulse | None = None
    # A signal that this thread takes does not wake the main one, where its handler runs. The kernel chooses another
    # thread if the main one has yet to take one: SIGTERM, then Ctrl-C at once.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    # The first one at once: until then, the supervisor does not count this rank.
    while True:
        counted = count_of(world, "batches") + count_of(world, "steps")
        progress = counted + getattr(world.comm, "progress", 0)
        calls = last_calls() if reported is not None and reported.progress == progress else ()
        pulse = Pulse(progress, getattr(world.comm, "current", None) or "", calls)
        if pulse != reported:
            reporter.send(Kind.PULSE, pickle.dumps(pulse))
            reported = pulse
        record()
        for look in world.timeline.at_pulse:
            look()
        if is_over.wait(interval_s):
            return
