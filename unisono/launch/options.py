"""The options of a start, by `spawn` and by `unisono run`: each has its name, type, default and check here.

`SpawnOptions` repeats names and types for type checkers, which compare it with `Options`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from types import NoneType
from typing import Literal, TypedDict

from unisono.arguments import check_choice, check_integer, check_type, explain_unknown_names
from unisono.devices.cores import fair_num_threads
from unisono.protocols import Engine

logger = logging.getLogger(__name__)

_YEAR_S = 365 * 24 * 3600


@explain_unknown_names()
@dataclass(frozen=True)
class Output:
    """What happens to the output of workers, for `spawn(..., output=Output(...))`.

    Attributes:
        log_dir: the parent of this run's log directory: each rank's stdout and stderr.
        profile: the steps to profile by torch.profiler, and on which ranks, such as "10:13" (steps 10 to 12, from 1, on
            all) or "10:13@0,1"; the traces are in the log directory, and `unisono report --trace` merges them.
        ranks: show the output of these ranks only; the log files contain every rank's.
        prefix: begin each line with "[rank 1] "; "several" does so on stdout only once a second rank has written there;
            None does so on stderr and leaves stdout unchanged.

    Raises:
        TypeError, ValueError: a value is invalid.
    """

    log_dir: str | os.PathLike[str] | None = None
    ranks: Collection[int] | None = None
    prefix: bool | Literal["several"] | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        check_type(self.log_dir, "log_dir", "pass the path of a directory", str, os.PathLike, NoneType)
        if self.log_dir is not None and not os.fspath(self.log_dir):
            raise ValueError('log_dir="" names no directory; pass "." for the current one, or None to keep no files')
        if isinstance(self.ranks, str | bytes) or not isinstance(self.ranks, Collection | None):
            raise TypeError(f"ranks={self.ranks!r} is of type {type(self.ranks).__name__}; pass ranks, as in [0]")
        for rank in self.ranks or ():
            check_integer(rank, "a rank of ranks", 0, "pass ranks, as in [0]")
        if self.profile is not None:
            self.profiled(0)
            if self.log_dir is None:
                raise ValueError(f"profile={self.profile!r} needs a place for the traces; pass log_dir as well")
        if self.prefix != "several":
            check_type(self.prefix, "prefix", "pass True, False, 'several' or None", bool, NoneType)

    def profiled(self, rank: int) -> range | None:
        """The steps of a rank that are profiled."""
        found = re.fullmatch(r"(\d+):(\d+)(?:@(\d+(?:,\d+)*))?", self.profile or "0:0")
        if found is None or (self.profile is not None and not 0 < int(found[1]) < int(found[2])):
            raise ValueError(
                f"profile={self.profile!r} names no steps; write the first and the one after the last, as in 10:13, "
                "and ranks after it, as in 10:13@0,1"
            )
        is_chosen = self.profile is not None and (found[3] is None or str(rank) in found[3].split(","))
        return range(int(found[1]), int(found[2])) if is_chosen else None


@explain_unknown_names()
@dataclass(frozen=True)
class Cores:
    """How workers share the CPU cores of a machine, for `spawn(..., cores=Cores(...))`.

    Attributes:
        num_threads: CPU threads per worker; None uses OMP_NUM_THREADS, or else divides the usable cores evenly.
        num_loader_workers: DataLoader workers per worker, which then also get their share of the cores.
        pin: keep each worker, and the processes it starts, to the cores near its GPU, as torch.numa has them: of the
            GPU's "node" or "socket", an "exclusive" part of its node, or one "core-complex".

    Raises:
        TypeError, ValueError: a value is invalid.
    """

    num_threads: int | None = None
    num_loader_workers: int = 0
    pin: str | None = None

    def __post_init__(self) -> None:
        if self.num_threads is not None:
            check_integer(self.num_threads, "num_threads", 1, "pass an integer of at least 1, or None for a fair share")
        check_integer(self.num_loader_workers, "num_loader_workers", 0, "pass the num_workers of the DataLoader")
        check_type(self.pin, "pin", "pass a mode of torch.numa, such as 'node', or None", str, NoneType)
        if self.pin is not None:
            check_choice(self.pin, "pin", *NEAR_GPUS)

    def threads_of_each(self, count: int) -> int:
        """The CPU threads of each of `count` workers."""
        if self.num_threads is not None:
            return self.num_threads
        asked = os.environ.get("OMP_NUM_THREADS", "")
        is_asked = asked.isdecimal() and int(asked) > 0
        threads = int(asked) if is_asked else fair_num_threads(count, self.num_loader_workers)
        reason = "as OMP_NUM_THREADS says" if is_asked else f"a fair share of the cores for {count} workers"
        logger.info("%d CPU threads per worker, %s; spawn(..., cores=n) sets another number", threads, reason)
        return threads


NEAR_GPUS = ("node", "socket", "exclusive", "core-complex")


class SpawnOptions(TypedDict, total=False):
    """The keyword-only arguments of `spawn`, whose docstring describes each; `Options` has their defaults."""

    backend: str | None
    start_method: str | None
    cores: int | Cores | None
    timeout: float | timedelta
    hang_timeout_s: float | None
    max_restarts: int
    grace_s: float
    output: Output
    process_group: Literal["gloo"] | None
    engine: str | Engine | None
    snapshot_every: int | None


@dataclass(frozen=True)
class Options:
    """How a group is started, watched and ended: the arguments of `spawn`, and `daemon`: end the workers when the
    calling process exits. TypeError, ValueError: an option is invalid."""

    backend: str | None = None
    start_method: str | None = None
    cores: int | Cores | None = None
    timeout: float | timedelta = 1800.0
    hang_timeout_s: float | None = None
    max_restarts: int = 0
    grace_s: float = 5.0
    output: Output = Output()
    process_group: Literal["gloo"] | None = None
    engine: str | Engine | None = None
    snapshot_every: int | None = None
    daemon: bool = False

    def __post_init__(self) -> None:
        if self.start_method not in ("zygote", "spawn", None):
            raise ValueError(
                f"start_method={self.start_method!r} does not exist; choose 'zygote', which is as fast as 'fork' and "
                "safe, 'spawn', or None"
            )
        check_type(self.cores, "cores", "pass CPU threads per worker, or unisono.Cores(...)", int, Cores, NoneType)
        if isinstance(self.cores, int):
            check_integer(self.cores, "cores", 1, "pass CPU threads per worker, or None for a fair share")
        _check_seconds(self.timeout_s if isinstance(self.timeout, timedelta) else self.timeout, "timeout")
        if self.hang_timeout_s is not None:
            _check_seconds(self.hang_timeout_s, "hang_timeout_s")
        check_integer(self.max_restarts, "max_restarts", 0, "pass how often the group may be restarted")
        _check_seconds(self.grace_s, "grace_s", is_zero_allowed=True)
        check_type(self.output, "output", "pass unisono.Output(...)", Output)
        if self.snapshot_every is not None:
            check_integer(self.snapshot_every, "snapshot_every", 1, "pass a number of optimizer steps, or None")

    def check_ranks(self, count: int) -> None:
        """ValueError: the output of a rank outside the `count` ranks is asked for."""
        if outside := [rank for rank in self.output.ranks or () if rank >= count]:
            raise ValueError(f"Output(ranks=...) names rank {outside[0]}; the ranks are 0 to {count - 1}")

    @property
    def timeout_s(self) -> float:
        """The seconds that a collective waits for a peer."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout

    @property
    def shared_cores(self) -> Cores:
        """How workers share the cores."""
        return self.cores if isinstance(self.cores, Cores) else Cores(num_threads=self.cores)

    @property
    def chosen_start_method(self) -> str:
        """The start method: the one asked for, or the fastest on this platform."""
        # On other platforms, forking after torch was imported is unsafe.
        return self.start_method or ("zygote" if sys.platform == "linux" else "spawn")

    @property
    def needs_process(self) -> bool:
        """Whether a single worker needs a process of its own."""
        is_output_plain = not self.output.prefix and self.output == Output(prefix=self.output.prefix)
        wanted = (self.max_restarts, self.start_method, self.cores, self.hang_timeout_s, self.snapshot_every)
        return any(wanted) or not is_output_plain


def _check_seconds(seconds: float, name: str, is_zero_allowed: bool = False) -> None:
    """Check that `seconds` is a finite number, positive or, if that is allowed, 0."""
    check_type(seconds, name, "pass seconds", int, float)
    if not (0 < seconds <= _YEAR_S or (is_zero_allowed and seconds == 0)):
        least = "from 0" if is_zero_allowed else "above 0"
        raise ValueError(f"{name}={seconds!r} is not a duration; pass seconds {least}, up to {_YEAR_S}, a year")
