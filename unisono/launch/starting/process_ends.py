"""How a process that supervises others ensures that none of them outlives it, or its run."""

from __future__ import annotations

import _io
import contextlib
import ctypes
import gc
import io
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def interpreter_command(code: str) -> list[str]:
    """The command of an interpreter like this one, with its options (`-W`, `-X`, `-O`) and search path, that runs the
    code. It imports nothing from its working directory, where others may have put files, unless this process does."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # multiprocessing's, too
    flags = [each for each in flags if each not in ("-i", "-P")]
    known = {flags[place + 1].partition("=")[0] for place, flag in enumerate(flags) if flag == "-X"}
    for name, value in sys._xoptions.items():  # options of the program's own
        if name not in known:
            flags += ["-X", name if value is True else f"{name}={value}"]
    return [sys.executable, *flags, "-P", "-c", f"import sys; sys.path[:] = {search_path()!r}; {code}"]


def search_path() -> list[str]:
    """This process's module search path. Entries that are not strings are left out: Python ignores them."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def become_reaper() -> None:
    """Make descendants of this process its children once their own parents are dead. Does nothing except on Linux.

    Elsewhere, a process that has left its worker's session outlives the worker.
    """
    _process_control(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: signal.Signals) -> None:
    """Request that signal for when the thread that has forked this process ends. Does nothing except on Linux.

    Elsewhere, workers outlive a caller and a zygote that are killed at the same moment. The parent may be dead before
    this is called: compare `os.getppid()` afterwards.
    """
    _process_control(_PR_SET_PDEATHSIG, signum)


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show, 15 characters at most. Does nothing except on Linux."""
    _process_control(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def native_threads() -> set[str]:
    """The threads of this process that a fork would miss, as "number name"; also those of native libraries, which
    `threading` does not know. Empty except on Linux."""
    found = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/comm") as name:
                found.add(f"{task} {name.read().strip()}")
    # jemalloc, of pyarrow for one, starts its own again in a fork.
    return {each for each in found if not each.endswith(" jemalloc_bg_thd")}


def close_files(made_before: list[None]) -> None:
    """Close what a script has left open, as the end of an interpreter does: what was written last is still in the
    file's buffer. Standard streams are flushed. To be called before `os._exit`, with a list that was made before the
    script: it is frozen, with the script's files, if that has called `gc.freeze()`."""
    # `gc.get_freeze_count()` would show it as well, but goes through all that was ever imported.
    if not any(each is made_before for each in gc.get_objects()):
        gc.unfreeze()
    files: list[io.IOBase] = []
    for each in gc.get_objects():
        with contextlib.suppress(Exception):
            # The one base of all that are; to ask `io.IOBase` itself fills caches that are empty in a fork.
            if issubclass(type(each), _io._IOBase) and not each.closed and each.writable():
                files.append(each)
    # Text before bytes, and what compresses before what it writes to: each closes what is below it.
    is_last = io.BufferedWriter | io.RawIOBase
    files.sort(key=lambda each: (not isinstance(each, io.TextIOBase), isinstance(each, is_last)))
    for each in files:
        with contextlib.suppress(Exception):
            each.flush()
            if each.fileno() > 2:
                each.close()
    if _libc is not None:
        _libc.fflush(None)


def kill_session(pid: int, signum: int) -> None:
    """Send a signal to the process group that the worker leads: itself and its loader workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:  # just forked, it does not lead a group yet
            os.kill(pid, signum)


def kill_trees(pids: Iterable[int]) -> None:
    """SIGKILL these processes and their descendants in any session; parents first, or they would notice the death of a
    child."""
    victims = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            victims.append(psutil.Process(pid))
    if not victims:
        return
    # A single pass over all processes of the machine: that is what takes the time.
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            children[process.ppid()].append(process)
    # All of them are known before the first kill: descendants of a dead process are no longer found from it.
    for victim in victims:  # the list grows during the iteration
        victims += children.pop(victim.pid, ())
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()


def has_children() -> bool:
    """Whether this process has any, also ended ones; True where the kernel cannot be asked."""
    try:
        if hasattr(os, "waitid"):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_children() -> None:
    """SIGKILL all children of this process and their descendants."""
    with contextlib.suppress(psutil.Error):
        if has_children():
            kill_trees(child.pid for child in psutil.Process().children())


def kill_marked(processes: Iterable[psutil.Process], name: str, beginning: str) -> None:
    """SIGKILL those whose environment has that variable with a value that begins so: what workers have started."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name, "").startswith(beginning):
                process.kill()


def reap_children() -> None:
    """Kill and wait until nothing is left; what a dying process still started is a child of this one after the wait."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_children()
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:  # all that are dead by now, before the next look for children
                pass


def _process_control(option: int, value: int | ctypes.c_char_p) -> None:
    if _libc is not None and hasattr(_libc, "prctl"):
        _libc.prctl(option, value, 0, 0, 0)
