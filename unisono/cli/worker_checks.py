"""Real workers, started the way a run starts them, and their collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from unisono.backends import NAMES, get_backend
from unisono.cli.findings import Finding, warning_if
from unisono.cli.machine_checks import launcher
from unisono.comm.selection import group_backend
from unisono.launch.spawn import spawn
from unisono.parallel.collectives import all_reduce
from unisono.protocols import Backend
from unisono.world import current_world

NUM_WORKERS = 2
LIMIT_S = 120.0
_LARGE_BYTES = 64 << 20
_SLOW_START_S = 20.0
_SEE = "the output above may say more; docs/troubleshooting.md explains each message"


def workers() -> Iterator[Finding]:
    """Start two workers of each family that has two devices, and let them run collectives."""
    if found := launcher():
        yield Finding("workers", "note", f"not started: {found}", "run it again in a plain shell of this machine")
        return
    for family in filter(_has_two, map(get_backend, NAMES)):
        try:
            yield from _try_collectives(family)
        except Exception as error:
            notes = "; ".join([str(error), *getattr(error, "__notes__", ())])
            text = f"{NUM_WORKERS} workers on {family.name} failed: {type(error).__name__}: {notes}"
            yield Finding("workers", "problem", " ".join(text.split()), _SEE)


def _has_two(family: Backend) -> bool:
    try:
        return family.is_available() and family.device(NUM_WORKERS - 1) is not None
    except ValueError:
        return False


def _try_collectives(family: Backend) -> Iterator[Finding]:
    began = time.monotonic()
    context = spawn(
        measure_collectives,
        nprocs=NUM_WORKERS,
        join=False,
        daemon=True,  # a check that runs too long is abandoned, and ends with the program
        backend=family.name,
        timeout=LIMIT_S / 2,
    )
    results = context.join() or []
    start_s = max(each[0] for each in results) - began
    text = f"{NUM_WORKERS} on {family.name}: first barrier after {start_s:.2f} s"
    advice = "torch is imported once for all workers, which is slow over a network: install it on a local disk"
    yield warning_if(start_s > _SLOW_START_S, "workers", text, advice)
    _, latency_s, large_s = results[0]
    yield Finding(
        "collectives",
        "ok",
        f"all_reduce by {group_backend(family)} between {NUM_WORKERS} on {family.name}: "
        f"4 B in {latency_s * 1e3:.2f} ms, {_LARGE_BYTES >> 20} MiB at {_LARGE_BYTES / large_s / 1e9:.2f} GB/s",
    )


def measure_collectives(rank: int) -> tuple[float, float, float]:
    """In a worker that has passed its first barrier: the time, and the seconds of a small and a large all_reduce."""
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
