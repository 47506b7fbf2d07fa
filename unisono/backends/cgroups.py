"""Finds the control groups that define a process's limits; for version 1 and version 2."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_MOUNT = Path("sys/fs/cgroup")


def cgroup_directories(controller: str, pid: int | None = None, root: Path = Path("/")) -> list[Path]:
    """The directories in which a controller ("cpu", "memory") limits a process, its own first, then those above it.

    In a container, directories above it may not exist. `pid` None is the calling process.
    """
    try:
        lines = (root / "proc" / str(pid or "self") / "cgroup").read_text().splitlines()
    except OSError:
        return []
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    paths = {name: path for _, names, path in entries for name in names.split(",")}
    path = paths.get(controller, paths.get(""))
    if path is None:
        return []
    mount = root / _MOUNT / (controller if controller in paths else "")  # version 1 has a hierarchy for each controller
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def read_number(path: Path) -> int | None:
    """The number in a file; None if the file contains a word ("max"), or does not exist."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
