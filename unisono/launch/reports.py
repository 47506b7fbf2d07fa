"""What a worker reports to its supervisor: messages through one pipe, of which the outcome is the last.

A message consists of a header and its data.

*Threads:* in the worker, the main thread and the pulse's; a lock keeps their messages separate. In the caller, the
supervisor's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("!BQ")  # a message's kind, the length of its data
_CHUNK = 1 << 20


class Kind(IntEnum):
    """The kinds of messages."""

    PULSE = 1  # a pickled `Pulse`
    HANDLES_STOP = 2  # SIGTERM is a request to this worker, which acts on it at its next step: see `should_stop`
    STOPPED = 3  # all ranks have agreed to stop, after so many steps; the outcome is that of an early end
    OUTCOME = 4  # an `Outcome` as bytes
    NOTE = 5  # text for the user, the same from each rank, shown only once


@dataclass(frozen=True)
class Pulse:
    """A worker's progress report.

    Attributes:
        progress: increases with every collective, batch and step.
        doing: the collective that the rank is in, in words; empty outside one.
        device_bytes: memory in use on the rank's device, unless that is main memory.
        step: the number of steps its optimizers have taken.
    """

    progress: int
    doing: str = ""
    device_bytes: int | None = None
    step: int = 0


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
                self._write_all(part)
            if kind is Kind.OUTCOME:
                os.close(self._descriptor)
                self._descriptor = -1

    def send_pulse(self, pulse: Pulse) -> None:
        self.send(Kind.PULSE, pickle.dumps(pulse))

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left[:_CHUNK]) :]


class Inbox:
    """The supervisor's end: raw data goes in, complete messages come out."""

    def __init__(self) -> None:
        self._received = bytearray()

    def read(self, descriptor: int) -> bool:
        """Read once; False at the end of the stream. BlockingIOError if there is nothing yet."""
        data = os.read(descriptor, _CHUNK)
        self._received += data
        return bool(data)

    def take(self) -> Iterator[tuple[Kind, bytes]]:
        """Yield the messages that are complete now."""
        while len(self._received) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._received)
            end = _HEADER.size + length
            if len(self._received) < end:
                return
            data = bytes(memoryview(self._received)[_HEADER.size : end])
            del self._received[:end]
            yield Kind(kind), data
