"""Faults at a known moment, and who survives them.

No test waits by sleeping. A process says where it is on a `Line`, and the test acts when it has heard it; a process
that must stand still stands at a `Gate`. A `Script` is a caller of its own, whose processes all carry a mark in their
environment, so that the survivors of its end are found wherever they have gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn
from uuid import uuid4

import psutil
import warm_scripts

from unisono.comm.outcome import Outcome
from unisono.launch.starting import zygote_client

# No test measures how fast a machine is: bench/ does. These bounds separate what happens by itself from what never
# happens, or only by a fallback.
PROMISE_S = 20.0  # what a run leaves is gone by then, plus the grace where it applies
SOON_S = 30.0  # before the fallbacks that the tests set, which are a minute away and more
PATIENCE_S = 100.0  # for what must come: a hang, and not a slow machine, fails the test


RICH = """
import os, resource, signal, sys, threading, time
from pathlib import Path
import psutil, torch, torch.distributed as dist
from faults import Gate, Line, grandchild, stand_still
from unisono.launch.spawn import spawn
from unisono.world import current_world

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
line = Line(Path("line").absolute())

def work(index):
    loader = torch.utils.data.DataLoader(range(4), num_workers=2, persistent_workers=True)
    next(iter(loader))
    loaders = [child.pid for child in psutil.Process().children()]
    grandchild()
    line.say("rank", index, os.getpid(), os.getppid(), *loaders)
    if index == 0:
        dist.all_reduce(torch.ones(1))
    stand_still()
"""
"""The beginning of a script. Its workers have loader workers that wait for work, and a grandchild each in a session of
its own; rank 0 stands inside a collective, rank 1 in Python."""
NUM_PROCESSES = 2 + 2 + 4 + 2  # caller and zygote, workers, loader workers, grandchildren


def until(condition: Callable[[], object]) -> None:
    """Wait for what no one announces; the test's own time limit ends it."""
    while not condition():
        threading.Event().wait(0.001)


@dataclass(frozen=True)
class Line:
    """Where many processes speak and the test hears: a named pipe that carries whole lines. It pickles as its path."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Line:
        os.mkfifo(path)
        return cls(path)

    def say(self, *words: object) -> None:
        """Write one line. The pipe must be open for hearing, as it is inside `hearing`."""
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            _write(descriptor, (" ".join(map(str, words)) + "\n").encode())
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def hearing(self) -> Iterator[Ear]:
        """Open the pipe; what is said is kept until it is heard."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # for writing too: it never comes to an end
        try:
            yield Ear(descriptor)
        finally:
            os.close(descriptor)


class Ear:
    """The hearing end of a `Line`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def hear(self, timeout_s: float = PATIENCE_S) -> list[str]:
        """The words of the next line."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"nothing was said for {timeout_s} s")
            self._unread += os.read(self._descriptor, 65536)
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode().split()

    def hear_all(self, count: int) -> list[list[str]]:
        """The words of the next `count` lines, sorted."""
        return sorted(self.hear() for _ in range(count))


@dataclass(frozen=True)
class Gate:
    """A door at which processes stand until the test lets them pass. It pickles as its path."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Gate:
        os.mkfifo(path)
        return cls(path)

    def wait(self) -> None:
        """Stand still until there is leave for one more to pass."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.read(descriptor, 1)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def kept(self) -> Iterator[Callable[[int], None]]:
        """Keep the gate: the block gets a function that lets a number of processes pass, whether they are there yet."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            yield lambda count: _write(descriptor, b"." * count)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Door:
    """Between two processes or threads: `wait` and `open` return when the other side has called the other one."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> Door:
        os.mkfifo(path)
        return cls(path)

    def wait(self) -> None:
        os.close(os.open(self.path, os.O_RDONLY))  # opening a named pipe waits for the other end

    def open(self) -> None:
        os.close(os.open(self.path, os.O_WRONLY))


def _write(descriptor: int, data: bytes) -> None:
    assert os.write(descriptor, data) == len(data)


class Rank(threading.Thread):
    """A rank whose part is a function; its outcome is there when it has ended."""

    def __init__(self, part: Callable[[], Any]) -> None:
        super().__init__(name="rank", daemon=True)
        self.part = part
        self.outcome: Outcome[Any] | None = None
        self.start()

    def run(self) -> None:
        self.outcome = Outcome.capture(self.part)

    def ended(self) -> Outcome[Any]:
        self.join(SOON_S)
        assert self.outcome is not None, "the rank still waits"
        return self.outcome

    def result(self) -> Any:
        return self.ended().unwrap()


def stand_still() -> NoReturn:
    """Wait in Python for ever, where signals arrive: one that comes just before a wait is seen after it."""
    while True:
        threading.Event().wait(1)


def grandchild() -> int:
    """Start a process that has left this one's session, as a daemon would; its pid."""
    process = psutil.Popen(["sleep", "1000"], start_new_session=True)
    while not process.environ():  # for the moment between its exec and the kernel's last line of it
        pass
    return process.pid


def in_child(work: Callable[[], object]) -> int:
    """Do the work in a forked process: how that ended, as `subprocess` has it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def zygote_pid(start_method: str = "zygote") -> int | None:
    """The pid of the running zygote for that start method; None if there is none."""
    client = zygote_client.clients.get(start_method)
    return client.process.pid if client is not None and client.is_alive() else None


def survivors(pids: list[int], within_s: float = PROMISE_S) -> list[str]:
    """Those of the processes that still live when the time is over, in words."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return _what_stays(lambda: [process for process in processes if _is_alive(process)], within_s)


def _what_stays(find: Callable[[], list[psutil.Process]], within_s: float) -> list[str]:
    deadline = time.monotonic() + within_s
    while (found := find()) and time.monotonic() < deadline:
        while _is_alive(found[-1]) and time.monotonic() < deadline:  # to look at all processes takes as much as they do
            time.sleep(0.01)  # not psutil.wait_procs: it would reap the test's own children
    return [str(process) for process in found]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _start(way: str, file: Path, directory: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    arguments = {"file": [str(file)], "command": ["-c", file.read_text()], "stdin": ["-"]}[way]
    with file.open() as text:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=directory,
            stdin=text if way == "stdin" else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            env=environ,
        )


class Script:
    """A caller in a process of its own, the leader of a process group, as a shell would start it.

    Args:
        source: what it runs, as a file, or with `-c`, or from its standard input.
        directory: where it runs.
        way: "warm" forks it from an interpreter that has imported torch; a fresh one runs it as "file", "command" or
            "stdin".
        zygotes: how many it starts one after another, forked likewise.
        network: the network namespace that a warm one is in, by name.
    """

    def __init__(
        self, source: str, directory: Path, way: str = "warm", zygotes: int = 1, network: str = "", **environ: str
    ) -> None:
        self.mark = uuid4().hex
        self._began = time.time()
        self.directory = directory
        # Of its own, and short: the paths of sockets in it, as torch's loader workers make them, have a limit.
        self._temporary = Path(tempfile.mkdtemp(prefix="run-", dir=os.environ["TMPDIR"]))
        file = directory / "script.py"
        file.write_text(source)
        own = {warm_scripts.MARK: self.mark, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(self._temporary)}
        environ = {**os.environ, **own, **environ}
        if way == "warm":
            self.process: warm_scripts.Forked | subprocess.Popen[str] = warm_scripts.run(
                file, directory=directory, environ=environ, zygotes=zygotes, network=network
            )
        else:
            self.process = _start(way, file, directory, environ)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.living():
            with contextlib.suppress(psutil.Error):
                process.kill()
        output, errors = self.process.communicate()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if error is not None:
            error.add_note(f"the script's output:\n{output}\n{errors}")

    def end(self, timeout_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """Wait for the caller itself: its exit code, output and errors."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.wait(), output, errors

    def kill(self, signum: signal.Signals) -> None:
        """Send a signal to the caller alone."""
        self.process.send_signal(signum)

    def kill_group(self, signum: signal.Signals) -> None:
        """Send a signal to the caller's process group, as a terminal does."""
        os.killpg(self.process.pid, signum)

    def living(self) -> list[psutil.Process]:
        """Every process of the run, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._environ(process).get(warm_scripts.MARK) == self.mark and _is_alive(process):
                    found.append(process)
        return found

    def _environ(self, process: psutil.Process) -> dict[str, str]:
        """Of a process in the middle of an exec, it is empty for a moment; of the kernel's own, always."""
        patience = time.monotonic() + 1.0
        while not (environ := process.environ()) and process.create_time() > self._began - 1.0 and process.exe():
            if time.monotonic() > patience:
                break
            os.sched_yield()
        return environ

    def survivors(self, within_s: float = PROMISE_S) -> list[str]:
        """What still lives when the time is over, in words."""
        return _what_stays(self.living, within_s)

    def leftovers(self) -> list[str]:
        """Rendezvous directories that were left behind."""
        return sorted(path.name for path in self._temporary.glob("**/unisono-*"))


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """The files that this process opens during the block have numbers that `select.select` refuses."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with contextlib.ExitStack() as kept:
        while kept.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing more is an OSError, as on a full disk."""
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would leave the half of a module's file, which nobody can import then
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = before
