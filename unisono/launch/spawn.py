"""`spawn`: one worker process per device, and their results."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, Unpack, overload

from unisono.arguments import check_integer, check_names, check_type
from unisono.comm import preemption
from unisono.comm.outcome import add_note_once
from unisono.comm.pickling import pickle_call
from unisono.comm.selection import group_backend
from unisono.comm.thread_start import check_threads
from unisono.devices import pick_backend
from unisono.errors import StoppedError, UnisonoError
from unisono.launch.context import ProcessContext
from unisono.launch.engines import find_engine, spawn_on
from unisono.launch.hosts.environment import RankPlace, announced_place
from unisono.launch.hosts.join_world import run_announced
from unisono.launch.job import Caller, Job
from unisono.launch.messages import shorten_traceback
from unisono.launch.options import Options, SpawnOptions
from unisono.launch.reports import count_of
from unisono.launch.settings import Settings
from unisono.launch.supervisor import Supervisor
from unisono.launch.worker import exit_error, refuse_while_loading
from unisono.protocols import Backend
from unisono.world import solo_world, use_world

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FILES = 4  # that this process has open for each worker


@overload
def spawn(
    fn: Callable[..., T],
    args: Sequence[Any] = ...,
    nprocs: int | None = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    **options: Unpack[SpawnOptions],
) -> list[T]: ...
@overload
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int | None = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    **options: Unpack[SpawnOptions],
) -> ProcessContext: ...
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    **options: Unpack[SpawnOptions],
) -> list[Any] | ProcessContext:
    """Call `fn(index, *args)` in one worker process per device.

    `fn` is pickled by value, so closures, lambdas and functions defined in a notebook work, and no main guard is
    needed. Modules are pickled by name: workers import them themselves.

    Each worker's world (`rank()`, `all_reduce`, ...) is set up before `fn` is called. If one worker fails, the whole
    group is stopped.

    In a process that was started by a launcher (torchrun, `unisono run`, SLURM, Kubernetes), `spawn` starts no
    processes: it calls `fn` in this process, as the rank that the launcher announced, and every rank gets all results.

    Args:
        fn: called as `fn(index, *args)`, with index from 0 to nprocs - 1.
        args: further positional arguments, the same for each worker.
        nprocs: the number of workers; None uses every device of the family. With 1, `join=True` and no option that
            needs a separate process, `fn` runs in the calling process, with its own world.
        join: wait for the workers and return their results; False returns a `ProcessContext` immediately.
        daemon: with `join=False`, end the workers when the calling process exits, instead of waiting for them.
        options: by keyword.

            - `backend`: the device family, "cpu", "cuda", ...; by default accelerators come first.
            - `start_method`: "zygote" forks workers from a process that has imported torch and run nothing; "spawn"
              starts a fresh interpreter for each, for libraries that are not fork-safe. Default: the fastest one.
            - `cores`: CPU threads per worker, or `Cores(...)`; by default workers divide the usable cores evenly.
            - `timeout`: how long a collective waits for a peer before it gives up, a last resort: seconds, or a
              timedelta. Default: 1800.
            - `hang_timeout_s`: seconds without progress on any rank (a collective, a batch, a step) after which the
              group is stopped with a WorkerHungError. Default: most of `timeout`, if a rank waits in a collective.
            - `max_restarts`: how many times a failed group is restarted, with `restart_count` + 1 in its world; `fn`
              continues from its own checkpoint. Default: 0.
            - `snapshot_every`: the default of `Accelerator(snapshot_every=)`: after how many steps the state is copied
              into memory that this process holds; a restarted group continues from it.
            - `grace_s`: seconds that a worker has between SIGTERM (or SIGINT) and SIGKILL. Default: 5.
            - `output`: `Output(...)`: log files, and what is shown of the workers' output.
            - `engine`: workers on other machines: "slurm", "ray", or `unisono.engines.Hosts([...])` and the like
              (docs/several_machines.md). `fn` may be any that can be sent; what it prints is shown here.
            - `process_group`: how torch.distributed reduces. Default: memory shared between the workers, and NCCL on
              CUDA; "gloo" sends over the loopback interface and lets several workers share a GPU, useful in tests.

    Returns:
        The values that `fn` returned, by rank.

    Raises:
        TypeError, ValueError: an argument is invalid; no process was started.
        UnisonoError: workers cannot be started from this process; the message says why.
        UnpicklableError: `fn`, `args` or a result cannot be sent between processes.
        WorkerDiedError: a worker was killed, or exited before `fn` returned.
        WorkerHungError: no rank made progress.
        StoppedError: the ranks agreed to stop early (`should_stop`); it holds their results.
        BaseException: the exception of a worker, in its own type; its `__cause__` shows the remote traceback, notes
            give rank, device, pid, node and restart count, and `failures` holds the errors of all ranks.
    """
    refuse_while_loading()
    _check_call(fn, args)
    check_names("spawn", options, ["args", "nprocs", "join", "daemon", *SpawnOptions.__annotations__], {})
    chosen = Options(daemon=daemon, **options)
    if chosen.engine is not None:
        if not join:
            raise ValueError("spawn(join=False) does not go with engine=, which waits for machines; leave join out")
        check_threads("spawn", uses_processes=True)
        try:
            return spawn_on(find_engine(chosen.engine), fn, args, nprocs, replace(chosen, engine=None))
        except BaseException as error:
            shorten_traceback(error)
            raise
    family = pick_backend(chosen.backend)
    count = check_nprocs(nprocs, family, chosen.process_group)
    group_backend(family, chosen.process_group)
    if announced_place() is not None:
        _report_idle_options(join, chosen)
        return run_announced(fn, args, nprocs, family, timedelta(seconds=chosen.timeout_s), chosen.process_group)
    chosen.check_ranks(count)
    if count == 1 and join and not chosen.needs_process:
        return [_run_inline(fn, args, family)]
    check_threads("spawn", uses_processes=True)
    call = pickle_call(fn, tuple(args), Settings.read())
    context = ProcessContext(Supervisor(make_job(call, count, family, chosen)))
    if join:
        try:
            return context.join() or []
        except BaseException as error:
            shorten_traceback(error)
            raise
    context.start()
    return context


def check_nprocs(nprocs: int | None, family: Backend, process_group: str | None = None) -> int:
    """The number of workers. Each gets a device; several may share one if the group uses gloo, not the family's own
    transport."""
    if nprocs is None:
        return family.device_count()
    check_integer(nprocs, "nprocs", 1, "pass a number of at least 1, or None for all devices")
    if process_group == "gloo" != family.process_group_backend:
        return nprocs
    try:
        family.check_workers(nprocs)
    except ValueError as error:
        others = ", backend='cpu', or process_group='gloo', which lets workers share devices"
        raise ValueError(
            f"nprocs={nprocs} needs as many devices: {error}; pass nprocs=None for one worker on each"
            f"{'' if family.process_group_backend == 'gloo' else others}"
        ) from None
    return nprocs


def make_job(call: bytes, count: int, family: Backend, options: Options, caller: Caller | None = None) -> Job:
    """Make the job of `count` workers on this machine, and prepare this process for them; `caller` is what they take
    over, by default this process's. ValueError: workers without GPUs are to be pinned near them, or there are too few
    open files; UnisonoError: workers cannot be supervised on this platform."""
    num_threads = options.shared_cores.threads_of_each(count)
    if (pin := options.shared_cores.pin) is not None and not family.is_accelerated():
        raise ValueError(f"Cores(pin={pin!r}) keeps workers near their GPUs, and theirs are on {family.name}")
    if not hasattr(os, "fork"):
        raise UnisonoError(
            f"workers need a Unix, and this is {sys.platform}; use nprocs=1, DataParallel (replicas in threads), or WSL"
        )
    import resource  # Unix only

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _FILES * count:
        raise ValueError(f"nprocs={count} workers take {_FILES} open files each, of {files} (`ulimit -n`)")
    caller = caller or Caller()
    caller = replace(caller, environ={**caller.environ, **family.worker_environment(count)})
    place = RankPlace("unisono", 0, count, 0, count, 0, address="", port=0, is_store_there=True)
    job = Job(call, family.name, options, num_threads, place, caller)
    _settle_streams()
    return job


def _check_call(fn: Any, args: Any) -> None:
    check_type(fn, "fn", "pass a function that takes the index and *args", Callable)
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(
            f"args={args!r} is of type {type(args).__name__}; pass a tuple, with one argument as (argument,)"
        )
    try:
        # Of what is called: a wrapper may take other arguments than the function that it wraps.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # of some functions in native code it is not known
        return
    try:
        signature.bind(0, *args)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"{name}{signature} cannot be called as fn(index, *args) with {len(args)} args: {error}; its first "
            "parameter is the worker's index, and spawn(fn, args=(...)) passes the others"
        ) from None


def _report_idle_options(join: bool, options: Options) -> None:
    """Report options that only the process starting the workers can honour, where the launcher is that process."""
    if not join:
        raise UnisonoError(
            "spawn(join=False) would start workers and continue, but a launcher has started this process as one of its "
            "workers: pass join=True, or run the script without a launcher"
        )
    names = ("start_method", "cores", "hang_timeout_s", "max_restarts", "grace_s", "output", "snapshot_every")
    if idle := [name for name in names if getattr(options, name) != getattr(Options, name)]:
        logger.warning(
            "spawn's %s: ignored, since a launcher has started this process as one of its workers; `unisono run` has "
            "options for them",
            ", ".join(idle),
        )


def _settle_streams() -> None:
    """Prepare this process's standard streams, which the workers share."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # earlier output has to appear before the workers' lines
    # our parent closed it; a free low descriptor would be reused
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _run_inline(fn: Callable[..., Any], args: Sequence[Any], family: Backend) -> Any:
    world = solo_world(family)
    with preemption.scope(), use_world(world):
        try:
            result = preemption.call(fn, 0, *args)
            if preemption.is_agreed():
                stopped = StoppedError([result], count_of(world, "steps"))
                logger.warning("%s", stopped)
                raise stopped
            return result
        except StoppedError:
            raise
        except SystemExit as error:
            raise exit_error(error, 0) from error
        except BaseException as error:
            add_note_once(error, str(world))
            raise
