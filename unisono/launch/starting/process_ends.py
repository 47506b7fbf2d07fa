"""How a process that watches over others sees to it that none of them outlives it, or their run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def become_reaper() -> None:
    """Make what descends from this process its child, once its own parent is dead. Linux only; elsewhere nothing.

    There, what has left its worker's session outlives it.
    """
    _process_control(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: signal.Signals) -> None:
    """Get that signal when the thread that has forked this process ends. Linux only; elsewhere nothing.

    There, workers outlive a caller and a zygote that are killed at the same moment. The parent may be dead before this
    is called: compare `os.getppid()` afterwards.
    """
    _process_control(_PR_SET_PDEATHSIG, signum)


def name_process(name: str) -> None:
    """The name that `ps -o comm` and `top` show, 15 characters at most. Linux only; elsewhere nothing."""
    _process_control(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def kill_session(pid: int, signum: int) -> None:
    """Send a signal to the process group that the worker leads: itself and its loader workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:  # just forked, it leads none yet
            os.kill(pid, signum)


def kill_tree(process: psutil.Process) -> None:
    """SIGKILL a process and all its descendants, whatever their session; it first, or it would see a dead child."""
    with contextlib.suppress(psutil.Error):
        for victim in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                victim.kill()


def kill_children() -> None:
    """SIGKILL all children of this process and what descends from them."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            kill_tree(child)


def kill_marked(processes: Iterable[psutil.Process], name: str, beginning: str) -> None:
    """SIGKILL those whose environment has a variable of that name with such a beginning: what workers have started."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name, "").startswith(beginning):
                process.kill()


def bury_children() -> None:
    """Kill and wait until nothing is left; what a dying process has still started is a child here after the wait."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_children()
            os.waitpid(-1, 0)


def _process_control(option: int, value: int | ctypes.c_char_p) -> None:
    if _libc is not None and hasattr(_libc, "prctl"):
        _libc.prctl(option, value, 0, 0, 0)
