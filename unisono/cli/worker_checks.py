"""Real workers, started the way a run starts them, and their collectives."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from unisono.backends import NAMES, get_backend
from unisono.cli.findings import Finding
from unisono.comm.selection import group_backend
from unisono.launch.hosts.environment import announced_agent, announced_place
from unisono.launch.spawn import spawn
from unisono.parallel.collectives import all_reduce
from unisono.protocols import Backend
from unisono.world import current_world

NUM_WORKERS = 2
LIMIT_S = 120.0
_LARGE_BYTES = 64 << 20
_SLOW_START_S = 20.0
_SLOW_FORK_S = 2.0
_SEE = "the output above may say more; docs/troubleshooting.md explains each message"


def start_methods() -> Iterator[Finding]:
    """Whether the kernel supports the fast start method."""
    lacks = _missing()
    if lacks:
        advice = "workers are started one by one (start_method='spawn'), which takes seconds"
        yield Finding("start methods", "note", f"spawn only: {lacks}", advice)
    else:
        yield Finding("start methods", "ok", "zygote, spawn")


def _missing() -> str:
    if sys.platform != "linux":
        return f"the zygote needs Linux, and this is {sys.platform}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"this kernel, or its sandbox, has no pidfd_open ({error})"
    return ""


def workers() -> Iterator[Finding]:
    """Start two workers of each family that has two devices, and let them run collectives."""
    if launcher := _launcher():
        text = f"not started: {launcher} has made this process one of several ranks, so spawn starts no workers"
        yield Finding("workers", "note", text, "run it again in a plain shell of this machine")
        return
    for family in filter(_has_two, map(get_backend, NAMES)):
        try:
            yield from _try_collectives(family)
        except Exception as error:
            notes = "; ".join([str(error), *getattr(error, "__notes__", ())])
            text = f"{NUM_WORKERS} workers on {family.name} failed: {type(error).__name__}: {notes}"
            yield Finding("workers", "problem", " ".join(text.split()), _SEE)


def _launcher() -> str:
    """The launcher that has given this process a place among others; empty for a plain process."""
    agent = announced_agent()
    place = None if agent is not None else announced_place()
    return agent.launcher if agent is not None else place.launcher if place is not None else ""


def _has_two(family: Backend) -> bool:
    try:
        return family.is_available() and family.device(NUM_WORKERS - 1) is not None
    except ValueError:
        return False


def _try_collectives(family: Backend) -> Iterator[Finding]:
    first_s, _ = _run(family, tell_start)
    second_s, measured = _run(family, measure_collectives)
    text = f"{NUM_WORKERS} on {family.name}: first barrier after {first_s:.2f} s, the next time after {second_s:.3f} s"
    if first_s > _SLOW_START_S:
        advice = (
            "torch is imported once for all workers, which is slow from a network file system: install "
            "it on a local disk"
        )
        yield Finding("workers", "warning", text, advice)
    elif second_s > _SLOW_FORK_S:
        yield Finding("workers", "warning", text, "the machine is busy: check what else runs on it")
    else:
        yield Finding("workers", "ok", text)
    latency_s, large_s = measured[0][1:]
    rate = _LARGE_BYTES / large_s / 1e9
    yield Finding(
        "collectives",
        "ok",
        f"all_reduce by {group_backend(family)} between {NUM_WORKERS} on {family.name}: "
        f"4 B in {latency_s * 1e3:.2f} ms, {_LARGE_BYTES >> 20} MiB at {rate:.2f} GB/s",
    )


def _run(family: Backend, fn: Callable[[int], Any]) -> tuple[float, list[Any]]:
    """Seconds from the call until the last worker has passed its first barrier; and the results."""
    began = time.monotonic()
    context = spawn(
        fn,
        nprocs=NUM_WORKERS,
        join=False,
        daemon=True,  # a check that runs too long is abandoned, and ends with the program
        backend=family.name,
        timeout=timedelta(seconds=LIMIT_S / 2),
    )
    results = context.join() or []
    return max(each[0] for each in results) - began, results


def tell_start(rank: int) -> tuple[float]:
    """In a worker that has passed its first barrier: the time, comparable between processes."""
    return (time.monotonic(),)


def measure_collectives(rank: int) -> tuple[float, float, float]:
    """In a worker: the time, and the seconds that a small and a large all_reduce take."""
    began = time.monotonic()
    return began, _all_reduce_s(1, 50), _all_reduce_s(_LARGE_BYTES // 4, 5)


def _all_reduce_s(count: int, repeats: int) -> float:
    world = current_world()
    tensor = torch.zeros(count, device=world.device)
    taken = []
    for _ in range(repeats + 1):  # the first one opens connections
        world.backend.synchronize(world.device)
        began = time.monotonic()
        all_reduce(tensor)
        world.backend.synchronize(world.device)
        taken.append(time.monotonic() - began)
    return statistics.median(taken[1:])
