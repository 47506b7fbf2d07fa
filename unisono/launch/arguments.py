"""Validates the arguments of `spawn` on entry: each error names the value, the rule and what to do instead."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any

from unisono.arguments import check_integer, check_type
from unisono.backends.cores import disjoint_cores, fair_num_threads
from unisono.errors import UnisonoError, UnpicklableError
from unisono.launch.unpicklable import describe_unpicklable, is_picklable
from unisono.pickling import dumps_call
from unisono.protocols import Backend

logger = logging.getLogger(__name__)

_YEAR_S = 365 * 24 * 3600

START_METHODS = ("zygote", "spawn")
_REFUSED = {
    "fork": "a fork of this process hangs at its first parallel operation once torch has run one here, since OpenMP's "
    "threads do not survive it",
    "forkserver": "its workers outlive a killed caller",
}


def check_call(fn: Any, args: Any) -> None:
    check_type(fn, "fn", "pass a function that takes the index and *args", Callable)
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(
            f"args={args!r} is of type {type(args).__name__}; pass a tuple, with one argument as (argument,)"
        )


def check_nprocs(nprocs: int | None, family: Backend, process_group: str | None = None) -> int:
    """The number of workers. Each gets a device; several may share one if the group uses gloo in place of the family's
    own."""
    if nprocs is None:
        return family.device_count()
    check_integer(nprocs, "nprocs", 1, "pass a number of at least 1, or None for all devices")
    if process_group == "gloo" != family.process_group_backend:
        return nprocs
    try:
        family.check_workers(nprocs)
    except ValueError as error:
        raise ValueError(f"nprocs={nprocs} needs as many devices: {error}") from None
    return nprocs


def check_duration(seconds: float, name: str, is_zero_allowed: bool = True) -> float:
    """Check that `seconds` is a finite, non-negative number."""
    check_type(seconds, name, "pass seconds", int, float)
    if not (0 < seconds <= _YEAR_S or (is_zero_allowed and seconds == 0)):
        raise ValueError(f"{name}={seconds!r} is not a duration; pass seconds from 0 to {_YEAR_S}, a year")
    return seconds


def check_hang_timeout(seconds: float | None) -> float | None:
    return None if seconds is None else check_duration(seconds, "hang_timeout_s", False)


def check_timeout(timeout: timedelta) -> None:
    check_type(timeout, "timeout", "pass a datetime.timedelta", timedelta)
    if timeout <= timedelta():
        raise ValueError(f"timeout={timeout!r} leaves collectives no time; pass a positive timedelta")
    if timeout.total_seconds() > _YEAR_S:
        raise ValueError(f"timeout={timeout!r} is more than a year; the process group does not accept such a time-out")


def check_start_method(start_method: str | None) -> str:
    """The start method: the one asked for, or the fastest on this platform."""
    if start_method is None:
        # on other platforms, forking after torch was imported is unsafe
        return "zygote" if sys.platform == "linux" else "spawn"
    if start_method in _REFUSED:
        raise ValueError(
            f"start_method={start_method!r} is refused: {_REFUSED[start_method]}; the default, 'zygote', is as fast "
            "and safe"
        )
    if start_method not in START_METHODS:
        known = ", ".join(map(repr, START_METHODS))
        raise ValueError(f"start_method={start_method!r} does not exist; choose one of {known}, or None")
    return start_method


def check_platform() -> None:
    """Raise on platforms where processes could not be supervised."""
    if not hasattr(os, "fork"):
        raise UnisonoError(
            f"workers need a Unix, and this is {sys.platform}; use nprocs=1, DataParallel, whose replicas are threads, "
            "or WSL"
        )


def check_log_dir(log_dir: str | os.PathLike[str] | None) -> Path | None:
    if log_dir is None:
        return None
    check_type(log_dir, "log_dir", "pass the path of a directory", str, os.PathLike)
    if not os.fspath(log_dir):
        raise ValueError('log_dir="" names no directory; pass "." for the current one, or None to keep no files')
    return Path(log_dir)


def check_prefix(prefix: bool | None) -> bool | None:
    check_type(prefix, "prefix", "pass True, False or None", bool, NoneType)
    return prefix


def check_log_format(log_format: str) -> bool:
    """Whether lines are shown as JSON objects."""
    if log_format not in ("text", "json"):
        raise ValueError(f"log_format={log_format!r} does not exist; choose 'text' or 'json'")
    return log_format == "json"


def check_log_ranks(log_ranks: Collection[int] | None, count: int) -> tuple[int, ...] | None:
    if log_ranks is None:
        return None
    if isinstance(log_ranks, str | bytes) or not isinstance(log_ranks, Collection):
        raise TypeError(f"log_ranks={log_ranks!r} is of type {type(log_ranks).__name__}; pass ranks, as in [0]")
    for rank in log_ranks:
        check_integer(rank, "a rank of log_ranks", 0, f"the ranks are 0 to {count - 1}")
        if rank >= count:
            raise ValueError(f"log_ranks={list(log_ranks)} names rank {rank}; the ranks are 0 to {count - 1}")
    return tuple(sorted(set(log_ranks)))


def pick_num_threads(num_threads: int | None, num_loader_workers: int, count: int) -> int:
    """CPU threads per worker: the number given here or by OMP_NUM_THREADS, otherwise a fair share of the cores."""
    check_integer(num_loader_workers, "num_loader_workers", 0, "pass the num_workers of the DataLoader")
    if num_threads is not None:
        return check_integer(num_threads, "num_threads", 1, "pass an integer of at least 1, or None for a fair share")
    asked = os.environ.get("OMP_NUM_THREADS", "")
    is_asked = asked.isdecimal() and int(asked) > 0
    threads = int(asked) if is_asked else fair_num_threads(count, num_loader_workers)
    reason = "as OMP_NUM_THREADS says" if is_asked else f"a fair share of the cores for {count} workers"
    logger.info("%d CPU threads per worker, %s; spawn(..., num_threads=n) sets another number", threads, reason)
    return threads


def pick_cores(pin_cores: bool, count: int) -> list[set[int]] | None:
    """The cores of each worker if workers are to be pinned; otherwise None."""
    check_type(pin_cores, "pin_cores", "pass True or False", bool)
    if not pin_cores:
        return None
    cores = disjoint_cores(count)
    logger.info("workers are pinned to cores: %s", "; ".join(f"rank {r}: {sorted(own)}" for r, own in enumerate(cores)))
    return cores


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], first: Any = None) -> bytes:
    """Pickle the call, and what a worker needs before it.

    Raises:
        UnpicklableError: names what cannot be sent.
    """
    try:
        return dumps_call(fn, args, first)
    except Exception as error:
        named = [("fn", fn), *((f"args[{place}]", arg) for place, arg in enumerate(args))]
        name, part = next((each for each in named if not is_picklable(each[1])), named[0])
        raise UnpicklableError(
            f"{name}, a {type(part).__name__}, cannot be sent to the workers ({type(error).__name__}: "
            f"{error}){describe_unpicklable(part)}; create it inside fn, or pass what it is created from"
        ) from error
