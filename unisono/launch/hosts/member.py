"""The worker behind the guard of `entry`: joins the world of the agents, runs the target, tells how it ended.

1. It joins the world, and runs the target as a rank of it. SIGTERM, once the target heeds it, is a wish to stop; but
   not when a worker of this machine has failed: then it is the end.
2. A failure is told first, on stderr and in the file that the agent reads; then the world is broken with that reason,
   so that the peers, on whatever machine, can name it.
3. A good end is told to the guard, when the rank has left the world and what the target has left to be done is done.
   One that came early, because it was asked for, is a good end too, or the agent would start all anew; it is marked.
4. It ends by `os._exit`, like a worker of `spawn`.

Nothing escapes sideways: an exception is told, a sudden death is seen by the guard.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from unisono import preemption
from unisono.comm.fitting import explained
from unisono.errors import UnisonoError
from unisono.launch.hosts.entry import Settings
from unisono.launch.hosts.failure_file import Failure, leave_mark, write_failure
from unisono.launch.hosts.joining import depart, join_world
from unisono.launch.script_group import let_scripts_initialise
from unisono.launch.target import Target, exit_code_of, run_target
from unisono.launch.worker import mark_records, tells_of_a_peer
from unisono.outcome import Outcome
from unisono.world import World

_LEADING = (__file__, run_target.__code__.co_filename, "<frozen runpy>")
_LEAVE_S = 15  # how long a worker that has told its end may take to leave the world


def run_member(target: str, argv: Sequence[str], settings: Settings, done: int) -> NoReturn:
    """Be the worker that the agent's variables describe; a byte on `done` says that it came to a good end."""
    _prepare(settings)
    world: World | None = None
    error: BaseException | None = None
    try:
        world = join_world(timedelta(seconds=settings.timeout_s), settings.backend, checked=settings.is_checked)
        let_scripts_initialise()
        run_target(world.rank, Target(target, tuple(argv), settings.is_module))
        threading._shutdown()  # type: ignore[attr-defined] # joins threads that are no daemons, as any end does
    except BaseException as failure:
        error = failure
        if world is not None:
            error = explained(failure, world.comm)
        code = _exit_code(error)
        _tell(error, code)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LEAVE_S)  # kills, so that a transport which waits for a peer keeps neither this process nor the peer
    _flush()
    if world is not None:
        depart(world, error)
    if error is not None:
        os._exit(code)
    atexit._run_exitfuncs()  # what the target has registered, and what waits to be flushed
    _flush()
    if preemption.is_agreed():
        leave_mark("stopped")
    os.write(done, b".")
    os._exit(0)


def _prepare(settings: Settings) -> None:
    rank = int(os.environ["RANK"])
    if settings.cores is not None:
        os.sched_setaffinity(0, settings.cores[int(os.environ["LOCAL_RANK"])])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # lines appear as they are written, also in a file
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    preemption.shield_loader_workers()
    preemption.end_when(_has_failed_sibling)
    preemption.on_heed(lambda: leave_mark("heeds"))
    mark_records(rank)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return exit_code_of(error)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _tell(error: BaseException, code: int) -> None:
    """Print it as the interpreter would, and leave it for the agent."""
    is_secondary = Outcome[None].failure(error).is_secondary or tells_of_a_peer(error)
    text = "".join(traceback.format_exception(type(error), error, _from_target(error.__traceback__)))
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r})"
        text = "" if isinstance(error.code, int) else f"{error.code}\n"
    elif isinstance(error, KeyboardInterrupt):
        is_secondary, text = True, ""
    elif is_secondary and isinstance(error, UnisonoError):
        text = f"unisono: {message}\n"  # the traceback that matters is another rank's
    _flush()
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
    _leave_word(message, text, code, is_secondary)


def _leave_word(message: str, text: str, code: int, is_secondary: bool) -> None:
    told = {"traceback": text, "exit_code": code, "is_secondary": is_secondary}
    write_failure(Failure.of(os.environ, os.getpid(), message, **told))


def _has_failed_sibling() -> bool:
    """Whether another worker of this machine has failed: the agent sends SIGTERM to the rest then."""
    own = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    return any(path != own for path in own.parent.parent.glob(f"*/{own.name}"))


def _from_target(frames: TracebackType | None) -> TracebackType | None:
    """The frames from the target on, without those that led to it; all of them where the target was not reached."""
    found = frames
    while found is not None and found.tb_frame.f_code.co_filename in _LEADING:
        found = found.tb_next
    return found or frames


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
