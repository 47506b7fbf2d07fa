"""The workers' standard streams: saved to files, shown as they arrive, and remembered for the error message.

stdout goes straight to the caller's own descriptor, so that it is a terminal for the worker if it is one for the
caller, unless its lines must be marked, saved or hidden. stderr always goes through a pipe, since its last lines are
part of the message of a worker's failure.

Output is shown in whole lines. An unfinished line (a prompt, a row of dots) is held for `_HOLD_S` at most, then shown,
and ended by a newline before another worker's. "\\r" ends a line as "\\n" does, so a progress bar moves, and what
follows it gets its prefix again. No byte is lost, except those that erase a bar (blanks up to a "\\r") without one.

*Threads:* one per group, `unisono-output`, is the only one that reads, splits and writes. The group's supervisor opens
and closes: what is new reaches the thread by a queue, and a byte wakes it. There is no polling.

Invariants:

1. Files get each byte as it was written, before it is shown.
2. A terminal that is stopped, or a reader who does not read, stops the workers that write to it, as without this
   package; a broken pipe stops no worker.
3. `close` ends within its time, even if a process still holds a pipe or the terminal is stopped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from unisono.launch import options
from unisono.launch.messages import say_once
from unisono.launch.watching.log_directory import Stream, log_file

logger = logging.getLogger(__name__)

_CHUNK = 65536  # bytes per read
_TAIL = 16384  # the number of bytes to remember of each stderr
_HOLD_S = 0.2
_END_S = 5.0  # to pass on what has been read
_LAST_LOOKS = 3  # for news, what is in a pipe, and its end


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
            return self._erase_bar(prefix, piece) if is_own and len(piece) > 1 else b""
        is_bar_on_bar = self._end == b"\r" and piece.endswith(b"\r")  # bars share a line, as they would on a terminal
        newline = b"" if is_own or self._end == b"\n" or is_bar_on_bar else b"\n"
        prefix = b"" if is_own and not self._end else prefix
        self._source = source
        self._end = piece[-1:] if piece.endswith((b"\n", b"\r")) else b""
        return newline + prefix + piece

    def _erase_bar(self, prefix: bytes, piece: bytes) -> bytes:
        """Erase the bar that the piece is meant to erase, and its prefix; write nothing if there is no bar."""
        is_there, self._end = self._end == b"\r", b"\n"
        return b" " * len(prefix) + piece if is_there else b""

    def end_line(self) -> bytes:
        """What must be written so that the next line starts on its own."""
        newline = b"" if self._end == b"\n" else b"\n"
        self._end = b"\n"
        return newline


class _CallersStream:
    """One of the caller's own streams, by a descriptor of ours, since the caller may close its own."""

    def __init__(self, descriptor: int) -> None:
        self.mixer = LineMixer()
        self.is_marked = False  # whether lines have got prefixes
        self.writers: set[bytes] = set()  # by their prefixes, which a restart leaves as they are
        # What the first writer has written, while another may follow and both get prefixes; then None.
        self.first: list[tuple[_Source, bytes]] | None = []
        self.show_at: float | None = None  # when to show that, even if no other has followed
        try:
            self.fd = os.dup(descriptor)
        except OSError:  # it is closed
            self.fd = os.open(os.devnull, os.O_WRONLY)

    def show(self, source: _Source, pieces: list[bytes]) -> None:
        """Show pieces of lines."""
        self.writers.add(source.prefix)
        given = [(source, each) for each in pieces]
        if self.first is not None and source.prefix and not source.is_marked_alone and len(self.writers) == 1:
            self.first += given
            self.show_at = self.show_at or time.monotonic() + _HOLD_S
        else:
            self.show_first()
            self._mix_pieces(given)

    def show_first(self) -> None:
        """Show what waits for another writer."""
        first, self.first, self.show_at = self.first, None, None
        self._mix_pieces(first or [])

    def _mix_pieces(self, pieces: list[tuple[_Source, bytes]]) -> None:
        is_one = len(self.writers) == 1
        prefixes = [b"" if is_one and not each.is_marked_alone else each.prefix for each, _ in pieces]
        self.is_marked |= any(prefixes)
        mixed = zip(pieces, prefixes, strict=True)
        self.write(b"".join(self.mixer.add(source, prefix, piece) for (source, piece), prefix in mixed))

    def write(self, data: bytes) -> None:
        """Write everything, or nothing more once the stream is broken. Waits for its reader."""
        while data and self.fd >= 0:
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:  # another holder of the stream has made it non-blocking
                waiting = select.poll()
                waiting.register(self.fd, select.POLLOUT)
                waiting.poll()
            except OSError as error:
                self.close()
                if error.errno != errno.EPIPE:  # that reader, such as `head`, wants no more
                    say_once(f"what workers write is not shown any more ({error.strerror}); the run continues")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(eq=False)
class _Source:
    """One captured stream of one worker."""

    fd: int
    prefix: bytes
    is_marked_alone: bool  # also while no other source has written to that stream
    shown_on: _CallersStream | None  # None: not shown
    path: Path | None  # the file that it is saved to
    log: int = -1  # that file's descriptor
    unsaved: bytes = b""  # of a line that is overwritten in place
    tail: bytes = b""
    release_at: float | None = None  # when to show what is held
    splitter: LineSplitter = field(default_factory=LineSplitter)

    def show(self, data: bytes) -> None:
        pieces = self.splitter.feed(data)
        if self.shown_on is not None and pieces:
            self.shown_on.show(self, pieces)
        if pieces:
            self.release_at = None
        if self.splitter.held and self.release_at is None:
            self.release_at = time.monotonic() + _HOLD_S

    def release(self) -> None:
        """Show what is held, even if its line is unfinished."""
        self.release_at = None
        if (held := self.splitter.release()) and self.shown_on is not None:
            self.shown_on.show(self, [held])

    def to_save(self, data: bytes) -> bytes:
        """What the file gets of `data`, b"" at the end: of a line overwritten in place ("\\r"), its last content."""
        held = self.unsaved + data
        self.unsaved = b""
        if b"\r" not in held:
            return held
        *lines, rest = held.split(b"\n") if data else (held, b"")
        self.unsaved = b"\r".join(rest.split(b"\r")[-2:])
        return b"".join(line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines)

    def close_log(self) -> None:
        if self.log >= 0:
            os.close(self.log)
            self.log = -1


class WorkerOutput:
    """The streams of one group of workers, from `open` for each of them to `close`. `directory` is where they are
    saved; None saves nothing. `stdout` and `stderr` are the caller's own descriptors."""

    def __init__(self, wanted: options.Output, directory: Path | None = None, stdout: int = 1, stderr: int = 2) -> None:
        self._wanted = wanted
        self._directory = directory
        self._stdout = stdout
        self._callers = {"stdout": _CallersStream(stdout), "stderr": _CallersStream(stderr)}
        self._write_ends: dict[int, list[int]] = {}
        self._of_stderr: dict[int, _Source] = {}
        self._has_complained = False
        self._news: SimpleQueue[_Source] = SimpleQueue()
        self._deadline: float | None = None  # for the end
        self._wake_r, self._wake_w = socket.socketpair()
        self._thread = threading.Thread(target=_pass_on, args=(self,), name="unisono-output", daemon=True)

    def open(self, rank: int) -> tuple[int, int]:
        """Return the descriptors for a worker's stdout and stderr; they remain ours, see `handed_over`."""
        self._write_ends[rank] = []
        is_captured = (
            self._wanted.prefix in (True, "several") or self._directory is not None or not self._is_shown(rank)
        )
        stdout = self._capture_stream(rank, "stdout") if is_captured else self._stdout
        return stdout, self._capture_stream(rank, "stderr")

    def handed_over(self, rank: int) -> None:
        """Close our copies of a worker's descriptors, which it now has: its end is then the end of its streams."""
        for end in self._write_ends.pop(rank, []):
            os.close(end)

    def tail(self, rank: int, num_lines: int = 20) -> list[str]:
        """Return the last lines of a worker's stderr, as far as it has been read; after `close`, all of it was.

        For a line that was overwritten ("\\r"), its last content is returned.
        """
        source = self._of_stderr.get(rank)
        lines = source.tail.removesuffix(b"\n").split(b"\n") if source is not None and source.tail else []
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-num_lines:])
        return [line.decode(errors="replace") for line in shown]

    def close(self, timeout_s: float = 1.0) -> None:
        """Pass on what is left, and end; all writers must be dead. A pipe that a stray process holds, and a stopped
        terminal, are waited for that many seconds. Idempotent."""
        for rank in list(self._write_ends):
            self.handed_over(rank)
        if self._deadline is None:
            self._deadline = time.monotonic() + timeout_s
            self._wake_thread()
            self._thread.join(timeout_s + _END_S)  # a stopped terminal may hold it for good

    def _is_shown(self, rank: int) -> bool:
        return self._wanted.ranks is None or rank in self._wanted.ranks

    def _capture_stream(self, rank: int, name: Stream) -> int:
        is_marked = name == "stderr" if self._wanted.prefix is None else self._wanted.prefix
        reading, writing = os.pipe()
        self._write_ends[rank].append(writing)
        source = _Source(
            fd=reading,
            prefix=f"[rank {rank}] ".encode() if is_marked else b"",
            is_marked_alone=name == "stderr" or self._wanted.prefix is True,
            shown_on=self._callers[name] if self._is_shown(rank) else None,
            path=None if self._directory is None else log_file(self._directory, rank, name),
        )
        if name == "stderr":
            self._of_stderr[rank] = source
        self._news.put(source)
        self._wake_thread()
        return writing

    def _wake_thread(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        with contextlib.suppress(OSError):  # the thread has failed, and has reported it
            self._wake_w.send(b"!")

    # Everything below runs on the output's thread.

    def _serve(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._wake_r, selectors.EVENT_READ)
        looks = _LAST_LOOKS  # however late it is: what a worker has written before its end is there
        while looks and not self._is_done(selector):
            sources = [key.data for key in selector.get_map().values() if key.data is not None]
            moments = [each.release_at for each in sources if each.release_at is not None]
            moments += [each.show_at for each in self._callers.values() if each.show_at is not None]
            moments += [] if self._deadline is None else [self._deadline]
            for key, _ in selector.select(max(0.0, min(moments) - time.monotonic()) if moments else None):
                if key.data is None:
                    self._take_news(selector)
                elif not self._read(key.data):
                    selector.unregister(key.fd)
                    self._end(key.data)
            for source in sources:
                if source.release_at is not None and time.monotonic() >= source.release_at:
                    source.release()
            for stream in self._callers.values():
                if stream.show_at is not None and time.monotonic() >= stream.show_at:
                    stream.show_first()
            looks -= self._deadline is not None and time.monotonic() >= self._deadline

    def _is_done(self, selector: selectors.BaseSelector) -> bool:
        # What is left is what wakes this thread.
        return self._deadline is not None and len(selector.get_map()) == 1 and self._news.empty()

    def _take_news(self, selector: selectors.BaseSelector) -> None:
        self._wake_r.recv(64)
        with contextlib.suppress(Empty):
            while True:
                source = self._news.get_nowait()
                selector.register(source.fd, selectors.EVENT_READ, source)
                if source.path is not None:
                    try:
                        # Appending: a restarted group and the supervisor write to the same file.
                        source.log = os.open(source.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                    except OSError as error:
                        self._report_unsaved(source, error)

    def _read(self, source: _Source) -> bool:
        """Read once and pass it on; False at the end of the stream."""
        data = os.read(source.fd, _CHUNK)
        kept = source.to_save(data) if source.log >= 0 else b""
        while kept and source.log >= 0:
            try:
                kept = kept[os.write(source.log, kept) :]
            except OSError as error:
                source.close_log()
                self._report_unsaved(source, error)
        source.tail = (source.tail + data)[-_TAIL:]
        source.show(data)
        return bool(data)

    def _end(self, source: _Source) -> None:
        source.release()
        os.close(source.fd)
        source.close_log()

    def _report_unsaved(self, source: _Source, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "%s does not keep all output of its worker (%s); the run continues", source.path, error.strerror
            )


def _pass_on(output: WorkerOutput) -> None:
    """Body of the output's thread: runs until it is asked to end, and has passed on everything."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])  # a broken pipe must not end the caller
    with output._wake_r, output._wake_w, selectors.DefaultSelector() as selector:
        try:
            output._serve(selector)
        finally:
            for key in list(selector.get_map().values()):  # those that a stray process still holds open
                if key.data is not None:
                    output._end(key.data)
            for stream in output._callers.values():
                stream.show_first()
                if stream.is_marked:  # so that the caller's next output begins a new line
                    stream.write(stream.mixer.end_line())
                stream.close()
