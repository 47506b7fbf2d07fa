"""CPU cores: which ones this process may use, how ranks divide them, and how many torch uses in the calling thread.

The machine is read in a thin layer (`allowed_cores`, `cpu_quota`); the arithmetic is pure.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from unisono.backends.cgroups import cgroup_directories, read_number

_ROOT = Path("/")


@dataclass(frozen=True)
class Core:
    """One physical core.

    Attributes:
        cpus: its logical CPUs, hyperthreads of one another.
        node: its NUMA node.
    """

    cpus: frozenset[int]
    node: int = 0


def usable_cores() -> int:
    """The number of physical cores that this process may use: those it may run on, limited by its quota."""
    return _usable_cores_of(frozenset(_allowed_cpus()))


def fair_num_threads(count: int, num_loader_workers: int = 0) -> int:
    """CPU threads for each of `count` ranks of this machine, so that together they use each core once.

    Two workers with two threads each on two cores take twice as long as two with one thread each.

    Args:
        count: the number of ranks.
        num_loader_workers: per rank; each counts as much as the rank itself.
    """
    return max(1, usable_cores() // (count * (1 + num_loader_workers)))


def disjoint_cores(count: int) -> list[set[int]]:
    """Divide the logical CPUs that this process may run on among `count` workers, as `split_cores` does.

    Raises:
        ValueError: there are more workers than CPUs.
    """
    return split_cores(allowed_cores(), count)


def cores_near(index: int, mode: str) -> set[int]:
    """The logical CPUs near the GPU of that index, by torch.numa; `mode` is one of its `AffinityMode`."""
    from torch.numa.binding import AffinityMode, NumaOptions

    from unisono.torch_private import cpus_near

    gpu, *_ = inspect.signature(cpus_near).parameters  # gpu_index; in newer versions device_index
    found: set[int] = cpus_near(**{gpu: index}, numa_options=NumaOptions(AffinityMode(mode)))
    return found


def split_cores(cores: Sequence[Core], count: int) -> list[set[int]]:
    """Divide all logical CPUs among `count` workers: neighbours together, and the same number of cores for each, or one
    more.

    Equal NUMA nodes are not mixed if the number of workers is a multiple of theirs, or vice versa. The hyperthreads of
    a core stay together, unless there are more workers than cores.

    Raises:
        ValueError: there are more workers than CPUs.
    """
    ordered = sorted(cores, key=lambda core: (core.node, min(core.cpus)))
    cpus = [cpu for core in ordered for cpu in sorted(core.cpus)]
    if not 1 <= count <= len(cpus):
        raise ValueError(
            f"{count} workers cannot have a CPU of their own each where the process may run on {len(cpus)}; start from "
            f"1 to {len(cpus)} workers, or do not pin them"
        )
    units = [core.cpus for core in ordered] if count <= len(ordered) else [frozenset({cpu}) for cpu in cpus]
    bounds = [worker * len(units) // count for worker in range(count + 1)]
    return [set().union(*units[start:stop]) for start, stop in pairwise(bounds)]


def within_quota(cores: int, quota: float) -> int:
    """The number of cores that a quota, in CPUs, can keep fully busy; at least one, at most `cores`."""
    return max(1, min(cores, int(quota) if math.isfinite(quota) else cores))


def allowed_cores(root: Path = _ROOT) -> list[Core]:
    """The cores that this process may run on, each with the CPUs that the process may use.

    Args:
        root: the root of the file system with the topology; if it has none, psutil's counts are used.
    """
    topology = root / "sys/devices/system/cpu"
    cpus = _allowed_cpus()
    nodes = {cpu: node for node, members in _numa_nodes(root) for cpu in members}
    siblings = {cpu: _cpu_list(topology / f"cpu{cpu}/topology/thread_siblings_list") & cpus for cpu in cpus}
    if not all(cpu in together for cpu, together in siblings.items()):
        return [Core(frozenset(together), nodes.get(min(together), 0)) for together in _count_by_core(sorted(cpus))]
    return [Core(frozenset(siblings[cpu]), nodes.get(cpu, 0)) for cpu in sorted(cpus) if cpu == min(siblings[cpu])]


def cpu_quota(root: Path = _ROOT) -> float:
    """The CPU time that the control groups of this process allow, in CPUs; infinite without a limit."""
    return min((_quota_in(directory) for directory in cgroup_directories("cpu", root=root)), default=math.inf)


def parse_cpu_list(text: str) -> set[int]:
    """Parse the kernel's notation for a set: ``parse_cpu_list("0-2,8") == {0, 1, 2, 8}``."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for part in ends for cpu in range(int(part[0]), int(part[-1]) + 1)}


@contextmanager
def kept_num_threads() -> Iterator[None]:
    """Restore torch's number of threads after the block. It is partly global: setting it in one thread affects all."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _usable_cores_of(cpus: frozenset[int]) -> int:
    """Read once for each set of CPUs that the process may run on: a quota hardly ever changes during a program."""
    return within_quota(len(allowed_cores()), cpu_quota())


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _count_by_core(cpus: list[int]) -> list[list[int]]:
    """CPUs by core if only their total numbers are known: the same number per core as on the whole machine."""
    ways = max(1, (psutil.cpu_count() or 1) // (psutil.cpu_count(logical=False) or psutil.cpu_count() or 1))
    return [cpus[start : start + ways] for start in range(0, len(cpus), ways)]


def _cpu_list(path: Path) -> set[int]:
    with suppress(OSError, ValueError):
        return parse_cpu_list(path.read_text())
    return set()


def _numa_nodes(root: Path) -> Iterator[tuple[int, set[int]]]:
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        yield int(directory.name.removeprefix("node")), _cpu_list(directory / "cpulist")


def _quota_in(directory: Path) -> float:
    with suppress(OSError, ValueError):
        # Version 2 of control groups; version 1, below, writes -1 for no limit.
        quota, period = (directory / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    first, second = read_number(directory / "cpu.cfs_quota_us"), read_number(directory / "cpu.cfs_period_us")
    return first / second if first and second and first > 0 else math.inf
