"""Whether the kernel's out-of-memory killer ended a worker: death by SIGKILL, reported with its recent memory use.

The killer sends the same signal as `kill -9` and leaves no message with the process, but the kernel counts its victims:
in their control group, and on the machine, where those of other containers are included. It counts before it kills, so
the count already includes a death that has been observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from unisono.backends.cgroups import cgroup_directories, read_number
from unisono.launch.watching.monitor import Sample

_ROOT = Path("/")
_COUNTERS = ("memory.events", "memory.oom_control")  # of versions 2 and 1 of control groups
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_GROWN = 1.1  # times the lowest point, from which on memory has grown
_WAY_OUT = (
    "a smaller batch, fewer loader workers (num_workers), less prefetch (prefetch_factor, prefetch) or "
    "fewer ranks on this machine need less"
)


class OomWatch:
    """Records the kernel's current counts of out-of-memory kills, to compare them with those after a worker's death.

    Args:
        pid: the worker, or any process of its control group; None uses the calling process.
        root: the root of the file system.
    """

    def __init__(self, pid: int | None = None, root: Path = _ROOT) -> None:
        group = next((each for each in cgroup_directories("memory", pid, root) if each.is_dir()), None)
        self._group = [group / name for name in _COUNTERS] if group else []
        self._machine = [root / "proc/vmstat"]
        self._limit = memory_limit(pid, root)
        self._before = _kills(self._group), _kills(self._machine)

    def verdict(self, curve: Sequence[Sample]) -> str:
        """What to append to "rank 1 (pid 5) was killed by SIGKILL": whether memory was the reason, with its history.

        Args:
            curve: the worker's samples, oldest first, as `Monitor.curve` returns them.
        """
        in_group, on_machine = _rise(self._before[0], self._group), _rise(self._before[1], self._machine)
        if in_group is None and on_machine is None:
            return f"; this system does not report whether its out-of-memory killer did it{_last_seen(curve)}"
        if not in_group and not on_machine:
            return (
                "; the kernel counted no out-of-memory kill meanwhile, so another process sent the signal (kill -9, a "
                f"scheduler, the end of a container){_last_seen(curve)}"
            )
        certainty = "" if in_group else "most likely " if in_group is None else "perhaps "
        ground = f"{in_group} in its control group" if in_group else f"{on_machine} on the machine"
        nbytes, owner = self._limit
        return (
            f"; {certainty}the kernel's out-of-memory killer ended it ({ground} since the start): {_story(curve)}; the "
            f"limit {owner} is {_size(nbytes)}, for everything that runs there; {_WAY_OUT}"
        )


def memory_limit(pid: int | None = None, root: Path = _ROOT) -> tuple[int, str]:
    """The most bytes of memory that a process can have, and the source of that limit, in words.

    Args:
        pid: the process; None uses the calling one.
        root: the root of the file system.
    """
    directories = cgroup_directories("memory", pid, root)
    limits = [read_number(directory / name) for directory in directories for name in _LIMITS]
    group = min((nbytes for nbytes in limits if nbytes is not None), default=None)
    machine = psutil.virtual_memory().total
    return (machine, "of the machine") if group is None or group >= machine else (group, "of its control group")


def _kills(paths: Iterable[Path]) -> int | None:
    """The count in the first of these files that contains one; None if none does."""
    for path in paths:
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                # With the space: version 1 also has `oom_kill_disable`.
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _rise(before: int | None, paths: Iterable[Path]) -> int | None:
    after = _kills(paths)
    return None if before is None or after is None else after - before


def _story(curve: Sequence[Sample]) -> str:
    """Describe how the memory grew."""
    if len(curve) < 2:
        return f"how its memory grew is not known{_last_seen(curve)}"
    last, lowest = curve[-1], min(reversed(curve), key=lambda sample: sample.rss)  # the latest of the lowest
    if last.rss < _GROWN * lowest.rss:
        return f"its own memory had not grown, so something else has used up the memory{_last_seen(curve)}"
    return f"its memory grew from {_size(lowest.rss)} to {_size(last.rss)} in {last.at - lowest.at:.1f} s"


def _last_seen(curve: Sequence[Sample]) -> str:
    return f"; it had {_size(curve[-1].rss)} of memory when it was last sampled" if curve else ""


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"
