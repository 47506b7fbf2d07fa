"""`spawn`: one worker process per device, and their results."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, TypedDict, Unpack, overload

from unisono import preemption
from unisono.arguments import check_integer
from unisono.backends import pick_backend
from unisono.comm.selection import group_backend
from unisono.errors import StoppedError, UnisonoError
from unisono.launch.arguments import (
    check_call,
    check_duration,
    check_hang_timeout,
    check_log_dir,
    check_log_format,
    check_log_ranks,
    check_nprocs,
    check_platform,
    check_prefix,
    check_start_method,
    check_timeout,
    pick_cores,
    pick_num_threads,
    pickle_call,
)
from unisono.launch.context import ProcessContext
from unisono.launch.hosts.environment import announced_place
from unisono.launch.hosts.join_world import run_announced
from unisono.launch.messages import say_once
from unisono.launch.policy import Policy
from unisono.launch.settings import Settings
from unisono.launch.supervisor import Supervisor
from unisono.launch.watching.output import OutputOptions
from unisono.launch.worker import Job, exit_error, refuse_while_loading
from unisono.outcome import add_note_once
from unisono.protocols import Backend
from unisono.world import solo_world, use_world

logger = logging.getLogger(__name__)


class SpawnOptions(TypedDict, total=False):
    """The keyword-only arguments of `spawn`; its docstring describes each."""

    backend: str | None
    start_method: str | None
    num_threads: int | None
    num_loader_workers: int
    pin_cores: bool
    timeout: timedelta
    hang_timeout_s: float | None
    max_restarts: int
    grace_s: float
    log_dir: str | os.PathLike[str] | None
    log_ranks: Collection[int] | None
    prefix: bool | None
    log_format: Literal["text", "json"]
    process_group: Literal["gloo"] | None


@overload
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int | None = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    **options: Unpack[SpawnOptions],
) -> list[Any]: ...
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
    *,
    backend: str | None = None,
    start_method: str | None = None,
    num_threads: int | None = None,
    num_loader_workers: int = 0,
    pin_cores: bool = False,
    timeout: timedelta = timedelta(minutes=30),
    hang_timeout_s: float | None = None,
    max_restarts: int = 0,
    grace_s: float = 5.0,
    log_dir: str | os.PathLike[str] | None = None,
    log_ranks: Collection[int] | None = None,
    prefix: bool | None = None,
    log_format: Literal["text", "json"] = "text",
    process_group: Literal["gloo"] | None = None,
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
            needs a separate process, `fn` runs in the calling process, with a world of its own.
        join: wait for the workers and return their results; False returns a `ProcessContext` immediately.
        daemon: with `join=False`, end the workers when the calling process exits, instead of waiting for them.
        backend: the device family, "cpu", "cuda", ...; None picks one, accelerators first.
        start_method: "zygote" forks workers from a process that has imported torch and run nothing; "spawn" starts a
            fresh interpreter for each, for libraries that are not fork-safe; None uses the platform's fastest.
        num_threads: CPU threads per worker; None uses OMP_NUM_THREADS, or else divides the usable cores evenly.
        num_loader_workers: DataLoader workers per worker, which then get their share of the cores as well.
        pin_cores: pin each worker, and the processes it starts, to cores of its own, of one NUMA node where possible.
        timeout: how long a collective waits for a peer before it gives up; a last resort.
        hang_timeout_s: seconds without progress on any rank (a collective, a batch, a step) after which the group is
            stopped with a WorkerHungError; None uses most of `timeout`, if a rank is waiting in a collective.
        max_restarts: how many times a failed group is restarted, with `restart_count` + 1 in its world; `fn` continues
            from its own checkpoint.
        grace_s: seconds that a worker has between SIGTERM (or SIGINT) and SIGKILL.
        log_dir: the parent of this run's log directory: each rank's stdout and stderr, events, the monitor's samples.
        log_ranks: show the output of these ranks only; the log files contain every rank's.
        prefix: begin each line with "[rank 1] "; None does so on stderr and leaves stdout unchanged.
        log_format: "json" shows each line that a worker writes as an object with time, rank, stream and text.
        process_group: how torch.distributed reduces: None uses memory shared between the workers, and NCCL on CUDA;
            "gloo" sends over the loopback interface and lets several workers share a GPU, which is useful in tests.

    Returns:
        The values that `fn` returned, by rank.

    Raises:
        TypeError, ValueError: an argument is invalid; no process was started.
        UnpicklableError: `fn`, `args` or a result cannot be sent between processes.
        WorkerDiedError: a worker was killed, or exited before `fn` returned.
        WorkerHungError: no rank made progress.
        StoppedError: the ranks agreed to stop early (`should_stop`); it holds their results.
        BaseException: the exception of a worker, in its own type; its `__cause__` shows the remote traceback, notes
            give rank, device, pid, node and restart count, and `failures` holds the errors of all ranks.
    """
    refuse_while_loading()
    check_call(fn, args)
    family = pick_backend(backend)
    count = check_nprocs(nprocs, family, process_group)
    check_timeout(timeout)
    group_backend(family, process_group)
    if announced_place() is not None:
        _tell_idle_options(join, max_restarts=max_restarts, hang_timeout_s=hang_timeout_s, log_dir=log_dir)
        return run_announced(fn, args, nprocs, family, timeout, process_group)
    policy = Policy(
        start_method=check_start_method(start_method),
        grace_s=check_duration(grace_s, "grace_s"),
        daemon=daemon,
        max_restarts=check_integer(max_restarts, "max_restarts", 0, "pass how often the group may be restarted"),
        hang_timeout_s=check_hang_timeout(hang_timeout_s),
        log_dir=check_log_dir(log_dir),
        output=OutputOptions(check_prefix(prefix), check_log_ranks(log_ranks, count), check_log_format(log_format)),
    )
    threads = pick_num_threads(num_threads, num_loader_workers, count)
    cores = pick_cores(pin_cores, count)
    needs_process = (
        max_restarts
        or pin_cores
        or prefix
        or log_format != "text"
        or any(each is not None for each in (start_method, num_threads, hang_timeout_s, log_dir, log_ranks))
    )
    if count == 1 and join and not needs_process:
        return [_run_inline(fn, args, family)]
    check_platform()
    job = make_job(fn, args, count, family, policy, timeout, threads, cores, process_group=process_group)
    settle_streams()
    context = ProcessContext(Supervisor(job, policy))
    if join:
        return context.join() or []
    context.start()
    return context


_PULSE_S = 1.0  # seconds between two checks of a worker's progress


def make_job(
    fn: Callable[..., Any],
    args: Sequence[Any],
    count: int,
    family: Backend,
    policy: Policy,
    timeout: timedelta,
    num_threads: int,
    cores: list[set[int]] | None,
    is_checked: bool = False,
    process_group: Literal["gloo"] | None = None,
) -> Job:
    """Make the job for `count` workers on this machine, complete except for the rendezvous.

    Raises:
        UnpicklableError: `fn` or `args` cannot be sent to the workers.
    """
    settings = Settings.read()
    for each in settings.loggers.left_out:
        say_once(
            f"workers log without {each}, which writes to something that only the calling process has; "
            "add a handler in fn"
        )
    return Job(
        call=pickle_call(fn, tuple(args), settings),
        nprocs=count,
        backend=family.name,
        timeout=timeout,
        num_threads=num_threads,
        cores=cores,
        is_checked=is_checked,
        process_group=process_group,
        pulse_s=min(_PULSE_S, (policy.hang_timeout_s or timeout.total_seconds()) / 20),
    )


def _tell_idle_options(join: bool, **options: object) -> None:
    """Report options that only the process starting the workers can honour, where the launcher is that process."""
    if not join:
        raise UnisonoError(
            "spawn(join=False) would start workers and continue, but a launcher has started this process as one of its "
            "workers: pass join=True, or run the script without a launcher"
        )
    if given := [name for name, value in options.items() if value]:
        logger.warning(
            "spawn(%s) is up to the launcher, which has started this process as one of its workers; `unisono run` has "
            "--max-restarts, --hang-timeout and --log-dir",
            ", ".join(f"{name}=..." for name in given),
        )


def settle_streams() -> None:
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
            result = fn(0, *args)
            if preemption.is_agreed():
                raise StoppedError([result])
            return result
        except StoppedError:
            raise
        except SystemExit as error:
            raise exit_error(error, 0) from error
        except BaseException as error:
            add_note_once(error, str(world))
            raise
