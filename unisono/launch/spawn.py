"""`spawn`: one worker process per device, and their results."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, overload

from unisono.backends import pick_backend
from unisono.backends.cores import fair_num_threads
from unisono.errors import UnpicklableError
from unisono.launch.supervisor import Supervisor
from unisono.launch.worker import Job, exit_error, refuse_while_loading
from unisono.outcome import add_note_once
from unisono.pickling import dumps_call
from unisono.protocols import Backend
from unisono.world import solo_world, use_world


class ProcessContext:
    """The running workers of `spawn(..., join=False)`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def pids(self) -> list[int | None]:
        """The workers' process ids, by rank."""
        return self._supervisor.pids()

    def join(self, timeout: float | None = None) -> list[Any] | None:
        """Wait for the workers.

        Args:
            timeout: seconds to wait at most; None waits to the end.

        Returns:
            The results by rank, or None when the time is over and workers still run.

        Raises:
            BaseException: what a worker raised; as for `spawn`.
            KeyboardInterrupt: after Ctrl-C here, when the workers have been stopped; a second Ctrl-C kills them. What
                another signal's handler raises here stops them just the same.
        """
        with self._guarded():
            self._supervisor.start()  # here, so that no Ctrl-C can fall between the start and the wait
            is_over = self._supervisor.wait(timeout)
        return self._supervisor.result() if is_over else None

    def stop(self) -> None:
        """Ask the workers to stop (SIGTERM, then SIGKILL after the grace); `join` then raises WorkerDiedError."""
        self._supervisor.stop()

    def _start(self) -> None:
        with self._guarded():
            self._supervisor.start()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Stop the workers when a signal's handler, that of Ctrl-C for one, raises in the block."""
        try:
            yield
        except BaseException as error:
            ask = self._supervisor.interrupt if isinstance(error, KeyboardInterrupt) else self._supervisor.stop
            while not self._supervisor.wait(0):
                with suppress(BaseException):  # a second Ctrl-C: ask again, which kills
                    ask()
                    self._supervisor.wait()
            raise


@overload
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int | None = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    *,
    backend: str | None = ...,
    num_threads: int | None = ...,
    checked: bool = ...,
    timeout: timedelta = ...,
    grace_s: float = ...,
) -> list[Any]: ...
@overload
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int | None = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    backend: str | None = ...,
    num_threads: int | None = ...,
    checked: bool = ...,
    timeout: timedelta = ...,
    grace_s: float = ...,
) -> ProcessContext: ...
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    *,
    backend: str | None = None,
    num_threads: int | None = None,
    checked: bool = False,
    timeout: timedelta = timedelta(minutes=30),
    grace_s: float = 5.0,
) -> list[Any] | ProcessContext:
    """Call `fn(index, *args)` in one worker process per device.

    `fn` travels by value, so closures, lambdas and functions of a notebook work, and no main guard is needed.
    Each worker has its world (`rank()`, `all_reduce`, ...) ready when `fn` begins. One failing worker stops the group.

    Args:
        fn: called as `fn(index, *args)`, index from 0 to nprocs - 1.
        args: further positional arguments, the same for each worker.
        nprocs: number of workers; None takes every device of the family. 1 with `join=True` runs `fn` in the calling
            process, with a world of its own.
        join: wait for the workers and return their results; False returns a `ProcessContext` at once.
        daemon: with `join=False`, end the workers when the calling process ends, instead of waiting for them.
        backend: the device family, "cpu", "cuda", ...; None picks one, accelerators first.
        num_threads: CPU threads per worker; None shares the usable cores evenly.
        checked: compare every collective on all ranks before it runs; a mismatch names two ranks and their calls.
        timeout: how long a collective waits for a peer before it gives up; a last resort.
        grace_s: seconds that a worker has between SIGTERM (or SIGINT) and SIGKILL.

    Returns:
        The values that `fn` returned, by rank.

    Raises:
        TypeError, ValueError: an argument is not what it must be; nothing has been started.
        UnpicklableError: `fn`, `args` or a result cannot be sent between processes.
        WorkerDiedError: a worker was killed or exited before `fn` returned.
        BaseException: whatever a worker raised, in its own type; its `__cause__` shows the remote traceback, and notes
            give rank, device and pid.
    """
    refuse_while_loading()
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is a {type(fn).__name__}; pass a function that takes the index and *args")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(f"args={args!r} is a {type(args).__name__}; pass a tuple, with one argument as (argument,)")
    family = pick_backend(backend)
    count = _check_nprocs(nprocs, family)
    threads = _check_num_threads(num_threads, count)
    _check_duration(grace_s, "grace_s")
    _check_timeout(timeout)
    if count == 1 and join:
        return [_run_inline(fn, args, family)]
    job = Job(
        call=_pickle_call(fn, tuple(args)),
        nprocs=count,
        backend=family.name,
        timeout=timeout,
        is_checked=checked,
        num_threads=threads,
    )
    _settle_streams()
    context = ProcessContext(Supervisor(job, grace_s, daemon))
    if join:
        return context.join() or []
    context._start()
    return context


def _check_nprocs(nprocs: int | None, family: Backend) -> int:
    if nprocs is None:
        return family.device_count()
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"nprocs={nprocs!r} is a {type(nprocs).__name__}; pass a whole number, or None for all devices")
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs} starts no worker; pass a number from 1 on, or None for all devices")
    try:
        family.device(nprocs - 1)
    except ValueError as error:
        raise ValueError(f"nprocs={nprocs} needs as many devices: {error}") from None
    return nprocs


def _check_num_threads(num_threads: int | None, count: int) -> int:
    if num_threads is None:
        return fair_num_threads(count)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int):
        raise TypeError(f"num_threads={num_threads!r} is a {type(num_threads).__name__}; pass a whole number")
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads} leaves a worker no thread; pass a number from 1 on")
    return num_threads


def _check_duration(seconds: float, name: str) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name}={seconds!r} is a {type(seconds).__name__}; pass seconds")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name}={seconds!r} is no duration; pass seconds from 0 on")


def _check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r} is a {type(timeout).__name__}; pass a datetime.timedelta")
    if timeout <= timedelta():
        raise ValueError(f"timeout={timeout!r} leaves a collective no time; pass a positive timedelta")


def _settle_streams() -> None:
    """Make our standard streams fit for the workers, which write to the same."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # what was printed before the workers' lines stands before them
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # whoever started us has closed it
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _run_inline(fn: Callable[..., Any], args: Sequence[Any], family: Backend) -> Any:
    world = solo_world(family)
    with use_world(world):
        try:
            return fn(0, *args)
        except SystemExit as error:
            raise exit_error(error, 0) from error
        except BaseException as error:
            add_note_once(error, str(world))
            raise


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return dumps_call(fn, args)
    except Exception as error:
        named = [("fn", fn), *((f"args[{place}]", arg) for place, arg in enumerate(args))]
        name, part = next((each for each in named if not _is_picklable(each[1])), named[0])
        raise UnpicklableError(
            f"{name}, a {type(part).__name__}, cannot be sent to the workers ({type(error).__name__}: {error}); "
            "make it inside fn, or pass what it is made from"
        ) from error


def _is_picklable(part: Any) -> bool:
    try:
        dumps_call(type, (part,))
    except Exception:
        return False
    return True
