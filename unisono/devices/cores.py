"""CPU cores: how many this process may use, how ranks divide them, and how many torch uses in the calling thread; and
the control groups, of version 1 or 2, that limit a process."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from unisono.devices import CPU, family_names, get_backend

_ROOT = Path("/")
_MOUNT = Path("sys/fs/cgroup")


def usable_cores() -> int:
    """The number of physical cores that this process may use: those it may run on, limited by its quota."""
    return _usable_cores_of(frozenset(_allowed_cpus()))


def fair_num_threads(count: int, num_loader_workers: int = 0) -> int:
    """CPU threads for each of `count` ranks of this machine, so that together they use each core once. Each rank's
    loader workers count as much as the rank itself."""
    return max(1, usable_cores() // (count * (1 + num_loader_workers)))


def workers_per_node(word: str, family: str | None = None) -> tuple[int, str]:
    """The number of workers that torchrun's words "auto", "gpu" and "cpu" mean here, and the family of their devices.

    "gpu" is one per accelerator, "cpu" one per core that this process may use, "auto" the former if there are
    accelerators, otherwise the latter. ValueError if there is no such word, or no accelerator (of `family`).
    """
    if word not in ("auto", "gpu", "cpu"):
        raise ValueError(f"-n {word}: {word!r} is neither an integer of at least 1, nor auto, gpu or cpu")
    named = family_names() if family is None else (family,)
    if word != CPU:
        for backend in map(get_backend, named):
            if backend.is_accelerated() and backend.is_available():
                return backend.device_count(), backend.name
    if word == "gpu":
        kinds = ", ".join([each for each in named if each != CPU] or named)
        raise ValueError(f"-n gpu: this machine has no accelerator of {kinds}; pass -n cpu, or a number")
    return usable_cores(), CPU


def cores_near(index: int, mode: str) -> set[int]:
    """The logical CPUs near the GPU of that index, by torch.numa; `mode` is one of its `AffinityMode`."""
    from torch.numa.binding import AffinityMode, NumaOptions

    from unisono.torch_private import cpus_near

    gpu, *_ = inspect.signature(cpus_near).parameters  # gpu_index; in newer versions device_index
    found: set[int] = cpus_near(**{gpu: index}, numa_options=NumaOptions(AffinityMode(mode)))
    return found


def allowed_cores(root: Path = _ROOT) -> int:
    """The number of physical cores that this process may run on: by the topology, otherwise by psutil's counts."""
    cpus = _allowed_cpus()
    topology = root / "sys/devices/system/cpu"
    try:  # the hyperthreads of a core have the same list
        return len({(topology / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus})
    except OSError:
        logical = psutil.cpu_count() or 1
        return math.ceil(len(cpus) / (logical // (psutil.cpu_count(logical=False) or logical)))


def cpu_quota(root: Path = _ROOT) -> float:
    """The CPU time that the control groups of this process allow, in CPUs; infinite without a limit."""
    return min((_quota_in(directory) for directory in cgroup_directories("cpu", root=root)), default=math.inf)


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
    return max(1, int(min(allowed_cores(), cpu_quota())))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota_in(directory: Path) -> float:
    with suppress(OSError, ValueError):
        # Version 2 of control groups; version 1, below, writes -1 for no limit.
        quota, period = (directory / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    first, second = read_number(directory / "cpu.cfs_quota_us"), read_number(directory / "cpu.cfs_period_us")
    return first / second if first and second and first > 0 else math.inf


def cgroup_directories(controller: str, pid: int | None = None, root: Path = _ROOT) -> list[Path]:
    """The directories in which a controller ("cpu", "memory") limits a process, its own first, then those above it.

    In a container, directories above it may not exist. `pid` None is the calling process.
    """
    try:
        lines = (root / "proc" / str(pid or "self") / "cgroup").read_text().splitlines()
    except OSError:
        return []
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    paths = {name: path for _, names, path in entries for name in names.split(",")}
    path = paths.get(controller, paths.get(""))
    if path is None:
        return []
    mount = root / _MOUNT / (controller if controller in paths else "")  # version 1 has a hierarchy for each controller
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def read_number(path: Path) -> int | None:
    """The number in a file; None if the file contains a word ("max"), or does not exist."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
