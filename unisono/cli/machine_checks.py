"""Checks of this machine: versions, devices, cores, memory, files, limits, environment."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from unisono.backends import NAMES, get_backend
from unisono.backends.cores import allowed_cores, cpu_quota, fair_num_threads, usable_cores
from unisono.cli.findings import Finding, State, warning_if
from unisono.comm.selection import group_backend
from unisono.launch.hosts.environment import announced_agent, announced_place
from unisono.launch.hosts.environment_risks import environment_risks
from unisono.launch.watching.memory import memory_limit

OLDEST_TORCH = (2, 9)
SHARED_MEMORY = Path("/dev/shm")
_MIB, _GIB = 1 << 20, 1 << 30
_REMOTE = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse.")
_LONGEST_SOCKET_PATH = 107


def versions() -> Iterator[Finding]:
    """The interpreter, and the packages that this one depends on."""
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable}), {platform.platform()}")
    found = {}
    for name in ("torch", "torch-xla", "unisono", "psutil", "cloudpickle", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    torch_version, xla = torch.__version__.split(".")[:2], found.get("torch-xla", torch.__version__)
    state: State = "ok"
    advice = ""
    if tuple(map(int, torch_version)) < OLDEST_TORCH:
        state, advice = "problem", "torch 2.9 is the oldest that works: pip install 'torch>=2.9'"
    elif xla.split(".")[:2] != torch_version:
        state, advice = "warning", f"torch-xla works with a torch of its own version: pip install torch=={xla}"
    yield Finding("packages", state, ", ".join(f"{name} {number}" for name, number in found.items()), advice)


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
    shares = ", ".join(f"{fair_num_threads(count)} for {count}" for count in (2, 4, 8))
    text = (
        f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical, {usable_cores()} usable; "
        f"CPU threads of each worker: {shares} workers"
    )
    if (quota := cpu_quota()) < len(allowed_cores()):
        advice = f"the quota of the control group pays for {quota:g}: docker --cpus, in Kubernetes limits.cpu"
        yield Finding("cores", "note", text, advice)
    else:
        yield Finding("cores", "ok", text)


def memory() -> Iterator[Finding]:
    """How much memory there is before processes are killed, and how much of it they can share."""
    limit, owner = memory_limit()
    free = psutil.virtual_memory().available
    text = f"the limit {owner} is {_amount(limit)}; {_amount(free)} of the machine's are free"
    advice = "a worker needs about 0.2 GiB before it holds any data: make room, or start fewer"
    yield warning_if(min(limit, free) < _GIB, "memory", text, advice)
    yield from _shared_memory()


def _shared_memory() -> Iterator[Finding]:
    """The file system through which loader workers pass their batches."""
    if not SHARED_MEMORY.is_dir():
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{SHARED_MEMORY} has {_amount(usage.total)}, of which {_amount(usage.free)} are free"
    advice = (
        "loader workers leave batches there, and are killed by SIGBUS when it is full: docker run --shm-size=8g "
        "(or --ipc=host); in Kubernetes an emptyDir with medium: Memory mounted there; else num_workers=0"
    )
    yield warning_if(usage.total <= 64 * _MIB or usage.free < 64 * _MIB, "shared memory", text, advice)


def limits() -> Iterator[Finding]:
    """The limits of a process of this user."""
    import resource  # not on Windows

    files, tasks = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    advice = "loader workers send a file descriptor for each tensor: ulimit -n 65536"
    yield warning_if(0 <= files <= 1024, "limits", f"open files: {_limit(files)}", advice)
    advice = "those of all programs of the user count: ulimit -u 65536"
    yield warning_if(0 <= tasks < 4096, "limits", f"processes and threads: {_limit(tasks)}", advice)


def _limit(count: int) -> str:
    return "unlimited" if count < 0 else str(count)  # RLIM_INFINITY is -1


def temporary_files() -> Iterator[Finding]:
    """Where the workers of a group meet."""
    place = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-doctor-") as directory:
            (Path(directory) / "probe").write_bytes(b"0" * 4096)
    except OSError as error:
        text = f"{place} cannot be written to: {error}"
        yield Finding("temporary", "problem", text, "set TMPDIR to a place that can")
        return
    free, kind = shutil.disk_usage(place).free, _file_system(place)
    advice = ""
    if kind.startswith(_REMOTE):
        advice = "workers meet in a locked file there, and not every network knows locks: set TMPDIR"
    elif free < _GIB:
        advice = "clear it up, or set TMPDIR"
    elif len(place) + 32 > _LONGEST_SOCKET_PATH:  # /pymp-xxxxxxxx/listener-xxxxxxxx
        advice = "the path is too long for the sockets of loader workers: set TMPDIR to a shorter one"
    yield Finding("temporary", "warning" if advice else "ok", f"{place}, {_amount(free)} free, {kind}", advice)


def _file_system(place: str) -> str:
    path = Path(place).resolve()
    mounted = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounted[each] for each in (path, *path.parents) if each in mounted), "unknown file system")


def launcher() -> str:
    """What has given this process a place among others, and what follows, in words; empty for a plain process."""
    if agent := announced_agent():
        return f"{agent.launcher} tell of {agent.num_nodes} machine(s): `unisono run` starts the ranks of this one"
    if place := announced_place():
        return f"{place.launcher} made this process rank {place.rank} of {place.world_size}: spawn runs fn as that rank"
    return ""


def environment() -> Iterator[Finding]:
    """Which launcher started this process, and how environment variables affect a run."""
    found = launcher()
    if found:
        yield Finding("launcher", "note", found, "if these variables are left over, unset them")
    else:
        yield Finding("launcher", "ok", "none: a plain process, whose spawn starts the workers")
    for each in environment_risks(is_launched=bool(found)):
        state: State = "warning" if each.is_harmful else "note"
        yield Finding("environment", state, f"{each.setting} {each.effect}", each.way_out)


def _amount(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
