"""Exhausted resources: which limit an error has hit, and how to raise it.

The system's own message ("Too many open files") says neither. Its errors are raised as OSError, and by native code as
RuntimeError with the same message.
"""

from __future__ import annotations

import errno

from unisono.outcome import add_note_once, chain_of

FULL_SHM = "if /dev/shm is full, docker run --shm-size=8g, or mount -o remount,rw,size=8G /dev/shm"
_PROCESSES = (
    "the system does not start any more processes or threads (`ulimit -u`, pids.max); a larger limit "
    "(docker run --pids-limit), fewer workers, fewer threads of each (cores=n) or fewer loader workers help"
)
_KINDS = (
    (
        errno.EMFILE,
        "Too many open files",
        "a process that starts workers has four files open for each; `ulimit -n` in the shell, or docker run --ulimit "
        "nofile=N, allows more",
    ),
    (errno.EAGAIN, "Resource temporarily unavailable", _PROCESSES),
    (errno.EAGAIN, "can't start new thread", _PROCESSES),
    (errno.ENOSPC, "No space left on device", f"TMPDIR can name a directory with room; {FULL_SHM}"),
)


def add_limit_note(error: BaseException) -> None:
    """Add a note to an error about the limit that it has hit, if any."""
    add_note_once(error, describe_limit(error))


def describe_limit(error: BaseException) -> str:
    """Describe the limit that an error, or its cause, has hit, and how to raise it; empty if it has hit none."""
    for link in chain_of(error):
        for code, words, advice in _KINDS:
            # Other errors may use codes that mean something else.
            is_meant = link.errno == code if isinstance(link, OSError) and link.errno else words in str(link)
            if is_meant and isinstance(link, OSError | RuntimeError):
                return advice
    return ""
