"""Messages to the user: said once, shortened, and with the limit of the machine that an error has hit; and whether a
terminal understands codes that move its cursor, and its user wants colours.

*Threads:* any; at worst two log the same message at the same time.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import IO

from unisono.comm.outcome import add_note_once, chain_of, text_of
from unisono.errors import RemoteTraceback

logger = logging.getLogger(__name__)

_said: set[str] = set()

# The system's own message ("Too many open files") does not say how to raise the limit. Its errors are OSErrors,
# and RuntimeErrors with the same message, from native code.
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
    (
        errno.EROFS,
        "Read-only file system",
        "TMPDIR can name a directory that can be written; if /dev/shm cannot, which loader workers need: docker run "
        "--tmpfs /dev/shm, or mount -o remount,rw /dev/shm",
    ),
    (errno.ENOSPC, "No space left on device", f"TMPDIR can name a directory with room; {FULL_SHM}"),
)


def say_once(text: str) -> None:
    """Log a warning, unless it has been logged before."""
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def shorten_traceback(error: BaseException) -> None:
    """Drop the frames of this process from the error of a worker, which shows its own, and from a Ctrl-C, whose place
    means nothing; UNISONO_TRACEBACK=full shows all frames of both."""
    sources = [each for each in chain_of(error) if isinstance(each, RemoteTraceback)]
    if shows_all_frames():
        for each in sources:
            each.shown = each.text
    elif sources or isinstance(error, KeyboardInterrupt):
        error.with_traceback(None)  # not by assignment, which a frozen dataclass refuses


def shows_all_frames() -> bool:
    """Whether the user has asked for the frames of this package."""
    return os.environ.get("UNISONO_TRACEBACK") == "full"


def add_limit_note(error: BaseException) -> None:
    """Add a note to an error about the limit that it has hit, if any."""
    add_note_once(error, describe_limit(error))


def describe_limit(error: BaseException) -> str:
    """Describe the limit that an error, or its cause, has hit, and how to raise it; empty if it has hit none."""
    for link in chain_of(error):
        for code, words, advice in _KINDS:
            # Other errors may use codes that mean something else.
            is_meant = link.errno == code if isinstance(link, OSError) and link.errno else words in text_of(link)
            if is_meant and isinstance(link, OSError | RuntimeError):
                return advice
    return ""


def understands_codes(file: IO[str]) -> bool:
    """Whether the file is a terminal that is not a dumb one."""
    return file.isatty() and os.environ.get("TERM") != "dumb"


def wants_colours(file: IO[str]) -> bool:
    """Whether to write colours: to such a terminal, unless NO_COLOR is set to anything."""
    return understands_codes(file) and not os.environ.get("NO_COLOR")
