"""Scripts that start at once: forked from an interpreter that has imported torch.

A script of its own, with its own process group, environment and standard streams, costs a second and more of imports
otherwise, and its zygote as much again: that is forked beside the script, and sleeps until the script starts it. So do
the agents of a script that says it starts some, each of which has such a zygote, too.
Variables that the interpreter reads at its start, `PYTHONHASHSEED` for one, have no effect; what a test claims about
the start of an interpreter takes a fresh one (`faults.Script`).

A script ends as Python ends one: its threads are joined, what it has registered is run, its streams are flushed. But
the objects of all imported modules are not taken apart, which costs two seconds in a fork; what a test claims about
that end of an interpreter asks for it (`takes_apart`).

*Threads:* the interpreter forks from its main thread, in `_serve`, reports how each script ended, and ends when
pytest's process closes the socket. There, a thread for each stream of a script reads it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.engines import piped
from unisono.launch.starting import wire, zygote_client

MARK = "UNISONO_TEST_RUN"  # in the environment of all processes of a script
COMMAND = "import sys\nfrom unisono.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"  # a script that is `unisono`
_BLANK = "0" * 32
_IMPORTED = ["torch._dynamo", "torch.utils.data", "sklearn.datasets", "unisono.launch.worker", "faults"]
_IMPORTED += ["torch.distributed.optim", "unisono.launch.hosts.run_agent"]
if importlib.util.find_spec("torch_xla"):  # what it imports; itself it reads the environment, so that scripts import it
    _IMPORTED += ["torch._inductor.fx_passes.post_grad", "functorch.compile"]

_STARTING = ("spawn", "launch", "unisono.cli")  # one of these words is in every script that starts workers

_environ = dict(os.environ)  # of the interpreter, before any test changes its own
_server: tuple[int, socket.socket] | None = None  # the interpreter's pid, and what it is asked through


class Forked:
    """A running script, as `subprocess.Popen` would have it."""

    def __init__(self, pid: int, stdout: int, stderr: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr, self._status = _Reader(stdout), _Reader(stderr), _Reader(status)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)  # where it has not ended
        self.wait()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = os.waitstatus_to_exitcode(int(self._status.result(timeout)))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until nobody is left who could write."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found = [
            reader.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for reader in (self.stdout, self.stderr)
        ]
        self.wait(timeout)
        return found[0], found[1]

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class _Reader:
    """Reads a descriptor to its end, on a thread, and closes it."""

    def __init__(self, descriptor: int) -> None:
        self.data = b""
        self._thread = threading.Thread(target=self._read, args=(descriptor,), name="script-output", daemon=True)
        self._thread.start()

    def result(self, timeout: float | None) -> str:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("the script", timeout or 0.0, self.data)
        return self.data.decode(errors="replace")

    def _read(self, descriptor: int) -> None:
        while chunk := os.read(descriptor, 1 << 16):
            self.data += chunk
        os.close(descriptor)


def run(
    file: Path,
    *arguments: str,
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
    takes_apart: bool = False,
    zygotes: int = 1,
    agents: int = 0,
    network: str = "",
) -> Forked:
    """Fork a script: the file is its `__main__`, and it leads a process group.

    Args:
        file, arguments: what follows `python` on a command line.
        directory: None for the current one.
        environ: None for this process's.
        takes_apart: at its end, the objects of all modules are taken apart, as in a fresh interpreter.
        zygotes: how many it starts, one after another; further ones are fresh interpreters.
        agents: as many of the engine `Local`, and no zygotes.
        network: the network namespace that it is in, by name.
    """
    asked = {
        "argv": [str(file), *arguments],
        "directory": str(directory or Path.cwd()),
        "environ": {MARK: _BLANK, **(os.environ if environ is None else environ)},
        "takes_apart": takes_apart,
        "zygotes": zygotes,
        "agents": agents,
        "network": network,
    }
    server = _serving()
    pipes = [os.pipe() for _ in range(3)]
    try:
        socket.send_fds(server, [json.dumps(asked).encode()], [writing for _, writing in pipes])
        pid = int(server.recv(64))
    finally:
        for _, writing in pipes:
            os.close(writing)
    return Forked(pid, *(reading for reading, _ in pipes))


def complete(
    file: Path,
    *arguments: str,
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = 100.0,
    **options: Any,
) -> tuple[int, str, str]:
    """Run a script to its end: its exit code, output and errors. The arguments are those of `run`."""
    with run(file, *arguments, directory=directory, environ=environ, **options) as process:
        output, errors = process.communicate(timeout)
        return process.wait(), output, errors


def launch(directory: Path, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """`unisono` with these arguments, in that directory, to its end, as `complete`."""
    (directory / "launch.py").write_text(COMMAND)
    return complete(directory / "launch.py", *arguments, directory=directory, **options)


def server_pid() -> int | None:
    """Of the interpreter that scripts are forked from, if it runs."""
    return _server[0] if _server is not None else None


def _serving() -> socket.socket:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=str(Path(__file__).parent), socket=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # Threads of OpenBLAS, which numpy's import starts, survive no fork.
                env={**_environ, MARK: _BLANK, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        _server = process.pid, ours

        def end() -> None:
            ours.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold a copy
            ours.close()
            process.wait()

        atexit.register(end)
    return _server[1]


# Everything below runs in the interpreter, or in a script.

_START = """
import atexit, sys
atexit.register(lambda: warm_scripts._end())  # before all imports, which register theirs: it runs last
sys.path.insert(0, {path!r})
import warm_scripts
try:
    exec(*warm_scripts._serve({socket}))
except BaseException as error:
    warm_scripts._exit_code = warm_scripts._code_of(error)
    raise
"""

_exit_code: int | None = 0  # None: a signal is to end the process, and Python sends it
_takes_apart = False


def _serve(number: int) -> tuple[types.CodeType, dict[str, Any]]:
    """Fork for each request. It returns in the fork only: with what the script is to run, and where."""
    path = sys.path[1:]  # without that of the tests
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    _undo_imports(False)
    inspect.stack()  # as torch's rendezvous does at each event; the first call looks for the files of all modules
    gc.freeze()  # or each script would go through all that is imported, and copy it
    atexit.register(gc.unfreeze)  # at its end, what is still frozen counts as leaked by triton
    ended_r, ended_w = os.pipe()
    os.set_blocking(ended_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_w, warn_on_full_buffer=False)
    asking = socket.socket(fileno=number)
    statuses: dict[int, int] = {}
    while True:
        waited: list[socket.socket | int] = [asking, ended_r]
        ready, _, _ = select.select(waited, [], [])
        if ended_r in ready:
            os.read(ended_r, 4096)
            _report(statuses)
        if asking not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(asking, 1 << 16, 3)
        if not message:
            os._exit(0)
        ready_r, ready_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.close(ready_r)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (ended_r, ended_w, asking.detach(), *statuses.values()):
                os.close(descriptor)
            return _begin(json.loads(message), path, ready_w, *fds)
        os.close(ready_w)
        os.read(ready_r, 1)  # comes to its end when the script has its process group and its mark
        os.close(ready_r)
        statuses[pid] = fds.pop()
        for descriptor in fds:
            os.close(descriptor)
        asking.send(str(pid).encode())


def _undo_imports(at_exit: bool) -> None:
    """Whether the end of this process takes back what the modules have registered until now, as torch's operators."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = at_exit


def _report(statuses: dict[int, int]) -> None:
    """Write how the scripts have ended that have."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            descriptor = statuses.pop(ended[0])
            os.write(descriptor, str(ended[1]).encode())
            os.close(descriptor)


def _begin(
    asked: dict[str, Any], path: list[str], ready: int, stdout: int, stderr: int, status: int
) -> tuple[types.CodeType, dict[str, Any]]:
    """Become the script, up to its first line."""
    global _takes_apart
    source = Path(asked["argv"][0]).read_text()
    if asked["network"]:
        with open(f"/run/netns/{asked['network']}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0, "CLONE_NEWNET"
    starts = any(word in source for word in _STARTING)
    if not _fork_sleepers(starts * (asked["agents"] or asked["zygotes"]), piped if asked["agents"] else zygote_client):
        for descriptor in (ready, stdout, stderr, status):
            os.close(descriptor)
        return _sleep()
    os.setpgid(0, 0)
    _write_mark(asked["environ"][MARK])
    for descriptor in (ready, status):
        os.close(descriptor)
    _move({1: stdout, 2: stderr})
    _replace_environ(asked["environ"])
    gc.enable()
    _takes_apart = asked["takes_apart"]
    if _takes_apart:
        _undo_imports(True)
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.chdir(asked["directory"])
    file = asked["argv"][0]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(file), *filter(None, added), *path]
    sys.argv[:] = asked["argv"]
    random.seed()
    sys.modules["numpy.random"].seed()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = file
    sys.excepthook = _excepthook
    return compile(source, file, "exec"), main.__dict__


_sleepers: list[tuple[int, socket.socket]] = []  # of this process, which wakes them by the socket; its own, in one


def _fork_sleepers(count: int, starter: types.ModuleType) -> bool:
    """Fork processes that sleep until that module starts some here, zygotes or agents. False in one of them."""
    for _ in range(count):
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            for each in (ours, *(waking for _, waking in _sleepers)):
                each.close()
            _sleepers[:] = [(0, theirs)]
            return False
        theirs.close()
        _sleepers.append((pid, ours))
    script = os.getpid()  # a fork of this process starts fresh interpreters

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        return (_Woken if _sleepers and os.getpid() == script else subprocess.Popen)(*arguments, **options)

    starter.Popen = start  # type: ignore[attr-defined]
    return True


def _sleep() -> tuple[types.CodeType, dict[str, Any]]:
    """Be the process that the script starts for its zygote, or an agent, from when it does; until then, nobody."""
    [(_, waking)] = _sleepers
    _sleepers.clear()
    try:
        asked, fds = wire.receive(waking)
    except EOFError:
        os._exit(0)
    waking.close()
    if "unisono.engines" in asked["source"] and not _fork_sleepers(1, zygote_client):  # an agent, which starts a zygote
        for descriptor in fds:
            os.close(descriptor)
        return _sleep()
    os.setsid()
    _write_mark(asked["environ"].get(MARK, _BLANK))
    _move(dict(zip([0, 1, 2, *asked["fds"]], fds, strict=True)))
    sys.argv[:] = ["-c"]
    _replace_environ(asked["environ"])
    os.chdir(asked["directory"])
    gc.enable()
    return compile(asked["source"], "<string>", "exec"), {"__name__": "__main__"}


class _Woken(subprocess.Popen[bytes]):
    """Wakes a sleeper of this process instead of starting a fresh interpreter."""

    def _execute_child(self, args, _, __, ___, pass_fds, cwd, env, *rest) -> None:  # type: ignore
        environ = dict(os.environ) if env is None else env
        asked = {"source": args[-1], "fds": list(pass_fds), "environ": environ, "directory": cwd or os.getcwd()}
        pipes = rest[3:9]  # for reading and writing: standard input, output and errors
        self.pid, waking = _sleepers.pop()
        wire.send(waking, asked, (pipes[0], 1 if pipes[3] == -1 else pipes[3], 2, *pass_fds))
        waking.close()
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


def _move(descriptors: dict[int, int]) -> None:
    """Give each descriptor the number that is its key, and close it where it was."""
    beyond = max(*descriptors, *descriptors.values()) + 1
    copies = {number: fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, beyond) for number, each in descriptors.items()}
    for descriptor in descriptors.values():
        os.close(descriptor)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


def _replace_environ(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # an import has asked for the interpreter's


def _excepthook(kind: type[BaseException], error: BaseException, at: types.TracebackType | None) -> None:
    at = at and at.tb_next  # without the line that has run the script
    sys.__excepthook__(kind, error.with_traceback(at), at)


def _code_of(error: BaseException) -> int | None:
    """The exit code with which Python ends a script that has raised this."""
    if isinstance(error, KeyboardInterrupt):
        return None
    code = error.code if isinstance(error, SystemExit) else 1
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def _end() -> None:
    if _exit_code is not None and not _takes_apart:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, closed, or nobody reads it any more
                stream.flush()
        os._exit(_exit_code)


def _write_mark(mark: str) -> None:
    """Where the kernel reads a process's environment; what the process changes of it later is not seen there."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    place = ctypes.string_at(begin, end - begin).index(f"{MARK}={_BLANK}".encode()) + len(MARK) + 1
    ctypes.memmove(begin + place, mark.encode(), len(_BLANK))
