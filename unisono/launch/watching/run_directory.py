"""The directory that a run leaves: logs for people, and a record of the run that can be inspected live or later.

    <log_dir>/latest -> 2026-11-21_174601_4242       the run that was begun last, where links can be made
    <log_dir>/2026-11-21_174601_4242/                UTC, and the pid of the calling process
        run.json                                     what the run is, its workers, and its state; replaced as a whole.
                                                     After a kill of the calling process the state stays "running"
        samples.jsonl                                what its monitor measured, one sample per line
        rank-0.stdout, rank-0.stderr, ...            what the workers wrote, byte for byte

*Threads:* any thread may write; a lock covers the facts.

Invariants:

1. Only `create` raises. Later, a full disk is reported once, as a warning of `logging`, and never ends a run.
2. A reader finds either the old or the new `run.json`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from unisono.errors import StoppedError
from unisono.outcome import Outcome

State = Literal["running", "finished", "failed", "stopped"]
Stream = Literal["stdout", "stderr"]

logger = logging.getLogger(__name__)


def now() -> str:
    """The current time, as "2026-11-21T17:46:01.250+00:00": the format of all files of a run."""
    return to_text(time.time())


def to_text(at: float) -> str:
    """Format a time as returned by `time.time`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


class RunDirectory:
    """One run's directory, for the process that writes it; see `create`."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self._facts = {**facts, "state": "running", "started_at": now(), "ended_at": None}
        self._lock = threading.Lock()
        self._has_warned = False
        self._write_facts()

    @classmethod
    def create(cls, log_dir: str | Path, facts: dict[str, Any], name: str = "") -> RunDirectory:
        """Create a new directory for a run in `log_dir`, which is created if it is missing; OSError if it cannot hold
        it.

        Args:
            facts: what the run is (its command, number of workers, versions, ...); JSON, or else converted to strings.
            name: included in the directory's name; of several machines, each passes its own, since they may share
                `log_dir`.
        """
        parent = Path(log_dir).absolute()  # a later chdir must not change it
        try:
            parent.mkdir(parents=True, exist_ok=True)
            run = cls(_make_unique(parent, name), facts)
        except OSError as error:
            code = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno
            raise OSError(
                code,
                f"log_dir={str(log_dir)!r} cannot hold the files of a run ({error.strerror}: {error.filename}); pass a "
                "directory that exists, or can be created, and that this user may write to",
            ) from error
        _point_latest_at(run.path)
        return run

    @property
    def samples(self) -> Path:
        """The file to which the monitor writes its samples, one line of JSON each."""
        return self.path / "samples.jsonl"

    def log(self, rank: int, stream: Stream) -> Path:
        """The file for everything that a worker writes to one of its streams; restarts append to it."""
        return self.path / f"rank-{rank}.{stream}"

    def note(self, **facts: Any) -> None:
        """Add facts to `run.json`, or replace them."""
        with self._lock, self._warning_once():
            self._facts |= facts
            self._write_facts()

    def append(self, rank: int, text: str) -> None:
        """Append text to the log of a rank's stderr, after what the rank has written itself."""
        with self._warning_once(), self.log(rank, "stderr").open("a") as file:
            file.write(text)

    def finish(self, state: State, **facts: Any) -> None:
        """Record how the run has ended, and further facts known by then."""
        self.note(**facts, state=state, ended_at=now())

    def finish_with(self, verdict: Outcome[Any], exit_code: int, is_asked: bool) -> None:
        """Record how the run has ended: by itself, or on request."""
        error = verdict.error
        facts: dict[str, Any] = {"exit_code": exit_code}
        if error is not None:
            facts |= {"error": f"{type(error).__name__}: {error}", "where": verdict.where}
        if is_asked or isinstance(error, StoppedError):
            self.finish("stopped", **facts)
        else:
            self.finish("finished" if error is None else "failed", **facts)

    def _write_facts(self) -> None:
        fresh = self.path / ".run.json"
        fresh.write_text(json.dumps(self._facts, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(fresh, self.path / "run.json")

    @contextlib.contextmanager
    def _warning_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s is incomplete from here on, the run continues: %s", self.path, error)


def _make_unique(parent: Path, part: str) -> Path:
    """Make a directory named by time and process; a second run in the same second gets a number."""
    name = "_".join(filter(None, [f"{datetime.now(UTC):%Y-%m-%d_%H%M%S}", part, str(os.getpid())]))
    for number in count(1):
        path = parent / (name if number == 1 else f"{name}_{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


def _point_latest_at(path: Path) -> None:
    """Point `latest` at a run, by a relative link, so that the whole log directory can be moved."""
    fresh = path.parent / f".latest-{path.name}"
    with contextlib.suppress(OSError):  # links are not supported, or something else has that name
        os.symlink(path.name, fresh)
        try:
            os.replace(fresh, path.parent / "latest")
        except OSError:
            os.unlink(fresh)
