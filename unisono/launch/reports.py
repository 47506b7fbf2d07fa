"""What a worker tells its supervisor: messages through one pipe, of which the outcome is the last.

*Threads:* in the worker, the main thread and the pulse's; a lock keeps their messages apart. In the caller, the
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

_HEADER = struct.Struct("!BQ")  # the kind of message and the length of what follows


class Kind(IntEnum):
    """What a message is."""

    PULSE = 1  # a pickled `Pulse`
    HEEDS_STOP = 2  # SIGTERM is a request to this worker, which it answers at its next step: see `should_stop`
    STOPPED = 3  # all ranks have agreed to stop; the outcome is that of an early end
    OUTCOME = 4  # an `Outcome` as bytes
    NOTE = 5  # text for the user, the same from each rank, to be shown once


@dataclass(frozen=True)
class Pulse:
    """A sign of life.

    Attributes:
        progress: grows with every collective, batch and step.
        doing: the collective that the rank is in, in words; empty outside one.
        device_bytes: memory in use on the rank's device, where that is not main memory.
    """

    progress: int
    doing: str = ""
    device_bytes: int | None = None


class Reporter:
    """The worker's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """Send one message whole, or none when the caller is gone. Nothing is sent after the outcome."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self._descriptor < 0:
                return
            left = memoryview(_HEADER.pack(kind, len(data)) + data)
            while left:
                left = left[os.write(self._descriptor, left) :]
            if kind is Kind.OUTCOME:
                os.close(self._descriptor)
                self._descriptor = -1

    def send_pulse(self, pulse: Pulse) -> None:
        self.send(Kind.PULSE, pickle.dumps(pulse))


class Inbox:
    """The supervisor's end: bytes in, whole messages out."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Take what was read; the messages that are complete now."""
        self._received += data
        while len(self._received) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._received)
            end = _HEADER.size + length
            if len(self._received) < end:
                return
            message = bytes(self._received[_HEADER.size : end])
            del self._received[:end]
            yield Kind(kind), message
