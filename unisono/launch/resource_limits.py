"""Exhausted resources: which limit an error has hit, how much of it is in use, and how to raise it.

The system's own message ("Too many open files") says neither. Its errors are raised as OSError, and by native code as
RuntimeError with the same message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from unisono.backends.cgroups import cgroup_directories, read_number
from unisono.outcome import add_note_once, chain_of

_SHM = Path("/dev/shm")
_NEARLY_FULL = 1 << 20  # bytes that are left
_FILES, _TASKS, _MEMORY = 4, 4, 16 << 20  # what one worker takes at the least, the files in the calling process


def add_limit_note(error: BaseException) -> None:
    """Add a note to an error about the limit that it has hit, if any."""
    with contextlib.suppress(Exception):  # reading the limits may fail for the same reason
        add_note_once(error, describe_limit(error))


def describe_limit(error: BaseException) -> str:
    """Describe the limit that an error, or its cause, has hit, and how to raise it; empty if it has hit none."""
    for link in chain_of(error):
        for code, words, describe in _KINDS:
            # Other errors may use codes that mean something else.
            is_meant = link.errno == code if isinstance(link, OSError) and link.errno else words in str(link)
            if is_meant and isinstance(link, OSError | RuntimeError):
                return describe(link)
    return ""


def check_room(nprocs: int) -> None:
    """Check, before anything is started, that this machine has what so many workers take at the least.

    Raises:
        ValueError: it has not; the message says of what.
    """
    import resource

    files, processes = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    groups = [read_number(path / "pids.max") for path in cgroup_directories("pids")]
    system = [read_number(Path("/proc/sys/kernel") / name) for name in ("pid_max", "threads-max")]
    if os.geteuid() == 0:  # whom the system does not limit
        processes = -1
    most = min(each for each in (processes, *groups, *system) if each is not None and each >= 0)
    memory = psutil.virtual_memory().available
    for bound, reason in (
        ((files if files >= 0 else nprocs * _FILES) // _FILES, f"{_FILES} of {files} open files (`ulimit -n`)"),
        (most // _TASKS, f"{_TASKS} of {most} processes and threads (`ulimit -u`, pids.max)"),
        (memory // _MEMORY, f"{_MEMORY >> 20} MiB of {memory >> 20} MiB that are free, before it has a model"),
    ):
        if nprocs > bound:
            raise ValueError(f"nprocs={nprocs}, but there is room for {bound} workers: each takes {reason}")


def describe_mapped_memory() -> str:
    """What may have led to SIGBUS in a process."""
    fullness = _describe_fullness(_SHM)
    return f"; mapped memory could not be allocated{': ' + fullness if fullness else ', as where /dev/shm is full'}"


def _describe_files(error: BaseException) -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"a process may have {soft} files open, and one that starts workers takes four for each; `ulimit -n {hard}` in "
        "the shell allows more, beyond that root, or docker run --ulimit nofile=N"
    )


def _describe_processes(error: BaseException) -> str:
    return (
        "the system does not start any more processes or threads (`ulimit -u`, pids.max); a larger limit "
        "(docker run --pids-limit), fewer workers, fewer threads of each (cores=n) or fewer loader workers help"
    )


def _describe_room(error: BaseException) -> str:
    """The places where a run writes that are full."""
    name = getattr(error, "filename", None)
    named = [Path(name).parent] if isinstance(name, str) else []
    return "; ".join(filter(None, map(_describe_fullness, dict.fromkeys([*named, Path(tempfile.gettempdir()), _SHM]))))


def _describe_fullness(place: Path) -> str:
    with contextlib.suppress(OSError):
        facts = os.statvfs(place)
        free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
        if free < _NEARLY_FULL:
            way_out = (
                "loader workers need it (docker run --shm-size=8g, or mount -o remount,rw,size=8G /dev/shm)"
                if place == _SHM
                else "TMPDIR can name a directory with room"
            )
            return f"{place} is full, with {free >> 10} of {size >> 10} KiB free; {way_out}"
    return ""


_KINDS: Sequence[tuple[int, str, Callable[[BaseException], str]]] = (
    (errno.EMFILE, "Too many open files", _describe_files),
    (errno.EAGAIN, "Resource temporarily unavailable", _describe_processes),
    (errno.EAGAIN, "can't start new thread", _describe_processes),
    (errno.ENOSPC, "No space left on device", _describe_room),
)
