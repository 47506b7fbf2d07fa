"""The caller's side of the zygote: one per calling process and start method, shared by every group of workers.

*Threads:* any thread may open a group. A lock covers the start of the zygote and of a group, and forks of this process:
a forked child inherits no socket that is not registered in `_sockets`. A group's socket belongs to its supervisor.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

import psutil

from unisono.errors import UnisonoError
from unisono.launch.starting import wire
from unisono.launch.starting.process_ends import interpreter_command, search_path

_lock = threading.Lock()
clients: dict[str, ZygoteClient] = {}  # by start method
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_preloaded: list[str] = []  # the modules that the user wants every zygote to import
_STILL_RUNS = (TimeoutExpired, psutil.TimeoutExpired)


class ZygoteClient:
    """A running zygote: its process, and our end of its control socket."""

    def __init__(self, process: Popen[bytes] | psutil.Process, control: socket.socket) -> None:
        self.process, self._control = process, control
        self._end_s = 5.0  # it may be importing what nobody will use
        _sockets.add(control)

    @classmethod
    def start(cls, start_method: str) -> ZygoteClient:
        """Start a zygote for a start method of `spawn`, in a fresh interpreter."""
        ours, theirs = wire.socket_pair()
        arguments = theirs.fileno(), os.getpid(), start_method
        command = interpreter_command(f"from unisono.launch.starting.zygote import main; main(*{arguments!r})")
        environ = dict(os.environ)
        if start_method == "zygote":  # OpenBLAS would start threads when NumPy is imported, which do not survive a fork
            environ["OPENBLAS_NUM_THREADS"] = "1"
        # Our copy of its end is closed at once: it would hide the zygote's death from us.
        with theirs:
            # Under `_lock`, which our at-fork hook acquires: Popen runs such hooks only if it has a preexec_fn.
            process = Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environ,
                stdin=DEVNULL,
                start_new_session=True,  # so that a Ctrl-C in the terminal reaches only the caller, which handles it
            )
        return cls(process, ours)

    def is_alive(self) -> bool:
        """Whether it can still serve requests."""
        try:
            self.process.wait(0)
        except _STILL_RUNS:
            return True
        return False

    def open_group(self, directory: Path) -> socket.socket:
        """Open a new group and return its socket; `directory` is removed when the socket closes. ConnectionError if the
        zygote has exited."""
        ours, theirs = wire.socket_pair()
        # As above: `ours` must see the end of the stream when the zygote closes its end, or dies.
        with theirs:
            wire.send(self._control, {"directory": str(directory)}, (theirs.fileno(),))
        _sockets.add(ours)
        self._end_s = 60.0  # it may have workers to end, which must not be left half done, however slow it is
        return ours

    def preload(self, modules: list[str]) -> None:
        """Import modules in the zygote, before its next fork. ConnectionError if the zygote has exited."""
        wire.send(self._control, {"preload": modules, "path": search_path()})

    def close(self) -> None:
        """End the zygote and, with it, every worker. Idempotent."""
        self._control.close()  # the zygote takes the end of the stream as the caller's exit
        try:
            self.process.wait(self._end_s)
        except (*_STILL_RUNS, KeyboardInterrupt):  # the last one at interpreter exit, for example after a second Ctrl-C
            self.process.kill()
            self.process.wait()


def warm(start_method: str = "zygote", *, preload: Iterable[str] = ()) -> None:
    """Start the process that forks workers, without waiting for it, so that the first `spawn` finds it ready.

    It imports torch on another core while the caller continues, for example with its own imports. Further calls do not
    start another process, and may add modules.

    Args:
        start_method: "zygote" or "spawn", as in `spawn`.
        preload: modules to import once in that process rather than in each worker, such as `["transformers"]`. They
            must be fork-safe: a module whose import starts threads is reported on stderr, as is one whose import fails.
            Workers see these modules as the files were at that time, even if they have been edited since.

    Raises:
        TypeError: `preload` is a string.
        ValueError: modules were given with `start_method="spawn"`, whose workers share no imports.
    """
    if isinstance(preload, str):
        raise TypeError(f"preload={preload!r} is one name, where a list of module names is expected: [{preload!r}]")
    modules = list(preload)
    if modules and start_method != "zygote":
        raise ValueError(
            f"preload={modules} has no effect with start_method={start_method!r}: each of its workers is a fresh "
            'interpreter, which imports everything itself; use start_method="zygote"'
        )
    with _lock:
        _running_client(start_method)
        _preload(modules)


def preload(modules: Iterable[str]) -> None:
    """Let every zygote of this process import these modules before its first fork, as `warm` does. Starts none."""
    with _lock:
        _preload(modules)


def _preload(modules: Iterable[str]) -> None:
    new = [name for name in modules if name not in _preloaded]
    _preloaded.extend(new)
    client = clients.get("zygote")
    if new and client is not None:
        with contextlib.suppress(ConnectionError):  # its replacement imports them at its start
            client.preload(new)


def fork_zygote(inherited: int) -> None:
    """Start the zygote as a fork of this process, which has one thread and has run nothing; `inherited` is a descriptor
    that the zygote closes."""
    ours, theirs = wire.socket_pair()
    caller = os.getpid()
    if child := os.fork():
        theirs.close()
        clients["zygote"] = ZygoteClient(psutil.Process(child), ours)
        return
    try:
        ours.close()
        os.close(inherited)
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        from unisono.launch.starting.zygote import main

        main(theirs.detach(), caller, "zygote")
    finally:
        os._exit(1)


def open_group(directory: Path, start_method: str) -> socket.socket:
    """Open a new group and return its socket. A zygote that has died is replaced. UnisonoError: it cannot be started,
    and has printed the reason to stderr."""
    with _lock:
        # A zygote may die between the check and the request; if a fresh one does, another would, too.
        for _ in range(2):
            client = _running_client(start_method)
            with contextlib.suppress(ConnectionError):
                return client.open_group(directory)
            client.close()
    raise UnisonoError("the process that workers are forked from ended during its start; its output is above")


def _running_client(start_method: str) -> ZygoteClient:
    """Return the client for that start method; a new one if there is none, or if its zygote has died."""
    client = clients.get(start_method)
    if client is not None and not client.is_alive():
        client.close()
        client = None
    if client is None:
        client = clients[start_method] = ZygoteClient.start(start_method)
        if start_method == "zygote" and _preloaded:
            with contextlib.suppress(ConnectionError):  # it could not start; the request for workers will report that
                client.preload(_preloaded)
    return client


@atexit.register
def close_all() -> None:
    """Runs at interpreter exit, after the non-daemon threads have been joined: only daemon groups are still running."""
    while clients:
        clients.popitem()[1].close()


def _forget_in_child() -> None:
    """Close the sockets in a fork of the caller: the zygote notices the caller's death by their end of stream."""
    for sock in list(_sockets):
        sock.close()
    # Dropped, not closed: `close` would wait for a process that is the parent's child.
    for client in clients.values():
        if not isinstance(client.process, psutil.Process):
            client.process.returncode = 0  # or it would warn that this process has not waited for it
    clients.clear()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget_in_child)
