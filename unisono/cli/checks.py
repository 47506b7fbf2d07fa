"""The checks of `unisono doctor`: each yields findings. None of them starts the runtime of a device in this process."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from subprocess import PIPE, Popen
from threading import Thread
from typing import IO, Any

import psutil
import torch

from unisono.cli.doctor import Finding, warning_if
from unisono.comm.selection import group_backend
from unisono.devices import family_names, get_backend
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

COPIES_LIMIT_S = 600.0
_COPY_S = 20.0  # a pair's, with the start of the device
_PEER_TO_PEER = (
    "NCCL_P2P_DISABLE=1 in the environment lets collectives go through main memory, where that helps; so may a kernel "
    "or BIOS without ACS and IOMMU (iommu=pt)"
)


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
        text = f"/dev/shm has {_amount(usage.total)}, {_amount(usage.free)} free"
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
        return f"{agent.launcher} announce {agent.num_nodes} machine(s): `unisono run` starts the ranks of this one"
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
        yield from _try_collectives(family, 2, "the output above may say more; docs/troubleshooting.md explains it")


def _has_two_devices(family: Backend) -> bool:
    try:
        return family.is_available() and family.device(1) is not None
    except ValueError:
        return False


def _try_collectives(family: Backend, count: int, advice_if_failed: str) -> Iterator[Finding]:
    try:
        yield from _measure(family, count, advice_if_failed)
    except Exception as error:
        notes = "; ".join([str(error), *getattr(error, "__notes__", ())])
        text = " ".join(f"{count} workers on {family.name} failed: {type(error).__name__}: {notes}".split())
        yield Finding("workers", "problem", text, advice_if_failed)


def _measure(family: Backend, count: int, advice_if_wrong: str) -> Iterator[Finding]:
    began = time.monotonic()
    # A daemon: a check that runs too long is abandoned, and ends with the program.
    timeout_s = WORKERS_LIMIT_S / 2
    context = spawn(measure_collectives, (), count, join=False, daemon=True, backend=family.name, timeout=timeout_s)
    results = context.join() or []
    start_s = max(each[0] for each in results) - began
    advice = "torch is imported once for all workers, which is slow over a network: install it on a local disk"
    yield warning_if(start_s > 20, "workers", f"{count} on {family.name}: first barrier after {start_s:.2f} s", advice)
    if not all(each[2] for each in results):
        text = f"all_reduce by {group_backend(family)} between {count} on {family.name} gives another sum"
        yield Finding("collectives", "problem", text, advice_if_wrong)
        return
    rate = f"{_LARGE_BYTES >> 20} MiB at {_LARGE_BYTES / results[0][1] / 1e9:.2f} GB/s"
    yield Finding(
        "collectives", "ok", f"all_reduce by {group_backend(family)} between {count} on {family.name}: {rate}"
    )


def measure_collectives(rank: int) -> tuple[float, float, bool]:
    """In a worker past its first barrier: the time, the seconds of an all_reduce, and whether one of whole numbers
    gives their sum."""
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
    tensor.fill_(rank + 1)
    total = all_reduce(tensor).cpu()
    return began, min(taken), bool((total == sum(range(1, world.world_size + 1))).all())


def check_copies() -> Iterator[Finding]:
    """Copy between all pairs of devices of each accelerated family, and let workers on all of them reduce."""
    families = [each for each in map(get_backend, family_names()) if each.is_accelerated() and each.device_count()]
    if not families:
        yield Finding("copies", "warning", "there is no accelerator here", "run it where there are some")
    for family in families:
        found = list(_pairs_of(family))
        yield from found
        if family.device_count() > 1 and all(each.state != "problem" for each in found):
            yield from _try_collectives(family, family.device_count(), _PEER_TO_PEER)


def _pairs_of(family: Backend) -> Iterator[Finding]:
    rates: dict[str, float] = {}
    for pair, answer in _copied(family.name):
        if answer is None:
            advice = f"{_PEER_TO_PEER}; the driver's log (dmesg) may say more"
            yield Finding("copies", "problem", f"a copy from {pair} does not end within {_COPY_S:g} s", advice)
            return
        if not answer["is_equal"]:
            advice = f"do not train on these until that is repaired; {_PEER_TO_PEER}"
            yield Finding("copies", "problem", f"what is copied from {pair} arrives with other bits", advice)
        rates[pair] = answer["rate"]
    typical = median(rates.values())
    for pair, rate in rates.items():
        if rate < typical / 4:
            text = f"from {pair}: {rate / 1e9:.2f} GB/s, while others typically have {typical / 1e9:.2f}"
            yield Finding(
                "copies", "warning", text, "look at the slot and the cable: the vendor's tool shows the links"
            )
    low, high = min(rates.values()) / 1e9, max(rates.values()) / 1e9
    yield Finding("copies", "ok", f"{len(rates)} ways on {family.name}, {low:.2f} to {high:.2f} GB/s")


def _copied(family_name: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The pairs, and what was found for each; None for one that does not end, which is the last."""
    command = [sys.executable, "-P", "-m", "unisono.cli.copies", family_name]
    lines: SimpleQueue[str] = SimpleQueue()
    process = Popen(command, stdout=PIPE, text=True)
    Thread(target=_read_lines, args=(process.stdout, lines), name="unisono-copies", daemon=True).start()
    try:
        while line := lines.get():
            pair = "{from} to {to}".format(**json.loads(line))
            try:
                answer = lines.get(timeout=_COPY_S)
            except Empty:
                yield pair, None
                return
            if answer:
                yield pair, json.loads(answer)
        if code := process.wait():
            raise RuntimeError(f"the program that copies on {family_name} has ended with code {code}")
    finally:
        process.kill()
        process.wait()


def _read_lines(stream: IO[str], lines: SimpleQueue[str]) -> None:
    """Body of the thread that reads what is copied; "" is the end."""
    for line in stream:
        lines.put(line)
    lines.put("")


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
