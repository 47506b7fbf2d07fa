"""Whether the kernel's out-of-memory killer ended a worker: death by SIGKILL.

The killer sends the same signal as `kill -9` and leaves no message with the process, but the kernel counts its victims:
in their control group, and on the machine, where those of other containers are included. It counts before it kills, so
the count includes any observed death.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from unisono.devices.cores import cgroup_directories, read_number

_ROOT = Path("/")
_COUNTERS = ("memory.events", "memory.oom_control")  # of versions 2 and 1 of control groups
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_WAY_OUT = (
    "a smaller batch, fewer loader workers (num_workers), less prefetch (prefetch_factor, prefetch) or "
    "fewer ranks on this machine need less"
)


class OomWatch:
    """Records the kernel's current counts of out-of-memory kills, to compare them with those after a worker's death;
    those of the control group of `pid`, by default this process. `root` is the root of the file system."""

    def __init__(self, pid: int | None = None, root: Path = _ROOT) -> None:
        group = next((each for each in cgroup_directories("memory", pid, root) if each.is_dir()), None)
        of_group = [group / name for name in _COUNTERS] if group is not None else []
        self._files = {"in its control group": of_group, "on the machine": [root / "proc/vmstat"]}
        self._of = pid, root
        self._before = self._count()

    def verdict(self) -> str:
        """What to append to "rank 1 (pid 5) was killed by SIGKILL": whether memory was the reason."""
        before = self._before
        rises = {where: count - before[where] for where, count in self._count().items() if where in before}
        if not rises:
            return "; this system does not report whether its out-of-memory killer did it"
        where = next((where for where, rise in rises.items() if rise > 0), "")
        if not where:
            return (
                "; the kernel counted no out-of-memory kill meanwhile, so another process sent the signal (kill -9, a "
                "scheduler, the end of a container)"
            )
        certainty = "" if where != "on the machine" else "perhaps "  # there, it may have been in another container
        nbytes, owner = memory_limit(*self._of)
        size = f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"
        return (
            f"; {certainty}the kernel's out-of-memory killer ended it ({rises[where]} {where} since the start); the "
            f"limit {owner} is {size}, for everything that runs there; {_WAY_OUT}"
        )

    def _count(self) -> dict[str, int]:
        """The counts that this system has."""
        found = {}
        for where, paths in self._files.items():
            for path in paths:
                with suppress(OSError, ValueError):
                    for line in path.read_text().splitlines():
                        # With the space: version 1 also has `oom_kill_disable`.
                        if line.startswith("oom_kill "):
                            found[where] = int(line.split()[1])
        return found


def memory_left() -> int:
    """The bytes of memory that this machine, or the control group of this process, has left."""
    left = psutil.virtual_memory().available
    for directory in cgroup_directories("memory"):
        limit, used = read_number(directory / _LIMITS[0]), read_number(directory / "memory.current")
        if limit is not None and used is not None:
            with suppress(OSError):  # what the kernel would drop
                stat = (directory / "memory.stat").read_text().split()
                used -= int(dict(zip(stat[::2], stat[1::2], strict=True)).get("inactive_file", 0))
            left = min(left, limit - used)
    return left


def memory_limit(pid: int | None = None, root: Path = _ROOT) -> tuple[int, str]:
    """The most bytes of memory that a process can have, by default this one, and the source of that limit, in words."""
    directories = cgroup_directories("memory", pid, root)
    limits = [read_number(directory / name) for directory in directories for name in _LIMITS]
    group = min((nbytes for nbytes in limits if nbytes is not None), default=None)
    machine = psutil.virtual_memory().total
    return (machine, "of the machine") if group is None or group >= machine else (group, "of its control group")
