"""Checks of this machine: versions, devices, cores, memory, files, limits, clock, environment."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from unisono.backends import NAMES, get_backend
from unisono.backends.cores import allowed_cores, cpu_quota, fair_num_threads, usable_cores
from unisono.cli.findings import Finding, State
from unisono.comm.selection import group_backend
from unisono.launch.hosts.environment import announced_agent, announced_place
from unisono.launch.hosts.environment_risks import environment_risks
from unisono.launch.watching.memory import memory_limit

OLDEST_TORCH = (2, 9)
SHARED_MEMORY = Path("/dev/shm")
_MIB, _GIB = 1 << 20, 1 << 30
_REMOTE = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse.")
_LONGEST_SOCKET_PATH = 107
_TIME_ERROR = 5  # adjtimex: the kernel's clock is not synchronized


def versions() -> Iterator[Finding]:
    """The interpreter, and the packages that this one depends on."""
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable}), {platform.platform()}")
    here = f"torch {torch.__version__}, " + ", ".join(map(_version, ("unisono", "psutil", "cloudpickle", "numpy")))
    oldest = ".".join(map(str, OLDEST_TORCH))
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        yield Finding("packages", "problem", here, f"torch {oldest} is the oldest that works: pip install 'torch>=2.9'")
    else:
        yield Finding("packages", "ok", here)
    if xla := _found_version("torch-xla"):
        is_pair = xla.split(".")[:2] == torch.__version__.split(".")[:2]
        advice = "" if is_pair else f"it works with a torch of its own version: pip install torch=={xla}"
        yield Finding("packages", "ok" if is_pair else "warning", f"torch-xla {xla}", advice)


def _found_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(name: str) -> str:
    return f"{name} {_found_version(name) or '(not installed)'}"


def devices() -> Iterator[Finding]:
    """The devices of every family. Checking initialises none of them."""
    families = [get_backend(name) for name in NAMES]
    for family in (each for each in families if each.is_available()):
        names = ", ".join(str(family.device(index)) for index in range(family.device_count()))
        more = "; logical: nprocs and devices may name more" if family.name == NAMES[-1] else ""
        yield Finding("devices", "ok", f"{names} (collectives by {group_backend(family)}){more}")
    for unused in filter(None, (family.unused_hardware() for family in families)):
        what, _, advice = unused.rpartition(": ")
        yield Finding("devices", "warning", what, advice)
    if missing := [each.name for each in families if not each.is_available()]:
        yield Finding("devices", "ok", f"no {', no '.join(missing)}")


def cores() -> Iterator[Finding]:
    """How many cores there are, how many this process may use, and how workers divide them."""
    usable, quota = usable_cores(), cpu_quota()
    shares = ", ".join(f"{fair_num_threads(count)} for {count}" for count in (2, 4, 8))
    text = (
        f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical, {usable} usable; "
        f"CPU threads of each worker: {shares} workers"
    )
    if quota < len(allowed_cores()):
        advice = f"the quota of the control group pays for {quota:g}: docker --cpus, in Kubernetes limits.cpu"
        yield Finding("cores", "note", text, advice)
    else:
        yield Finding("cores", "ok", text)


def memory() -> Iterator[Finding]:
    """How much memory there is before processes are killed."""
    limit, owner = memory_limit()
    free = psutil.virtual_memory().available
    text = f"the limit {owner} is {_amount(limit)}; {_amount(free)} of the machine's are free"
    if min(limit, free) < _GIB:
        advice = "a worker needs about 0.2 GiB before it holds any data: make room, or start fewer"
        yield Finding("memory", "warning", text, advice)
    else:
        yield Finding("memory", "ok", text)


def shared_memory() -> Iterator[Finding]:
    """The file system through which loader workers pass their batches."""
    if not SHARED_MEMORY.is_dir():
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{SHARED_MEMORY} has {_amount(usage.total)}, of which {_amount(usage.free)} are free"
    if usage.total <= 64 * _MIB or usage.free < 64 * _MIB:
        advice = (
            "loader workers leave batches there, and are killed by SIGBUS when it is full: docker run --shm-size=8g "
            "(or --ipc=host); in Kubernetes an emptyDir with medium: Memory mounted there; else num_workers=0"
        )
        yield Finding("shared memory", "warning", text, advice)
    else:
        yield Finding("shared memory", "ok", text)


def limits() -> Iterator[Finding]:
    """The limits of a process of this user."""
    import resource  # not on Windows

    def soft(which: int) -> float:
        limit = resource.getrlimit(which)[0]
        return float("inf") if limit == resource.RLIM_INFINITY else limit

    files, tasks, locked = (
        soft(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    )
    cores = "off" if soft(resource.RLIMIT_CORE) == 0 else "on"
    locking = "unlimited" if locked == float("inf") else _amount(int(locked))
    yield Finding(
        "limits", "ok", f"open files {files:g}, processes {tasks:g}, locked memory {locking}, core dumps {cores}"
    )
    if files <= 1024:
        advice = "loader workers send one file descriptor for each tensor: ulimit -n 65536"
        yield Finding("limits", "warning" if files < 1024 else "note", f"only {files:g} open files", advice)
    if tasks < 4096:
        advice = "threads count, too, and those of all processes of the user: ulimit -u 65536"
        yield Finding("limits", "warning", f"only {tasks:g} processes and threads", advice)
    if locked < _GIB and Path("/dev/infiniband").exists():
        advice = "InfiniBand registers memory: ulimit -l unlimited"
        yield Finding("limits", "warning", f"only {locking} of locked memory", advice)


def temporary_files() -> Iterator[Finding]:
    """Where the workers of a group meet."""
    place = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-doctor-") as directory:
            (Path(directory) / "probe").write_bytes(b"0" * 4096)
    except OSError as error:
        yield Finding(
            "temporary", "problem", f"{place} cannot be written to: {error}", "set TMPDIR to a place that can"
        )
        return
    free, kind = shutil.disk_usage(place).free, _file_system(place)
    state: State = "ok"
    advice = ""
    if kind.startswith(_REMOTE):
        state, advice = "warning", "workers meet in a locked file there, and not every network knows locks: set TMPDIR"
    elif free < _GIB:
        state, advice = "warning", "clear it up, or set TMPDIR"
    elif len(place) + 32 > _LONGEST_SOCKET_PATH:  # /pymp-xxxxxxxx/listener-xxxxxxxx
        state, advice = "warning", "the path is too long for the sockets of loader workers: set TMPDIR to a shorter one"
    yield Finding("temporary", state, f"{place}, {_amount(free)} free, {kind}", advice)


def _file_system(place: str) -> str:
    path = Path(place).resolve()
    mounted = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounted[each] for each in (path, *path.parents) if each in mounted), "unknown file system")


def clock() -> Iterator[Finding]:
    """Whether the clock is fine-grained, and synchronized with those of other machines."""
    resolution = time.get_clock_info("monotonic").resolution
    text = f"monotonic to {resolution * 1e9:g} ns"
    is_coarse = resolution > 1e-3
    yield Finding(
        "clock", "warning" if is_coarse else "ok", text, "short steps cannot be measured" if is_coarse else ""
    )
    if sys.platform != "linux":
        return
    # The buffer is larger than any `struct timex`; its zeros mean that nothing is to be changed.
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    if answer == _TIME_ERROR and not Path("/run/systemd/timesync/synchronized").exists():
        advice = "start chrony or systemd-timesyncd where logs of several machines are compared; one needs none"
        yield Finding("clock", "note", "the kernel says that the time of day follows no time server", advice)
    elif answer == -1 and ctypes.get_errno() != errno.EPERM:
        yield Finding("clock", "note", f"the kernel does not report it: {os.strerror(ctypes.get_errno())}")


def environment() -> Iterator[Finding]:
    """Which launcher started this process, and how environment variables affect a run."""
    agent, place = announced_agent(), None
    if agent is not None:
        text = f"{agent.launcher} tell of {agent.num_nodes} machine(s)"
        yield Finding("launcher", "note", text, "`unisono run script.py` reads them, and starts the ranks of this one")
    else:
        place = announced_place()
    if place is not None:
        text = f"{place.launcher} made this process rank {place.rank} of {place.world_size}"
        advice = (
            "spawn runs fn in it as that rank, and starts no worker; if RANK and WORLD_SIZE are left over, unset them"
        )
        yield Finding("launcher", "note", text, advice)
    elif agent is None:
        yield Finding("launcher", "ok", "none: a plain process, whose spawn starts the workers")
    for each in environment_risks(is_launched=bool(agent or place)):
        state: State = "warning" if each.is_harmful else "note"
        yield Finding("environment", state, f"{each.setting} {each.effect}", each.way_out)


def _amount(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
