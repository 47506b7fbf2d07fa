"""Output to one of the caller's own streams: a terminal, a file, or a pipe.

Invariants:

1. It is written to only when it is known to accept data, so a blocked one holds up no thread.
2. A broken one (its reader is gone) accepts everything and shows nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Hashable

from unisono.launch.watching.lines import LineMixer

_PENDING = 1 << 18  # the most bytes that may be pending
_PIPE_BUF = 4096  # a pipe that is writable accepts at least this many bytes


class LiveStream:
    """One of the caller's own streams, and its pending output.

    Attributes:
        fd: a descriptor of our own, since the caller may close its own, whose number may soon be another file's.
        pending: the bytes to be written.
    """

    def __init__(self, descriptor: int) -> None:
        self.fd = _open_again(descriptor)
        self.pending = bytearray()
        self._can_block = not stat.S_ISREG(os.fstat(self.fd).st_mode)
        self._mixer = LineMixer()
        self._is_marked = False  # whether lines have got prefixes
        self._is_broken = False

    def is_full(self) -> bool:
        """Whether writers must wait."""
        return len(self.pending) >= _PENDING

    def add(self, source: Hashable, prefix: bytes, piece: bytes) -> None:
        """Add a line of a source, or a piece of one, to the pending output."""
        if not self._is_broken:
            self._is_marked = self._is_marked or bool(prefix)
            self.pending += self._mixer.add(source, prefix, piece)

    def end_line(self) -> None:
        """End the current line, so that the caller's next output begins a new one; a stream without prefixes is left as
        it is."""
        if self._is_marked and not self._is_broken:
            self.pending += self._mixer.end_line()

    def write(self) -> None:
        """Write some of the pending output, when the descriptor is known to be writable: whole lines if they fit."""
        size = len(self.pending)
        if self._can_block:
            size = self.pending.rfind(b"\n", 0, _PIPE_BUF) + 1 or _PIPE_BUF
        try:
            del self.pending[: os.write(self.fd, self.pending[:size])]
        except BlockingIOError:  # another writer was faster
            pass
        except OSError:
            self._is_broken = True
            self.pending.clear()

    def close(self) -> None:
        """Close, and drop the pending output."""
        os.close(self.fd)


def _open_again(descriptor: int) -> int:
    """Open a descriptor of our own for the same file, non-blocking if possible.

    A terminal with room may still block in the middle of a write. We must not set the flag on the caller's descriptor:
    other processes share it, and their writes would fail.
    """
    try:
        again = os.dup(descriptor)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_WRONLY)
    if stat.S_ISREG(os.fstat(again).st_mode):  # never blocks, and has to continue at the caller's file position
        return again
    with contextlib.suppress(OSError):  # a socket, another user's terminal, or a system without /proc
        unblocked = os.open(f"/proc/self/fd/{again}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.close(again)
        return unblocked
    return again
