"""`spawn`: one worker process per device, and their results."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack, overload

from unisono import preemption
from unisono.backends import pick_backend
from unisono.comm.selection import group_backend
from unisono.errors import StoppedError, UnisonoError
from unisono.launch.arguments import (
    check_call,
    check_count,
    check_duration,
    check_log_dir,
    check_log_format,
    check_log_ranks,
    check_nprocs,
    check_platform,
    check_start_method,
    check_timeout,
    pick_cores,
    pick_num_threads,
    pickle_call,
)
from unisono.launch.context import ProcessContext
from unisono.launch.hosts.environment import announced_place
from unisono.launch.hosts.join_world import run_announced
from unisono.launch.imported_modules import check_carried, globals_of
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
    """The keyword-only arguments of `spawn`, which says what each means."""

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
    carry: Collection[ModuleType]
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
    carry: Collection[ModuleType] = (),
    log_format: Literal["text", "json"] = "text",
    process_group: Literal["gloo"] | None = None,
) -> list[Any] | ProcessContext:
    """Call `fn(index, *args)` in one worker process per device.

    `fn` travels by value, so closures, lambdas and functions of a notebook work, and no main guard is needed. Modules
    travel by name: workers import them themselves.
    Each worker has its world (`rank()`, `all_reduce`, ...) ready when `fn` begins. One failing worker stops the group.

    In a process that a launcher has started (torchrun, `unisono run`, SLURM, Kubernetes) nothing is started: `fn` is
    called here, as the rank that the launcher announced, and every rank gets all results.

    Args:
        fn: called as `fn(index, *args)`, index from 0 to nprocs - 1.
        args: further positional arguments, the same for each worker.
        nprocs: number of workers; None takes every device of the family. 1 with `join=True` and no option that needs
            a process of its own runs `fn` in the calling process, with a world of its own.
        join: wait for the workers and return their results; False returns a `ProcessContext` at once.
        daemon: with `join=False`, end the workers when the calling process ends, instead of waiting for them.
        backend: the device family, "cpu", "cuda", ...; None picks one, accelerators first.
        start_method: "zygote" forks workers from a process that has imported torch and run nothing; "spawn" starts a
            fresh interpreter for each, for libraries that survive no fork; None takes the fastest of the platform.
        num_threads: CPU threads per worker; None takes OMP_NUM_THREADS, else shares the usable cores evenly.
        num_loader_workers: of each worker's DataLoader, which then get their share of the cores, too.
        pin_cores: keep each worker, and what it starts, to cores of its own, of one NUMA node where that is possible.
        timeout: how long a collective waits for a peer before it gives up; a last resort.
        hang_timeout_s: seconds without progress of any rank (a collective, a batch, a step) after which the group is
            stopped with a WorkerHungError; None takes most of `timeout`, where a rank waits in a collective.
        max_restarts: how often a group that has failed is restarted, with `restart_count` + 1 in its world; `fn`
            continues from its own checkpoint.
        grace_s: seconds that a worker has between SIGTERM (or SIGINT) and SIGKILL.
        log_dir: where a directory of this run is made: each rank's stdout and stderr, events, the monitor's samples.
        log_ranks: show the output of these ranks only; the files have all.
        prefix: begin each line with "[rank 1] "; None does so on stderr and leaves stdout as it is.
        carry: imported modules whose globals have been changed, and are to be in the workers as they are here.
        log_format: "json" shows each line that a worker writes as an object with time, rank, stream and text.
        process_group: how torch.distributed reduces: None takes memory that the workers share, and NCCL on CUDA; "gloo"
            sends over the loopback, and lets several workers share a GPU, as tests may.

    Returns:
        The values that `fn` returned, by rank.

    Raises:
        TypeError, ValueError: an argument is not what it must be; nothing has been started.
        UnpicklableError: `fn`, `args` or a result cannot be sent between processes.
        WorkerDiedError: a worker was killed or exited before `fn` returned.
        WorkerHungError: no rank made progress.
        StoppedError: the ranks came to an agreed early end (`should_stop`); it has their results.
        BaseException: whatever a worker raised, in its own type; its `__cause__` shows the remote traceback, notes
            give rank, device, pid, node and restart count, and `failures` has the errors of all ranks.
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
    policy = make_policy(
        daemon=daemon,
        count=count,
        start_method=start_method,
        grace_s=grace_s,
        max_restarts=max_restarts,
        hang_timeout_s=hang_timeout_s,
        log_dir=log_dir,
        log_ranks=log_ranks,
        prefix=prefix,
        log_format=log_format,
    )
    threads = pick_num_threads(num_threads, num_loader_workers, count)
    cores = pick_cores(pin_cores, count)
    carried = check_carried(carry)
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
    job = make_job(fn, args, count, family, policy, timeout, threads, cores, carried, process_group=process_group)
    settle_streams()
    context = ProcessContext(Supervisor(job, policy))
    if join:
        return context.join() or []
    context.start()
    return context


_PULSE_S = 1.0  # between two looks at how far a worker is


def make_policy(
    count: int | None,
    daemon: bool = False,
    start_method: str | None = None,
    grace_s: float = 5.0,
    max_restarts: int = 0,
    hang_timeout_s: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    log_ranks: Collection[int] | None = None,
    prefix: bool | None = None,
    log_format: str = "text",
) -> Policy:
    """How the workers are started, watched and ended, by the arguments of `spawn`, checked.

    Args:
        count: how many ranks there are in all; None where that is not known yet.
    """
    if prefix is not None and not isinstance(prefix, bool):
        raise TypeError(f"prefix={prefix!r} is a {type(prefix).__name__}; pass True, False or None")
    return Policy(
        start_method=check_start_method(start_method),
        grace_s=check_duration(grace_s, "grace_s"),
        daemon=daemon,
        max_restarts=check_count(max_restarts, "max_restarts", 0, "pass how often the group may be restarted"),
        hang_timeout_s=None if hang_timeout_s is None else check_duration(hang_timeout_s, "hang_timeout_s", False),
        log_dir=check_log_dir(log_dir),
        output=OutputOptions(prefix, check_log_ranks(log_ranks, count), check_log_format(log_format) == "json"),
    )


def make_job(
    fn: Callable[..., Any],
    args: Sequence[Any],
    count: int,
    family: Backend,
    policy: Policy,
    timeout: timedelta,
    num_threads: int,
    cores: list[set[int]] | None,
    carried: Collection[ModuleType] = (),
    is_checked: bool = False,
    process_group: Literal["gloo"] | None = None,
) -> Job:
    """What `count` workers of this machine are given, all but where they meet.

    Raises:
        UnpicklableError: `fn` or `args` cannot be sent to them.
    """
    settings = Settings.read()
    for each in settings.loggers.left_out:
        say_once(f"workers log without {each}, which writes to what only the calling process has; add one in fn")
    return Job(
        call=pickle_call(fn, tuple(args), settings, {each.__name__: globals_of(each) for each in carried}),
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
    """What only the one who starts the workers can do is not passed over in silence where that is somebody else."""
    if not join:
        raise UnisonoError(
            "spawn(join=False) would start workers and continue, but a launcher has started this process as one of its "
            "workers: pass join=True, or run the script without a launcher"
        )
    if given := [name for name, value in options.items() if value]:
        logger.warning(
            "spawn(%s) is up to the launcher that has started this process as one of its workers; `unisono run` has "
            "--max-restarts, --hang-timeout and --log-dir",
            ", ".join(f"{name}=..." for name in given),
        )


def settle_streams() -> None:
    """Make our standard streams fit for the workers, which write to the same."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # what was printed before the workers' lines stands before them
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # whoever started us has closed it
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
