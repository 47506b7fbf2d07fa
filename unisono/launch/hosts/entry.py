"""The command that torch's agent starts for each rank: a small process that watches over the worker which it forks.

What the agent lacks is here. Its workers do not die with it, and what a killed worker leaves behind (loader workers,
subprocesses) lives on; it takes an exit with code 0 for success, whether or not the script came to its end.

1. The guard is the subreaper of all that the worker starts. When the worker has ended, it kills what is left, and ends
   as the worker did: the agent sees one process.
2. The guard is told when the agent dies, and kills everything; the kernel kills the worker when the guard dies.
3. What the agent asks the worker, by a signal, it asks this process too, which kills the worker when the grace is over:
   the agent's own SIGKILL would come to the guard as well, and strays would live on.
4. A worker that ends with code 0 without having said that it is done has failed.

The guard has one thread and imports no torch: it is there in 50 ms and takes 10 MB.

    python -m unisono.launch.hosts.entry TARGET [ARGUMENTS]        what else there is to tell stands in `SETTINGS`
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import NoReturn

from unisono.errors import describe_exit
from unisono.launch.hosts.failure_file import Failure, write_failure
from unisono.launch.starting.reaping import become_reaper, bury_children, die_with_parent

SETTINGS = "UNISONO_AGENT"  # the variable with what the agent tells its workers

_AGENT_DIED = signal.SIGUSR2
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # what the agent passes on to its workers


@dataclass(frozen=True)
class Settings:
    """What an agent tells its workers, beside what to run.

    Attributes:
        agent: its pid.
        directory: what is to be removed when the agent is killed; empty for nothing.
        timeout_s: of the process group, a last resort.
        grace_s: what a worker has after it was asked to end.
        backend: the device family; None picks one.
        is_checked: whether collectives are compared before they run.
        is_module: whether the target is a module to run.
        cores: the logical cores of each worker, by local rank; None leaves them where the system puts them.
    """

    agent: int
    directory: str
    timeout_s: float
    grace_s: float
    backend: str | None
    is_checked: bool
    is_module: bool
    cores: list[list[int]] | None

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_environ() -> Settings:
        return Settings(**json.loads(os.environ[SETTINGS]))


def main() -> NoReturn:
    """Fork the worker, watch it to its end, and end like it."""
    settings = Settings.from_environ()
    asked: list[int] = []  # the signals that the agent has sent

    def note(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        signal.setitimer(signal.ITIMER_REAL, settings.grace_s)

    _die_with(settings)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(worker, signal.SIGKILL))  # it has not been waited for
    for signum in _ASKING:
        signal.signal(signum, note)
    done_r, done_w = os.pipe()
    worker = _fork_worker(settings, done_w)
    os.close(done_w)
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # as long as it is unburied, nobody else has its pid
    signal.setitimer(signal.ITIMER_REAL, 0)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    bury_children()  # now nobody holds the other end of the pipe
    is_done = os.read(done_r, 1) != b""
    if status != 0 or not is_done:
        _tell_failure(worker, status, is_secondary=bool(asked))
    _end_like(status or int(not is_done))


def _fork_worker(settings: Settings, done: int) -> int:
    with _blocked(_ASKING):  # a signal to the child must neither run this process's handler in it, nor be lost
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
            if os.getppid() != guard:  # it died before the signal was asked for
                os._exit(1)
            for signum in (*_ASKING, _AGENT_DIED, signal.SIGALRM):
                signal.signal(signum, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if pid == 0:
        _be_worker(settings, done)
    return pid


def _be_worker(settings: Settings, done: int) -> NoReturn:
    try:
        from unisono.launch.hosts.member import run_member  # imports torch, which the guard does without

        run_member(sys.argv[1], sys.argv[2:], settings, done)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever happens, the worker never goes on as a second guard


def _die_with(settings: Settings) -> None:
    """From now on the end of the agent is the end of everything here."""

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getppid() != settings.agent:  # and not a signal that somebody has sent
            bury_children()
            if settings.directory:
                shutil.rmtree(settings.directory, ignore_errors=True)
            os._exit(1)

    become_reaper()
    signal.signal(_AGENT_DIED, end)
    die_with_parent(_AGENT_DIED)
    end(_AGENT_DIED, None)  # it may have died before the signal was asked for


def _tell_failure(worker: int, status: int, is_secondary: bool) -> None:
    """Say what became of a worker that could not say it itself."""
    environ = os.environ
    how = describe_exit(status) if status else "exited with code 0 before the end of the script"
    path = environ.get("TORCHELASTIC_ERROR_FILE", "")
    if status == -signal.SIGABRT:
        how += "; torch's collectives do that where ranks call different ones, see its stack; --checked compares ours"
    if not is_secondary and not os.path.exists(path):
        print(f"unisono: rank {environ['RANK']} (pid {worker}) {how}", file=sys.stderr, flush=True)
    write_failure(Failure.of(environ, worker, how, exit_code=status or 1, is_secondary=is_secondary))


def _end_like(status: int) -> NoReturn:
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 1)


@contextlib.contextmanager
def _blocked(signums: tuple[signal.Signals, ...]) -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signums)


if __name__ == "__main__":
    main()
