"""The directory that a run leaves in `log_dir`, `2026-11-21_174601.250113_4242`: what the workers wrote, and the
tracebacks that ended them, in `rank-0.stdout`, `rank-0.stderr`, ...; and what each rank did when, in `rank-0.jsonl`,
... (report/record.py). The link `latest` leads to the run that began last. The machines of a run agree on the name:
where they share `log_dir`, they share the directory."""

from __future__ import annotations

import contextlib
import errno
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

Stream = Literal["stdout", "stderr"]

made: list[Path] = []
"""The directories of the runs of this process, in their order."""


def name_run(host: str = "") -> str:
    """A new name for the directory of a run."""
    return "_".join(filter(None, [f"{datetime.now(UTC):%Y-%m-%d_%H%M%S.%f}", host, str(os.getpid())]))


def make_log_directory(log_dir: str | os.PathLike[str], name: str = "") -> Path:
    """Make a directory for a run in `log_dir`, which is created if it is missing: a new one; or the one with this name,
    which another machine may have made. OSError if `log_dir` cannot hold it."""
    parent = Path(log_dir).absolute()  # a later chdir must not change it
    path = parent / (name or name_run())
    try:
        path.mkdir(parents=True, exist_ok=bool(name))
    except OSError as error:
        code = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno
        raise OSError(
            code,
            f"log_dir={str(log_dir)!r} cannot hold the files of a run ({error.strerror}: {error.filename}); pass a "
            "directory that exists, or can be created, and that this user may write to",
        ) from error
    with contextlib.suppress(OSError):  # links are not supported, or something else has that name
        fresh = parent / f".latest-{path.name}"
        fresh.symlink_to(path.name)  # relative, so that the whole log directory can be moved
        try:
            fresh.replace(parent / "latest")
        except OSError:
            fresh.unlink()
    made.append(path)
    return path


def log_file(directory: Path, rank: int, stream: Stream) -> Path:
    """The file for everything that a worker writes to one of its streams; restarts append to it."""
    return directory / f"rank-{rank}.{stream}"
