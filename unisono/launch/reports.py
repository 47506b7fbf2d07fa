"""What a worker reports to its supervisor: messages through one pipe, of which the outcome is the last.

A message consists of a header, its data, and the buffers that belong to it: the memory of large tensors in a result.

*Threads:* in the worker, the main thread and the pulse's; a lock keeps their messages separate. In the caller, the
supervisor's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from unisono.pickling import block_of

_HEADER = struct.Struct("!BQI")  # a message's kind, the length of its data, the number of buffers after it
_CHUNK = 1 << 20


class Kind(IntEnum):
    """The kinds of messages."""

    PULSE = 1  # a pickled `Pulse`
    HANDLES_STOP = 2  # SIGTERM is a request to this worker, which acts on it at its next step: see `should_stop`
    STOPPED = 3  # all ranks have agreed to stop, after so many steps; the outcome is that of an early end
    OUTCOME = 4  # an `Outcome` as bytes
    BEGUN = 6  # fn is about to be called
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


@dataclass(frozen=True)
class Message:
    """A received message: its kind, its bytes, and the buffers that they refer to."""

    kind: Kind
    data: bytes
    buffers: list[Any]


class Reporter:
    """The worker's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, kind: Kind, data: bytes = b"", buffers: Sequence[memoryview] = ()) -> None:
        """Send one message completely, or nothing if the caller is gone. Nothing is sent after the outcome."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self._descriptor < 0:
                return
            lengths = struct.pack(f"!{len(buffers)}Q", *(each.nbytes for each in buffers))
            if buffers:
                _widen_pipe(self._descriptor)
            self._write_all(_HEADER.pack(kind, len(data), len(buffers)) + lengths + data)
            for each in buffers:
                self._write_all(each)
            if kind is Kind.OUTCOME:
                os.close(self._descriptor)
                self._descriptor = -1

    def send_pulse(self, pulse: Pulse) -> None:
        self.send(Kind.PULSE, pickle.dumps(pulse))

    def _write_all(self, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(self._descriptor, left[:_CHUNK]) :]


class Inbox:
    """The supervisor's end: raw data goes in, complete messages come out.

    Buffers are read into separate memory, which becomes that of the tensors, so they are copied only once.
    """

    def __init__(self) -> None:
        self._received = bytearray()
        self._kind = Kind.PULSE
        self._data: bytes | None = None  # of a message whose buffers are being read
        self._lengths: list[int] = []  # of buffers to come
        self._buffers: list[Any] = []
        self._left = memoryview(b"")  # the unread part of the latest buffer

    def read(self, descriptor: int) -> bool:
        """Read once, up to the available room; False at the end of the stream. BlockingIOError if there is nothing
        yet."""
        if self._left:
            count = os.readv(descriptor, [self._left[:_CHUNK]])
            self._left = self._left[count:]
            return count > 0
        data = os.read(descriptor, _CHUNK if self._data is None else 1)
        self._received += data
        return bool(data)

    def take(self) -> Iterator[Message]:
        """Yield the messages that are complete now."""
        while self._data is not None or self._parse_message():
            while not self._left and self._lengths:
                self._add_buffer(self._lengths.pop(0))
            if self._left:
                return
            assert self._data is not None
            message = Message(self._kind, self._data, self._buffers)
            self._data, self._buffers = None, []
            yield message

    def _parse_message(self) -> bool:
        """Parse the header and data of the next message; return whether they have arrived."""
        if len(self._received) < _HEADER.size:
            return False
        kind, length, count = _HEADER.unpack_from(self._received)
        begin = _HEADER.size + 8 * count
        if len(self._received) < begin + length:
            return False
        self._kind = Kind(kind)
        self._lengths = list(struct.unpack_from(f"!{count}Q", self._received, _HEADER.size))
        self._data = bytes(self._received[begin : begin + length])
        del self._received[: begin + length]
        return True

    def _add_buffer(self, length: int) -> None:
        self._buffers.append(block_of(torch.UntypedStorage(length)))
        view = memoryview(self._buffers[-1]).cast("B")
        taken = min(length, len(self._received))
        view[:taken] = self._received[:taken]
        del self._received[:taken]
        self._left = view[taken:]


def _widen_pipe(descriptor: int) -> None:
    """Enlarge the pipe's buffer, which halves the time of large results; the total of a user's pipes is limited."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _CHUNK)
