"""The worker: what a forked process does from its first line to its last.

1. It takes over the caller's environment, directory, import path and standard streams, and joins the world.
2. It calls `fn(rank, *args)`; meanwhile a thread reports its progress.
3. It sends an `Outcome` through its pipe, whatever happened, and only then leaves the world, so that its own error
   reaches the caller before the peers' errors about the broken world.
4. It ends by `os._exit`, after joining the non-daemon threads that `fn` has left, running its atexit functions and
   closing the files that it has left open. This skips the interpreter's slow shutdown, and destructors that abort.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from bdb import BdbQuit
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn

import torch
import torch.utils.data  # here, so that every fork has it

from unisono.comm import preemption
from unisono.comm.outcome import Outcome, add_note_once, chain_of, text_of, this_process, traceback_of
from unisono.comm.pickling import loads_call
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.reasons import is_of_transport
from unisono.comm.sealing import use_secret
from unisono.comm.selection import innermost, translate_error
from unisono.comm.stacks import TELL_STACKS, fold_frames
from unisono.comm.thread_start import saving_threads
from unisono.devices import get_backend
from unisono.devices.cores import cores_near
from unisono.errors import StoppedError, UnisonoError, UnpicklableError, WorkerDiedError
from unisono.launch.held_memory import own_steps
from unisono.launch.hosts.environment import RankPlace
from unisono.launch.imported_modules import compare_modules
from unisono.launch.job import SOCKETS, Caller, Job, read_job
from unisono.launch.messages import add_limit_note
from unisono.launch.plain_loops import observe_plain_loops
from unisono.launch.process_group import depart, join
from unisono.launch.reports import Kind, Reporter, beating, count_of
from unisono.launch.script_group import let_scripts_initialise
from unisono.launch.settings import Settings
from unisono.launch.starting.allocator import keep_freed_memory
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.launch.starting.process_ends import close_files, name_process
from unisono.report import terminal
from unisono.report.record import Recorder
from unisono.report.steps import StepsDone
from unisono.world import World, set_process_world

_MAX_SOCKET_PATH = 104  # bytes: the smallest limit of any Unix
_NO_TERMINAL = (
    "a worker has no terminal to read from; run a single worker, in the process that has the terminal: "
    "`unisono run -n 1 script.py` without --log-dir and --max-restarts, or spawn(nprocs=1)"
)
_LEAVE_S = 5  # seconds that a worker may take to leave the world after it has sent its outcome

_is_loading = False  # while the call is being unpickled, which imports modules


def run_worker(rank: int, directory: str, job_fd: int, report_fd: int) -> NoReturn:
    """Run worker `rank` of the job in that file, with the directory of its group; its reports go to `report_fd`."""
    world: World | None = None
    recorder: Recorder | None = None
    reporter = Reporter(report_fd)
    name_process(f"unisono-rank-{rank}")
    made_before: list[None] = []
    try:
        job = read_job(job_fd)
        place = _take_place(job, rank, directory)
        world = _join_world(job, place)
        own = own_steps(job.held_memory, place.local_rank)
        _set_up(world, job, own, reporter)
        if job.records:
            recorder = Recorder(world, Path(job.records), job.options.output.profiled(rank), own)
            observe_plain_loops(world)
        with beating(world, reporter, job.pulse_s, recorder.sample if recorder else lambda: None):
            process = os.getpid()
            outcome = Outcome.capture(_call_fn, job, world, reporter)
            if os.getpid() != process:
                _end_forked(outcome)
            if saving_threads():  # until SIGKILL, after the grace period
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # Inside the block, so threads that `fn` has left running still count as progress.
            if outcome.error is None:
                threading._shutdown()  # type: ignore[attr-defined] # joins non-daemon threads, as any exit does
                outcome = Outcome.capture(_compare_ends, world, outcome.value)  # these may have called collectives
    except BaseException as error:
        outcome = Outcome.failure(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # fn has ended, and that is reported first
    _end(_in_callers_terms(outcome, rank, world), world, recorder, reporter, made_before)


def _take_place(job: Job, rank: int, directory: str) -> RankPlace:
    """Take the caller's environment and settings; returns the rank's place in the job."""
    place = job.place_of(rank)
    if not place.address:
        place = replace(place, store=os.path.join(directory, "store"))
    os.environ.clear()
    os.environ.update({**job.caller.environ, OUTER_DIRECTORY: directory})
    keep_freed_memory()
    _adopt_caller(job.caller, place, directory)
    # torch's `record` writes an error of the script there.
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(job.records or directory, f"rank-{rank}.error.json")
    return place


def _set_up(world: World, job: Job, own: StepsDone, reporter: Reporter) -> None:
    """Make it the world of this process: from now on its signals, scripts and steps belong to the job."""
    world.state.held_memory = job.held_memory
    world.state.groups_before, world.state.done_before = job.groups_before, job.done_before
    world.state.snapshot_every = job.options.snapshot_every
    set_process_world(world)
    # Until here an interrupt ended the process: nothing was lost, and the transport would not have noticed it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preemption.leave_interrupts()
    preemption.shield_loader_workers()  # none outlives this process, however it ends
    preemption.on_handling(lambda: reporter.send(Kind.HANDLES_STOP))
    let_scripts_initialise(lambda text: reporter.send(Kind.NOTE, text.encode()))
    world.timeline.at_step, world.timeline.at_load = partial(_note_step, own), own.load


def _end(
    outcome: Outcome[Any], world: World | None, recorder: Recorder | None, reporter: Reporter, made_before: list[None]
) -> NoReturn:
    """Report the outcome, leave the world, and end this process."""
    for stream in (sys.stdout, sys.stderr):  # first: once the caller knows of a failure, it may signal this process
        with contextlib.suppress(Exception):
            stream.flush()
    if outcome.error is not None:
        close_files(made_before)
    with contextlib.suppress(Exception):  # the outcome is reported, whatever is wrong with the record
        if recorder is not None:
            recorder.end(outcome.error)
    if preemption.is_agreed() and world is not None:
        reporter.send(Kind.STOPPED, str(count_of(world, "steps")).encode())
    reporter.send(Kind.OUTCOME, outcome.to_bytes())
    # The default action works inside native code, where a handler in Python would not run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LEAVE_S)  # kills this process if its transport waits for a peer, so that neither is held up
    with contextlib.suppress(Exception):
        if world is not None:
            depart(world, outcome.error)
        if world is not None and outcome.error is None:
            # Exit functions may take longer; the supervisor limits them.
            signal.alarm(0)
            atexit._run_exitfuncs()  # what fn has registered, and what has to be flushed
            close_files(made_before)
    signal.alarm(0)
    for thread in saving_threads():  # what the loop has asked to be saved before it failed; the supervisor limits it
        thread.join()
    os._exit(int(outcome.error is not None))


def _end_forked(outcome: Outcome[Any]) -> NoReturn:
    """End a child that fn has forked, and that has left fn, as Python ends one: its parent reports for the rank."""
    error, code = outcome.error, int(outcome.error is not None)
    if isinstance(error, SystemExit):
        code = exit_error(error, -1).exit_code or 0
    with contextlib.suppress(Exception):  # of streams that fn has closed
        if error is not None and not isinstance(error, SystemExit):
            print(fold_frames(traceback_of(error)), end="", file=sys.stderr)
        sys.stdout.flush()
    os._exit(code)


def _note_step(steps: StepsDone, _: int, done: int | None) -> None:
    steps.note(done or 0)


def _in_callers_terms(outcome: Outcome[Any], rank: int, world: World | None) -> Outcome[Any]:
    """The outcome as the caller gets it: with the rank's place, the reason for an error of the transport, and any limit
    of the machine that was hit."""
    where = str(world) if world is not None else f"rank {rank}, {this_process()}, before it joined the world"
    # StoppedError is a SystemExit, too, but reports an agreed stop.
    if isinstance(outcome.error, SystemExit) and not isinstance(outcome.error, StoppedError):
        outcome = Outcome.failure(exit_error(outcome.error, rank))
    error = outcome.error
    if error is None:
        return replace(outcome, where=where)
    # Decided on the original error, which `translate_error` may replace: torch.distributed calls of the user, or DDP,
    # raise those of torch's transport.
    is_secondary = outcome.is_secondary or any(map(is_of_transport, chain_of(error)))
    if world is not None:
        error = translate_error(error, world.comm)
    add_limit_note(error)
    # Raised by input(), and by pdb.set_trace() and its like.
    if text_of(error) == "EOF when reading a line" or (isinstance(error, BdbQuit) and not _has_terminal()):
        add_note_once(error, _NO_TERMINAL)
    return replace(outcome, error=error, where=where, is_secondary=is_secondary)


def exit_error(error: SystemExit, rank: int) -> WorkerDiedError:
    """Turn `sys.exit` in a worker into the error that the caller gets: a worker that ended without a result."""
    # The exit code as the system would compute it; even with code 0, a missing result is a failure.
    code = error.code % 256 if isinstance(error.code, int) else int(error.code is not None)
    died = WorkerDiedError(
        f"rank {rank} called sys.exit({error.code!r}) before fn returned; return from fn instead", rank, code
    )
    died.__cause__ = error
    return died


def refuse_while_loading() -> None:
    """Raise UnisonoError in a worker that is still importing the module of `fn`: a spawn there would recurse without
    end."""
    # A fresh interpreter of multiprocessing imports the script under this name.
    frames = [frame for frame, _ in walk_stack(None) if frame.f_code.co_name == "<module>"]
    if _is_loading or any(frame.f_globals.get("__name__") == "__mp_main__" for frame in frames):
        raise UnisonoError(
            "spawn was called by a module that a worker imports to find fn in it, and would be called again in each "
            'worker; put that call under `if __name__ == "__main__":`, or into a function'
        )


def _call_fn(job: Job, world: World, reporter: Reporter) -> Any:
    global _is_loading
    _is_loading = True
    try:
        fn, args = loads_call(job.call, lambda settings: _adopt_settings(settings, world, reporter))
    except Exception as error:
        raise UnpicklableError(
            f"fn or its arguments cannot be rebuilt in the worker ({type(error).__name__}: {text_of(error)}); "
            "everything they refer to must be importable there"
        ) from error
    finally:
        _is_loading = False
    # Once per machine is enough: its ranks import the same files.
    if world.local_rank == 0:
        compare_modules(pickle.loads(job.caller.modules), lambda text: reporter.send(Kind.NOTE, text.encode()))
    return preemption.call(fn, world.rank, *args)


def _compare_ends(world: World, value: Any) -> Any:
    """Return the value, if no rank did alone what concerns all."""
    if value is None:  # otherwise the caller may count
        world.state.deliveries.evaluations.settle()
    if isinstance(comm := innermost(world.comm), ProcessCommunicator):
        comm.compare_ends()
    return value


def _adopt_settings(settings: Settings, world: World, reporter: Reporter) -> None:
    for name, reason in settings.adopt(world.backend).items():
        text = f"workers do not have what {name} has set in the calling process ({reason})"
        reporter.send(Kind.NOTE, text.encode())


def _adopt_caller(caller: Caller, place: RankPlace, directory: str) -> None:
    main = sys.modules["__main__"]
    for name in ("sys", "main"):  # names from the command line that started the zygote
        vars(main).pop(name, None)
    # For loader workers that are fresh interpreters (forkserver, spawn): multiprocessing imports the script in them.
    file, name = caller.main
    if file:
        main.__file__ = file
    if name:
        main.__spec__ = ModuleSpec(name, None, origin=file)
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.local_rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
    )
    _keep_sockets_in(directory)
    os.chdir(caller.directory)
    sys.path[:] = caller.path
    sys.argv[:] = caller.argv
    # The zygote's stream objects belong to other files; line buffering lets a terminal show lines as they come.
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(1, "w", 1, encoding, errors, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115
    # stderr is a pipe here, so the width of the terminal cannot be queried.
    terminal.set_columns(caller.columns)
    sys.breakpointhook = _break_into_debugger
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
    # For the supervisor, which wants whole, separate stacks. The descriptor stays open as long as the process lives.
    stacks = os.open(stacks_path(directory, place.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    faulthandler.register(TELL_STACKS, stacks, all_threads=True)


def _break_into_debugger(*args: Any, **kwargs: Any) -> Any:
    """What `breakpoint()` calls: the debugger that PYTHONBREAKPOINT names, or pdb if fn has opened a terminal."""
    if os.environ.get("PYTHONBREAKPOINT") or _has_terminal():
        return sys.__breakpointhook__(*args, **kwargs)
    raise UnisonoError(f"breakpoint() was called, and {_NO_TERMINAL}; PYTHONBREAKPOINT=0 ignores breakpoint()")


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _keep_sockets_in(directory: str) -> None:
    """Make multiprocessing put its loader workers' files here, where they are removed with the group, not in TMPDIR."""
    place = os.path.join(directory, SOCKETS)
    if len(place) + len("/listener-12345678") >= _MAX_SOCKET_PATH and sys.platform == "linux":
        # the same directory by a shorter path
        place = f"/proc/{os.getpid()}/fd/{os.open(place, os.O_RDONLY | os.O_DIRECTORY)}"
    multiprocessing.current_process()._config["tempdir"] = place  # type: ignore[attr-defined] # no public way


def stacks_path(directory: str | Path, rank: int) -> Path:
    """Where the worker writes its Python stacks when it receives `TELL_STACKS`."""
    return Path(directory) / f"stacks-{rank}"


def _join_world(job: Job, place: RankPlace) -> World:
    options, backend = job.options, get_backend(job.backend)
    # Before any thread exists: threads inherit it.
    if (pin := options.shared_cores.pin) is not None:
        os.sched_setaffinity(0, cores_near(place.local_rank % max(1, backend.device_count()), pin))
    torch.set_num_threads(job.num_threads)
    timeout = timedelta(seconds=options.timeout_s)
    use_secret(job.secret)
    world = join(place, backend, timeout, options.process_group)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # for child processes; this process has already read them
        os.environ.setdefault(name, str(job.num_threads))
    return world
