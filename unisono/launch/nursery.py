"""The caller's side of the zygote: one per calling process, started once, shared by every group of workers.

*Threads:* any thread may open a group. A lock covers the start of the zygote and of a group, and forks of this process:
a fork holds no socket that it does not know of. A group's socket belongs to its supervisor.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launch import wire

_lock = threading.Lock()
_nursery: Nursery | None = None
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Nursery:
    """A running zygote."""

    def __init__(self) -> None:
        ours, theirs = wire.socket_pair()
        # The same modules as here, however they are found. Whatever else is in sys.path, Python ignores it.
        path = [entry for entry in sys.path if isinstance(entry, str)]
        start = (
            f"import sys; sys.path[:] = {path!r}; "
            f"from unisono.launch.zygote import main; main({theirs.fileno()}, {os.getpid()})"
        )
        # OpenBLAS would start its threads when numpy is imported, and a process with threads must not fork.
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                pass_fds=[theirs.fileno()],
                env=environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is the caller's to handle
            )
        self._control = ours
        _sockets.add(ours)

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it can still serve."""
        return self._process.poll() is None

    def open_group(self, directory: Path) -> socket.socket:
        """A new group's socket; `directory` is removed when it closes. ConnectionError when the zygote is gone."""
        ours, theirs = wire.socket_pair()
        with theirs:
            wire.send(self._control, {"directory": str(directory)}, (theirs.fileno(),))
        _sockets.add(ours)
        return ours

    def close(self) -> None:
        """End the zygote and with it every worker. Idempotent."""
        self._control.close()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def open_group(directory: Path) -> socket.socket:
    """A socket to the zygote for a new group; a zygote that has died is replaced.

    Raises:
        UnisonoError: the zygote cannot be started; it has printed why to stderr.
    """
    global _nursery
    with _lock:
        for _ in range(2):
            if _nursery is None:
                _nursery = Nursery()
            with contextlib.suppress(ConnectionError):
                if _nursery.is_alive():
                    return _nursery.open_group(directory)
            _nursery.close()
            _nursery = None
    raise UnisonoError("the process that workers are forked from ends at its start; what it printed stands above")


@atexit.register
def _close() -> None:
    """At the interpreter's exit, which has waited for the threads that are no daemons; only daemon groups live now."""
    if _nursery is not None:
        _nursery.close()


def zygote_pid() -> int | None:
    """The pid of the running zygote, if there is one."""
    return _nursery.pid if _nursery is not None and _nursery.is_alive() else None


def _forget_in_child() -> None:
    """A fork of the caller must not hold the sockets open: their end is what tells the zygote that the caller died."""
    global _nursery
    _nursery = None
    for sock in list(_sockets):
        sock.close()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget_in_child)
