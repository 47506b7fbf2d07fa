"""The process of `unisono warm`: it has imported modules and run nothing, and forks a stand-in for each command.

It stays until it is asked to end, has been idle for a while, or a file that it has imported has changed. Then it takes
no more commands, and waits for those still running, since it alone learns how they end.

*Threads:* one, as it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from unisono.devices import CPU, get_backend
from unisono.launch.starting import wire
from unisono.launch.starting.process_ends import name_process, native_threads
from unisono.launch.starting.warm_start import check_directory, difference, peer_uid, socket_path
from unisono.launch.starting.zygote import import_for_optimizers

# What the command, its zygote and its workers import.
_OWN = ("unisono.launch.worker", "unisono.launch.spawn", "unisono.cli.run", "unisono.report.run")


Command = tuple[dict[str, Any], list[int]]
"""What a fork becomes: the request of the command that it stands in for, and its descriptors."""

RunCommand = Callable[[list[str], int], int]
ScriptDirectory = Callable[[list[str], str], str | None]


class WarmProcess:
    """Listens on its socket, forks stand-ins and reports to their commands how they ended."""

    def __init__(
        self, began_as: dict[str, Any], idle_s: float, preloaded: set[str], script_directory: ScriptDirectory
    ) -> None:
        self.began_as, self.idle_s = began_as, idle_s
        self._preloaded, self._script_directory = preloaded, script_directory
        self.files = _imported_files()
        self.running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid, and the connection to its command
        self.selector = selectors.DefaultSelector()
        path = socket_path()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        check_directory(path.parent)
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen()
        self.is_open = True
        self.selector.register(self.listener, selectors.EVENT_READ)

    def serve(self) -> Command:
        """Serve commands until there is a reason to end, and exit. Returns in a fork only: what the fork becomes."""
        idle_since = time.monotonic()
        while self.is_open or self.running:
            left = None if self.running else max(0.0, idle_since + self.idle_s - time.monotonic())
            ready = self.selector.select(left)
            if not ready and left is not None:
                self._close_door()
            for key, _ in ready:
                if key.fileobj is self.listener:
                    if (command := self._accept_connection()) is not None:
                        return command
                else:
                    self._reap_stand_in(key.fd)
                idle_since = time.monotonic()
        os._exit(0)

    def _accept_connection(self) -> Command | None:
        """Answer one connection."""
        sock, _ = self.listener.accept()
        fds: list[int] = []
        with contextlib.suppress(OSError, EOFError):
            sock.settimeout(5.0)
            if peer_uid(sock) != os.getuid():
                return None
            request, fds = wire.receive(sock)
            if request["op"] == "stop":
                self._close_door()
                wire.send(sock, {"pid": os.getpid(), "running": len(self.running)})
            elif changed := next((path for path, stamp in self.files.items() if _stamp_of(path) != stamp), None):
                self._close_door()
                wire.send(sock, {"cold": f"{changed} has changed since; it has ended, and can be started again"})
            elif name := difference(self.began_as, request["circumstances"]):
                wire.send(sock, {"cold": f"{name} is not what it was there"})
            elif own := self._find_own(request):
                wire.send(sock, {"cold": f"{own} is not the {Path(own).stem} that was imported there"})
            elif self._fork(sock):
                return request, fds
        for fd in fds:
            os.close(fd)
        return None

    def _find_own(self, request: dict[str, Any]) -> str:
        """A file next to the script that it would import in place of a module already imported here; "" if there is
        none."""
        place = self._script_directory(request["arguments"], request["directory"])
        with contextlib.suppress(OSError):
            for each in os.scandir(place or ""):
                name = each.name.removesuffix(".py")
                if each.is_dir() and not os.path.exists(os.path.join(each.path, "__init__.py")):
                    continue  # as of data: a package of that name comes before it
                module = sys.modules.get(name) if name in self._preloaded else None
                if module is not None and not (getattr(module, "__file__", None) or "").startswith(each.path):
                    return each.path
        return ""

    def _fork(self, sock: socket.socket) -> bool:
        """Fork, and return whether this is the child."""
        try:
            pid = os.fork()
        except OSError as error:
            wire.send(sock, {"cold": str(error)})
            return False
        if pid == 0:
            # Closed without unregistering anything: the epoll object is shared with the parent.
            self.selector.close()
            self.listener.close()
            sock.close()
            for pidfd, (_, other) in self.running.items():
                os.close(pidfd)
                other.close()
            return True
        pidfd = os.pidfd_open(pid)  # of a child that has not been waited for
        self.running[pidfd] = pid, sock
        self.selector.register(pidfd, selectors.EVENT_READ)
        wire.send(sock, {"cold": ""}, (pidfd,))
        return False

    def _reap_stand_in(self, pidfd: int) -> None:
        pid, sock = self.running.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            wire.send(sock, {"status": status})
        sock.close()
        self.selector.unregister(pidfd)
        os.close(pidfd)

    def _close_door(self) -> None:
        if self.is_open:
            self.is_open = False
            self.selector.unregister(self.listener)
            socket_path().unlink(missing_ok=True)
            self.listener.close()


def _run(command: Command, run_command: RunCommand) -> NoReturn:
    """In a fork: take over what belongs to the command, and run it."""
    code: object = 1
    request, fds = command
    try:
        _take_over(request, fds)
        code = run_command(request["arguments"], fds[-1])
        threading._shutdown()  # type: ignore[attr-defined] # joins threads that a script has left, as any exit does
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    _exit(code)


def _take_over(request: dict[str, Any], fds: list[int]) -> None:
    """Make this process begin as the command did."""
    os.setsid()
    *streams, life = fds
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    # The system kills this process when the other end of that pipe closes: when the command ends, however it does.
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(life, 1)  # has it closed before?
        os._exit(1)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    name_process("unisono")
    sys.argv[:] = ["unisono", *request["arguments"]]
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdin = open(0, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", 1 if os.isatty(1) else -1, encoding, errors, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = signum in (*request["ignored"], signal.SIGPIPE, signal.SIGXFSZ)
        signal.signal(signum, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    # No two commands draw the same numbers; `random` sees to that by itself.
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _exit(code: object) -> NoReturn:
    """End as an interpreter does, without taking down what this process has never used."""
    with contextlib.suppress(BaseException):
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _imported_files() -> dict[str, tuple[int, int]]:
    paths = {
        path for module in list(sys.modules.values()) if isinstance(path := getattr(module, "__file__", None), str)
    }
    return {path: stamp for path in paths if (stamp := _stamp_of(path)) is not None}


def _stamp_of(path: str) -> tuple[int, int] | None:
    """What shows a change of a file: its time in nanoseconds, and its bytes; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def main(control_fd: int, run_command: RunCommand, script_directory: ScriptDirectory) -> NoReturn:
    """Read what is wanted from a socket, import, answer when that is done, and serve. A fork ends as `run_command`
    does, which gets a command line and a descriptor that its own forks close. `script_directory` says where the script
    of a command line called in a directory is."""
    name_process("unisono-warm")
    control = socket.socket(fileno=control_fd)
    wanted, _ = wire.receive(control)
    gc.disable()  # no import leaves cycles that are worth a collection
    known: set[str] = set()
    for name in (*_OWN, *wanted["modules"]):
        if name not in _OWN and not known:
            known = {*sys.modules}  # what each fresh command imports, too
        before = native_threads()
        importlib.import_module(name)
        if started := native_threads() - before:
            names = ", ".join(sorted({each.partition(" ")[2] for each in started}))
            sys.exit(f"unisono warm: the import of {name} starts threads ({names}), which forks lack; leave it out")
    import_for_optimizers()
    get_backend(CPU).preload()
    preloaded = {*sys.modules} - known if known else set()
    process = WarmProcess(wanted["circumstances"], wanted["idle_s"], preloaded, script_directory)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # otherwise each command would undo these imports at its end
    gc.freeze()  # collections never write to these objects, so their pages stay shared
    gc.enable()
    wire.send(control, {"ready": True})
    control.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    os.chdir("/")  # so that no file system stays in use
    _run(process.serve(), run_command)
