"""The workers' standard streams: saved to files, shown as they arrive, and remembered for the error message.

stdout goes straight to the caller's own descriptor, so that it is a terminal for the worker if it is one for the
caller, unless its lines must be marked, saved or hidden. stderr always goes through a pipe, since its last lines are
part of the message of a worker's failure.

Output is shown in whole lines (`lines.py`). An unfinished line (a prompt, a row of dots) is held for `_HOLD_S` at most,
then shown as it is.

*Threads:* one per group, `unisono-output`, runs `_pump`, and is the only one that reads, splits and writes. The group's
supervisor opens and closes; new sources and the request to end reach the thread under a lock, and a byte wakes it.
There is no polling.

Invariants:

1. Files get each byte as it was written, before it is shown.
2. A live stream that is blocked holds up only its writers; a broken one holds up no writer.
3. None of our descriptors is inherited.
4. `close` ends within its time, even if a process still holds a pipe or the terminal is blocked.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from unisono.launch.watching.json_lines import describe_event, describe_line
from unisono.launch.watching.lines import LineSplitter
from unisono.launch.watching.live_stream import LiveStream
from unisono.launch.watching.run_directory import RunDirectory, Stream

_CHUNK = 65536  # bytes per read
_TAIL = 16384  # the number of bytes of each stderr to remember
_LAST = 1 << 17  # bytes read at the end from a pipe that is still held open: more than the pipe's capacity
_HOLD_S = 0.2


@dataclass(frozen=True)
class OutputOptions:
    """What is shown of the workers' streams.

    Attributes:
        prefix: put "[rank 1] " at the start of each line; None does so on stderr only.
        log_ranks: show only these ranks; None shows all. Files contain every rank's output.
        is_json: show each line as a JSON object (`json_lines.py`), which needs no prefix.
    """

    prefix: bool | None = None
    log_ranks: tuple[int, ...] | None = None
    is_json: bool = False


@dataclass(eq=False)
class _Source:
    """One captured stream of one worker."""

    fd: int
    prefix: bytes
    live: LiveStream | None  # None: not shown
    path: Path | None  # the file that it is saved to
    describe: Callable[[bytes], bytes] | None = None  # formats a line for display; None shows it unchanged
    log: int | None = None  # that file's descriptor
    tail: bytes = b""
    release_at: float | None = None  # when to show what is held
    splitter: LineSplitter = field(default_factory=LineSplitter)

    def is_held_up(self) -> bool:
        return self.live is not None and self.live.is_full()

    def is_due(self) -> bool:
        return self.release_at is not None and time.monotonic() >= self.release_at and not self.is_held_up()

    def show(self, data: bytes) -> None:
        if self.live is not None:
            for piece in self.splitter.feed(data):
                self._add(self.live, piece)
                self.release_at = None
            # With `describe`, a fragment would become an object of its own.
            if self.splitter.held and self.release_at is None and self.describe is None:
                self.release_at = time.monotonic() + _HOLD_S

    def release(self) -> None:
        self.release_at = None
        if self.live is not None and (held := self.splitter.release()):
            self._add(self.live, held)

    def _add(self, live: LiveStream, piece: bytes) -> None:
        live.add(self, self.prefix, piece if self.describe is None else self.describe(piece))

    def close(self) -> None:
        os.close(self.fd)
        self.close_log()

    def close_log(self) -> None:
        if self.log is not None:
            os.close(self.log)
            self.log = None


class Output:
    """The streams of one group of workers, from `open` for each of them to `close`.

    Args:
        options: what is shown.
        run: saves the streams to its files; None saves nothing.
        stdout, stderr: the caller's own descriptors.
    """

    def __init__(
        self, options: OutputOptions, run: RunDirectory | None = None, stdout: int = 1, stderr: int = 2
    ) -> None:
        self._options = options
        self._run = run
        self._caller_stdout = stdout
        self._stdout, self._stderr = self._lives = LiveStream(stdout), LiveStream(stderr)
        self._write_ends: dict[int, list[int]] = {}
        self._of_stderr: dict[int, _Source] = {}
        self._has_complained = False
        self._sources: list[_Source] = []
        self._lock = threading.Lock()  # covers the next two attributes
        self._fresh: list[_Source] = []
        self._deadline: float | None = None  # for the end
        self._wake_r, self._wake_w = socket.socketpair()
        self._thread = threading.Thread(target=_pump, args=(self,), name="unisono-output", daemon=True)

    def open(self, rank: int) -> tuple[int, int]:
        """Return the descriptors for a worker's stdout and stderr; they remain ours, see `handed_over`."""
        ends = self._write_ends[rank] = []
        stdout = self._caller_stdout
        if self._captures_stdout(rank):
            stdout = self._capture(rank, "stdout", self._stdout, ends)
        return stdout, self._capture(rank, "stderr", self._stderr, ends)

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
        """Pass on what is left, and end; all writers must be dead. Idempotent.

        Args:
            timeout_s: seconds to wait for a blocked terminal, and for a pipe that a stray process holds.
        """
        for rank in list(self._write_ends):
            self.handed_over(rank)
        with self._lock:
            if self._deadline is not None:
                return
            self._deadline = time.monotonic() + timeout_s
            self._wake()
        self._thread.join(timeout_s + 1.0)  # a stream that could not be made non-blocking may still block it

    def _captures_stdout(self, rank: int) -> bool:
        is_marked = self._options.prefix is True or self._options.is_json
        return is_marked or self._run is not None or not self._is_shown(rank)

    def _is_shown(self, rank: int) -> bool:
        return self._options.log_ranks is None or rank in self._options.log_ranks

    def _capture(self, rank: int, name: Stream, live: LiveStream, ends: list[int]) -> int:
        is_marked = name == "stderr" if self._options.prefix is None else self._options.prefix
        prefix = f"[rank {rank}] ".encode() if is_marked and not self._options.is_json else b""
        path = None if self._run is None else self._run.log(rank, name)
        reading, writing = os.pipe()
        ends.append(writing)
        # Not the write end: the worker would have to handle EAGAIN.
        os.set_blocking(reading, False)
        describe = partial(describe_line, rank, name) if self._options.is_json else None
        source = _Source(reading, prefix, live if self._is_shown(rank) else None, path, describe)
        if name == "stderr":
            self._of_stderr[rank] = source
        with self._lock:
            assert self._deadline is None, "closed"
            self._fresh.append(source)
            self._wake()
        return writing

    def _wake(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        with contextlib.suppress(OSError):  # the thread has failed, and has reported it
            self._wake_w.send(b"!")

    # Everything below runs on the output's thread.

    def _serve(self) -> None:
        while self._goes_on():
            self._turn()
        for source in self._sources.copy():
            self._drain(source)
        for live in self._lives:
            live.end_line()
        # Past the deadline `_turn` no longer waits, so this goes on only while the streams accept data.
        while any(live.pending for live in self._lives) and (self._turn() or not self._is_over()):
            pass

    def _goes_on(self) -> bool:
        """Whether there is anything left to wait for: an open source, or more to be opened."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            is_closing = self._deadline is not None
        for source in fresh:
            self._sources.append(source)
            self._open_log(source)
        return not is_closing or (bool(self._sources) and not self._is_over())

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _turn(self) -> bool:
        """Wait, and serve what is ready; return whether anything was."""
        with selectors.PollSelector() as selector:  # unlike epoll, it supports regular files
            selector.register(self._wake_r, selectors.EVENT_READ)
            for source in self._sources:
                # An unread pipe fills up and blocks its writer, which is what limits the pending output.
                if not source.is_held_up():
                    selector.register(source.fd, selectors.EVENT_READ, source)
            for live in self._lives:
                if live.pending:
                    selector.register(live.fd, selectors.EVENT_WRITE, live)
            ready = [key.data for key, _ in selector.select(self._timeout())]
        for each in ready:
            if isinstance(each, LiveStream):
                each.write()
            elif isinstance(each, _Source):
                if self._read(each) == b"":
                    self._end(each)
            else:
                self._wake_r.recv(64)
        for source in self._sources:
            if source.is_due():
                source.release()
        return bool(ready)

    def _timeout(self) -> float | None:
        moments = [source.release_at for source in self._sources if not source.is_held_up()] + [self._deadline]
        known = [moment for moment in moments if moment is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _read(self, source: _Source) -> bytes | None:
        """Read once and pass it on. Returns b"" at the end of the stream, and None if there is nothing yet."""
        try:
            data = os.read(source.fd, _CHUNK)
        except BlockingIOError:
            return None
        self._keep(source, data)
        source.tail = (source.tail + data)[-_TAIL:]
        source.show(data)
        return data

    def _drain(self, source: _Source) -> None:
        """Read what is left of a source that a process still holds open."""
        left = _LAST
        while left > 0 and (data := self._read(source)):
            left -= len(data)
        self._end(source)

    def _end(self, source: _Source) -> None:
        self._sources.remove(source)
        source.release()
        source.close()

    def _open_log(self, source: _Source) -> None:
        if source.path is not None:
            try:
                # Appending: a restarted group and `RunDirectory.append` write to the same file.
                source.log = os.open(source.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                self._complain(source.path, error)

    def _keep(self, source: _Source, data: bytes) -> None:
        while data and source.log is not None:
            try:
                data = data[os.write(source.log, data) :]
            except OSError as error:
                source.close_log()
                self._complain(source.path, error)

    def _complain(self, path: Path | None, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            text = f"unisono: {path} does not keep all output of its worker ({error.strerror}); the run continues"
            self._stderr.add(None, b"", describe_event(text) if self._options.is_json else f"{text}\n".encode())

    def _release(self) -> None:
        ours: list[_Source | LiveStream | socket.socket] = [*self._lives, self._wake_r, self._wake_w]
        for each in ours + self._sources:  # the only sources left are those that a failure of this thread has left
            each.close()


def _pump(output: Output) -> None:
    """Body of the output's thread: runs until it is asked to end, and has passed on everything."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])  # a broken pipe must not end the caller
    try:
        output._serve()
    finally:
        output._release()
