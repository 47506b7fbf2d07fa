"""Merges the lines of several streams into one readable stream. Pure functions: bytes in, bytes out.

"\\r" ends a line as "\\n" does, so a progress bar moves, and what follows it gets its prefix again. An unfinished line
of one worker is ended by a newline before another worker's. No byte is lost, except those that erase a bar (blanks up
to a "\\r") where there is none: with a prefix, they would be empty lines.
"""

from __future__ import annotations

import re
from collections.abc import Hashable


class LineSplitter:
    """Splits a stream of bytes into lines, the same ones however it is chunked.

    A line ends with "\\n", "\\r\\n" or "\\r", or is `limit` bytes long. An unfinished line is held.
    """

    def __init__(self, limit: int = 65536) -> None:
        self.held = b""
        # A "\r" is an end once it is known that no "\n" follows.
        self._piece = re.compile(rb"[^\r\n]{0,%d}+(?:\n|\r\n|\r(?=[^\n]))|[^\r\n]{%d}" % (limit - 1, limit))

    def feed(self, data: bytes) -> list[bytes]:
        """Add some bytes, and return the lines that they complete."""
        data, start, pieces = self.held + data, 0, []
        while match := self._piece.match(data, start):
            pieces.append(match[0])
            start = match.end()
        self.held = data[start:]
        return pieces

    def release(self) -> bytes:
        """Return what is held, even if it is unfinished."""
        held, self.held = self.held, b""
        return held


class LineMixer:
    """Makes one readable stream of the lines of many sources."""

    def __init__(self) -> None:
        self._source: Hashable = None
        self._end = b"\n"  # of the line written last; empty: it continues

    def add(self, source: Hashable, prefix: bytes, piece: bytes) -> bytes:
        """The bytes to write for a piece of a line: the piece, after the newline and prefix that it needs."""
        is_own = source == self._source
        if piece.endswith(b"\r") and piece.isspace() and (self._end or not is_own):
            return self._erase(prefix, piece) if is_own and len(piece) > 1 else b""
        is_bar_on_bar = self._end == b"\r" and piece.endswith(b"\r")  # bars share a line, as they would on a terminal
        newline = b"" if is_own or self._end == b"\n" or is_bar_on_bar else b"\n"
        prefix = b"" if is_own and not self._end else prefix
        self._source = source
        self._end = piece[-1:] if piece.endswith((b"\n", b"\r")) else b""
        return newline + prefix + piece

    def _erase(self, prefix: bytes, piece: bytes) -> bytes:
        """Erase the bar that the piece is meant to erase, and its prefix; write nothing if there is no bar."""
        is_there, self._end = self._end == b"\r", b"\n"
        return b" " * len(prefix) + piece if is_there else b""

    def end_line(self) -> bytes:
        """What must be written so that the next line starts on its own."""
        newline = b"" if self._end == b"\n" else b"\n"
        self._end = b"\n"
        return newline
