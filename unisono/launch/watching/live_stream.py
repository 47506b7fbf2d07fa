"""What goes out to one of the caller's own streams: a terminal, a file, a pipe to anything.

Invariants:
1. It is written to only when it is known to take something, so one which is blocked stops nobody's thread.
2. A broken one (its reader is gone) takes everything and shows nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Hashable

from unisono.launch.watching.lines import LineMixer

_PENDING = 1 << 18  # bytes that may wait
_PIPE_BUF = 4096  # a pipe that takes something takes so much


class LiveStream:
    """One of the caller's own streams, and what waits for it.

    Attributes:
        fd: our own, for the number that the caller knows may be closed, and be another file soon.
        pending: what waits.
    """

    def __init__(self, descriptor: int) -> None:
        self.fd = _open_again(descriptor)
        self.pending = bytearray()
        self._can_block = not stat.S_ISREG(os.fstat(self.fd).st_mode)
        self._mixer = LineMixer()
        self._is_marked = False  # whether lines have got prefixes
        self._is_broken = False

    def is_full(self) -> bool:
        """Whether who writes to it must wait."""
        return len(self.pending) >= _PENDING

    def add(self, source: Hashable, prefix: bytes, piece: bytes) -> None:
        """Show a line of a source, or a piece of one, after what waits."""
        if not self._is_broken:
            self._is_marked = self._is_marked or bool(prefix)
            self.pending += self._mixer.add(source, prefix, piece)

    def end_line(self) -> None:
        """Let what the caller writes next begin a line; a stream without marks stays as it was written."""
        if self._is_marked and not self._is_broken:
            self.pending += self._mixer.end_line()

    def write(self) -> None:
        """Write some of what waits, when it is known that the descriptor can take it: whole lines where they fit."""
        size = len(self.pending)
        if self._can_block:
            size = self.pending.rfind(b"\n", 0, _PIPE_BUF) + 1 or _PIPE_BUF
        try:
            del self.pending[: os.write(self.fd, self.pending[:size])]
        except BlockingIOError:  # another was quicker
            pass
        except OSError:
            self._is_broken = True
            self.pending.clear()

    def close(self) -> None:
        """Drop what waits."""
        os.close(self.fd)


def _open_again(descriptor: int) -> int:
    """A descriptor of our own for the same file, which does not block where that can be had.

    A terminal that has room may block all the same, in the middle of a write. The flag of the caller's descriptor is
    not ours to set: other processes share it, and would find their writes refused.
    """
    try:
        again = os.dup(descriptor)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_WRONLY)
    if stat.S_ISREG(os.fstat(again).st_mode):  # never blocks, and is written to where the caller has left off
        return again
    with contextlib.suppress(OSError):  # a socket, a terminal of another user, a system without /proc
        unblocked = os.open(f"/proc/self/fd/{again}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.close(again)
        return unblocked
    return again
