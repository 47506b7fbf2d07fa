"""Exhausted resources: which limit an error has hit, how much of it is in use, and how to raise it.

The system's own message ("Too many open files") says neither. Its errors are raised as OSError, and by native code as
RuntimeError with the same message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from unisono.backends.cgroups import cgroup_directories, read_number
from unisono.outcome import add_note_once, chain_of

_ROOT = Path("/")
_SHM = Path("/dev/shm")
_MANY_FILES = 4096
_NEARLY_FULL = 1 << 20  # bytes that are left


def add_limit_note(error: BaseException) -> None:
    """Add a note to an error about the limit that it has hit, if any."""
    with contextlib.suppress(Exception):  # reading the limits may fail for the same reason
        add_note_once(error, describe_limit(error))


def describe_limit(error: BaseException, root: Path = _ROOT) -> str:
    """Describe the limit that an error, or its cause, has hit, and how to raise it; empty if it has hit none.

    Args:
        root: the root of the file system whose /proc and control groups are read.
    """
    for link in chain_of(error):
        for code, words, describe in _KINDS:
            # Other errors may use codes that mean something else.
            is_meant = link.errno == code if isinstance(link, OSError) and link.errno else words in str(link)
            if is_meant and isinstance(link, OSError | RuntimeError):
                return describe(link, root)
    return ""


def describe_mapped_memory() -> str:
    """What may have led to SIGBUS in a process."""
    fullness = _fullness(_SHM)
    return f"; mapped memory could not be allocated{': ' + fullness if fullness else ', as where /dev/shm is full'}"


def _open_files(error: BaseException, root: Path) -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_MANY_FILES, 2 * soft)
    way_out = f"`ulimit -n {wanted}` in the shell allows more"
    if 0 < hard < wanted:
        way_out = f"its hard limit is {hard}: root can raise it, and docker run --ulimit nofile={wanted}"
    return (
        f"a process may have {soft} files open (ulimit -n), and one that starts workers takes four for each; {way_out}"
    )


def _processes(error: BaseException, root: Path) -> str:
    """The limit on processes and threads that is closest to being reached."""
    import resource

    found = []
    for directory in cgroup_directories("pids", None, root):
        limit, used = read_number(directory / "pids.max"), read_number(directory / "pids.current")
        if limit is not None:
            found.append(
                (limit - (used or 0), f"the control group allows {limit} processes and threads{_in_use(used)}")
            )
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY:
        found.append((soft, f"this user may have {soft} processes and threads (ulimit -u)"))
    if (limit := read_number(root / "proc/sys/kernel/threads-max")) is not None:
        found.append((limit, f"the machine allows {limit} processes and threads"))
    text = min(found)[1] if found else "the system does not start any more processes or threads"
    return (
        f"{text}; a larger limit (docker run --pids-limit, pids.max, ulimit -u), fewer workers, fewer threads of each "
        "(num_threads) or fewer loader workers help"
    )


def _room(error: BaseException, root: Path) -> str:
    """The places where a run writes that are full or not writable."""
    named = [Path(name).parent for name in (getattr(error, "filename", None),) if isinstance(name, str)]
    texts = [text for place in dict.fromkeys([*named, Path(tempfile.gettempdir()), _SHM]) if (text := _fullness(place))]
    return "; ".join(texts)


def _fullness(place: Path) -> str:
    try:
        facts = os.statvfs(place)
    except OSError:
        return ""
    way_out = (
        "loader workers need it (docker run --shm-size=8g, or mount -o remount,rw,size=8G /dev/shm)"
        if place == _SHM
        else "TMPDIR can name a directory with room"
    )
    if facts.f_flag & os.ST_RDONLY:
        return f"{place} is read-only; {way_out}"
    free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    if free >= _NEARLY_FULL:
        return f"{place} has no room for more files; {way_out}" if facts.f_files and not facts.f_favail else ""
    return f"{place} is full, with {free >> 10} of {size >> 10} KiB free; {way_out}"


def _loopback(error: BaseException, root: Path) -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return (
        f"workers of one machine meet over its interface {name!r}, which does not exist or is down; `ip link set "
        f"{name} up` brings it up, and GLOO_SOCKET_IFNAME names another"
    )


def _in_use(count: int | None) -> str:
    return "" if count is None else f", of which {count} are in use"


_Kind = tuple[int, str, Callable[[BaseException, Path], str]]
_KINDS: Iterable[_Kind] = (
    (errno.EMFILE, "Too many open files", _open_files),
    (errno.EAGAIN, "Resource temporarily unavailable", _processes),
    (errno.EAGAIN, "can't start new thread", _processes),
    (errno.ENOSPC, "No space left on device", _room),
    (errno.EROFS, "Read-only file system", _room),
    (errno.ENODEV, "Unable to find address for: ", _loopback),
)
