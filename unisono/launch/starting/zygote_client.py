"""The caller's side of the zygote: one per calling process and start method, shared by every group of workers.

*Threads:* any thread may open a group. A lock covers the start of the zygote and of a group, and forks of this process:
a fork holds no socket that it does not know of. A group's socket belongs to its supervisor.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from unisono.errors import UnisonoError
from unisono.launch.starting import wire
from unisono.launch.starting.interpreter import interpreter_command
from unisono.launch.starting.warm_at_import import VARIABLE

_lock = threading.Lock()
_clients: dict[str, ZygoteClient] = {}  # by start method
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_preloaded: list[str] = []  # the modules that the user has asked every zygote to import


class ZygoteClient:
    """A running zygote.

    Args:
        start_method: "zygote" forks workers from its own image, "spawn" starts a fresh interpreter for each.
    """

    def __init__(self, start_method: str) -> None:
        ours, theirs = wire.socket_pair()
        start = (
            f"import sys; sys.path[:] = {_search_path()!r}; "
            f"from unisono.launch.starting.zygote import main; main({theirs.fileno()}, {os.getpid()}, {start_method!r})"
        )
        environ = dict(os.environ)
        environ.pop(VARIABLE, None)  # or it would start one of its own
        if start_method == "zygote":  # OpenBLAS would start threads when numpy is imported, and they survive no fork
            environ["OPENBLAS_NUM_THREADS"] = "1"
        with theirs:
            self._process = Popen(
                [*interpreter_command(), "-c", start],
                pass_fds=[theirs.fileno()],
                env=environ,
                stdin=DEVNULL,
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

    def preload(self, modules: list[str]) -> None:
        """Import modules in the zygote, before its next fork. ConnectionError when the zygote is gone."""
        wire.send(self._control, {"preload": modules, "path": _search_path()})

    def close(self) -> None:
        """End the zygote and with it every worker. Idempotent."""
        self._control.close()  # which it takes for our end
        try:
            self._process.wait(5)
        except (TimeoutExpired, KeyboardInterrupt):  # at the exit, after Ctrl-C twice, say
            self._process.kill()
            self._process.wait()


def _search_path() -> list[str]:
    """The same modules as here, however they are found. Whatever else is in sys.path, Python ignores it."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def warm(start_method: str = "zygote", *, preload: Iterable[str] = ()) -> None:
    """Start the process that workers are forked from, without waiting for it, so that the first `spawn` finds it warm.

    It imports torch on a core of its own while the caller continues, with its own imports, say. Further calls start
    nothing, and may name further modules.

    Args:
        start_method: "zygote" or "spawn", as in `spawn`.
        preload: modules that are imported there once, and not by each worker, `["transformers"]` for one. They must
            survive a fork: a module whose import starts threads is reported on stderr, as is one whose import fails.
            What a worker finds imported is what the file held at that time, whatever has been edited since.

    Raises:
        ValueError: modules with `start_method="spawn"`, whose workers share no imports.
        ModuleNotFoundError: there is no such module.
    """
    modules = _check_preload(start_method, preload)
    with _lock:
        client = _running_client(start_method)
        new = [name for name in modules if name not in _preloaded]
        if new:
            _preloaded.extend(new)
            with contextlib.suppress(ConnectionError):  # the zygote that replaces it imports them at its start
                client.preload(new)


def _check_preload(start_method: str, preload: Iterable[str]) -> list[str]:
    if isinstance(preload, str):
        raise TypeError(f"preload={preload!r} is one name, where a list of module names is expected: [{preload!r}]")
    modules = list(preload)
    if modules and start_method != "zygote":
        raise ValueError(
            f"preload={modules} has no effect with start_method={start_method!r}: each of its workers is a fresh "
            f'interpreter, which imports everything itself; use start_method="zygote"'
        )
    for name in modules:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ModuleNotFoundError(f"preload: there is no module named {name!r}", name=name)
    return modules


def open_group(directory: Path, start_method: str) -> socket.socket:
    """A socket to the zygote for a new group; a zygote that has died is replaced.

    Raises:
        UnisonoError: the zygote cannot be started; it has printed why to stderr.
    """
    with _lock:
        for _ in range(2):
            client = _running_client(start_method)
            with contextlib.suppress(ConnectionError):
                return client.open_group(directory)
            client.close()
    raise UnisonoError("the process that workers are forked from ends at its start; what it printed stands above")


def _running_client(start_method: str) -> ZygoteClient:
    """The client for that start method: a new one where there is none, or where its zygote has died."""
    client = _clients.get(start_method)
    if client is not None and not client.is_alive():
        client.close()
        client = None
    if client is None:
        client = _clients[start_method] = ZygoteClient(start_method)
        if start_method == "zygote" and _preloaded:
            with contextlib.suppress(ConnectionError):  # it could not start, as whoever asks it for workers finds out
                client.preload(_preloaded)
    return client


@atexit.register
def _close() -> None:
    """At the interpreter's exit, which has waited for the threads that are no daemons; only daemon groups live now."""
    while _clients:
        _clients.popitem()[1].close()


def zygote_pid(start_method: str = "zygote") -> int | None:
    """The pid of the running zygote for that start method, if there is one."""
    client = _clients.get(start_method)
    return client.pid if client is not None and client.is_alive() else None


def _forget_in_child() -> None:
    """A fork of the caller must not hold the sockets open: their end is what shows the zygote that the caller died."""
    _clients.clear()
    for sock in list(_sockets):
        sock.close()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget_in_child)
