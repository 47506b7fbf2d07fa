"""The checks of `unisono doctor`: each yields findings. None of them starts the runtime of a device in this process."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from unisono.backends import family_names, get_backend
from unisono.cli.doctor import Finding, warning_if
from unisono.comm.selection import group_backend
from unisono.launch.hosts.endpoint import addresses_of, is_served, is_this_machine, split_endpoint, unknown_interfaces
from unisono.launch.hosts.environment import announced_agent, announced_place
from unisono.launch.spawn import spawn
from unisono.launch.watching.memory import memory_limit
from unisono.protocols import Backend
from unisono.training.collectives import all_reduce
from unisono.world import current_world

WORKERS_LIMIT_S = 120.0
_MIB, _GIB = 1 << 20, 1 << 30
_LARGE_BYTES = 64 << 20


def check_devices() -> Iterator[Finding]:
    """The devices of every family, or why it has none."""
    for name in family_names():
        try:
            family = get_backend(name)
        except ImportError as error:
            what, _, advice = str(error).rpartition("; ")
            yield Finding("devices", "warning", what, advice)
            continue
        if family.is_available():
            names = ", ".join(str(family.device(index)) for index in range(family.device_count()))
            yield Finding("devices", "ok", f"{names} (collectives by {group_backend(family)})")
        else:
            yield Finding("absent", "ok", f"none of {name}: {family.unavailable_reason() or 'there is none here'}")
        if unused := family.unused_hardware():
            yield Finding("devices", "warning", *unused.split(": ", 1))


def check_resources() -> Iterator[Finding]:
    """How much memory there is before processes are killed, and how much of it they can share; open files, and space
    for temporary ones."""
    import resource  # not on Windows

    limit, owner = memory_limit()
    free = psutil.virtual_memory().available
    text = f"the limit {owner} is {_amount(limit)}; {_amount(free)} are free"
    advice = "a worker needs about 0.2 GiB before it holds any data: make room, or start fewer"
    yield warning_if(min(limit, free) < _GIB, "memory", text, advice)
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        text = f"/dev/shm has {_amount(usage.total)}, of which {_amount(usage.free)} are free"
        advice = (
            "loader workers leave batches there, and are killed by SIGBUS when it is full: docker run --shm-size=8g "
            "(or --ipc=host); in Kubernetes an emptyDir with medium: Memory mounted there; else num_workers=0"
        )
        yield warning_if(min(usage.total - 1, usage.free) < 64 * _MIB, "shared memory", text, advice)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "loader workers send one for each tensor: ulimit -n 65536"
    yield warning_if(0 <= limit < 1025, "limits", f"open files: {limit if limit >= 0 else 'unlimited'}", advice)
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    yield warning_if(free < _GIB, "temporary", f"{place}, {_amount(free)} free", "clear it up, or set TMPDIR")


def check_environment() -> Iterator[Finding]:
    """Which launcher started this process, and which environment variables affect a run."""
    yield Finding("launcher", "ok", describe_launcher() or "none: a plain process, whose spawn starts the workers")
    for text in unknown_interfaces():
        yield Finding("environment", "warning", f"{text}, so workers cannot meet", "name an existing one, or unset it")


def describe_launcher() -> str:
    """What has given this process a place among others, in words; empty for a plain process."""
    if agent := announced_agent():
        return f"{agent.launcher} tell of {agent.num_nodes} machine(s): `unisono run` starts the ranks of this one"
    if place := announced_place():
        return f"{place.launcher} made this process rank {place.rank} of {place.world_size}: spawn runs fn as that rank"
    return ""


def check_workers() -> Iterator[Finding]:
    """Start two workers of each family that has two devices, and let them run collectives."""
    if found := describe_launcher():
        advice = "run it again in a plain shell of this machine; if these variables are left over, unset them"
        yield Finding("workers", "warning", f"not started: {found}", advice)
        return
    for family in filter(_has_two_devices, map(get_backend, family_names())):
        try:
            yield from _try_collectives(family)
        except Exception as error:
            notes = "; ".join([str(error), *getattr(error, "__notes__", ())])
            text = " ".join(f"2 workers on {family.name} failed: {type(error).__name__}: {notes}".split())
            advice = "the output above may say more; docs/troubleshooting.md explains each message"
            yield Finding("workers", "problem", text, advice)


def _has_two_devices(family: Backend) -> bool:
    try:
        return family.is_available() and family.device(1) is not None
    except ValueError:
        return False


def _try_collectives(family: Backend) -> Iterator[Finding]:
    began = time.monotonic()
    # A daemon: a check that runs too long is abandoned, and ends with the program.
    timeout_s = WORKERS_LIMIT_S / 2
    context = spawn(measure_collectives, (), 2, join=False, daemon=True, backend=family.name, timeout=timeout_s)
    results = context.join() or []
    start_s = max(each[0] for each in results) - began
    advice = "torch is imported once for all workers, which is slow over a network: install it on a local disk"
    yield warning_if(start_s > 20, "workers", f"2 on {family.name}: first barrier after {start_s:.2f} s", advice)
    rate = f"{_LARGE_BYTES >> 20} MiB at {_LARGE_BYTES / results[0][1] / 1e9:.2f} GB/s"
    yield Finding("collectives", "ok", f"all_reduce by {group_backend(family)} between 2 on {family.name}: {rate}")


def measure_collectives(rank: int) -> tuple[float, float]:
    """In a worker that has passed its first barrier: the time, and the seconds of an all_reduce."""
    began = time.monotonic()
    world = current_world()
    tensor = torch.zeros(_LARGE_BYTES // 4, device=world.device)
    taken = []
    for _ in range(6):  # the first one opens connections
        world.backend.synchronize(world.device)
        start = time.monotonic()
        all_reduce(tensor)
        world.backend.synchronize(world.device)
        taken.append(time.monotonic() - start)
    return began, min(taken)


def check_endpoint(endpoint: str) -> Iterator[Finding]:
    """Whether a rendezvous can be served by this machine, or reached from it."""
    host, port = split_endpoint(endpoint)
    if not addresses_of(host):
        yield Finding("endpoint", "problem", f"{endpoint}: the host has no address", "name a host that is known")
    elif is_served(host, port):
        yield Finding("endpoint", "ok", f"{endpoint} answers; whatever listens there should be your rendezvous")
    elif is_this_machine(host):
        yield Finding("endpoint", "ok", f"{endpoint} is on this machine, and free")
    else:
        advice = "start the agent of that machine first; else it is down, or a firewall drops what comes to that port"
        yield Finding("endpoint", "warning", f"{endpoint} does not answer", advice)


def _amount(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
