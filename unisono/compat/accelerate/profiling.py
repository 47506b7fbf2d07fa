"""torch's profiler for ranks: one per process; ranks that are threads of one process share one.

*Threads:* rank zero's starts and stops it, between two barriers; torch's profiler belongs to the process, which a
second concurrent one would end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.compat.accelerate.utils.dataclasses import ProfileKwargs
from unisono.parallel.collectives import barrier
from unisono.world import World

_shared: list[torch.profiler.profile] = []  # among threads; at most one


@contextmanager
def profiled(handler: ProfileKwargs, world: World) -> Iterator[torch.profiler.profile]:
    """Profile the block. Among threads it is a collective, and records what rank zero's thread does."""
    if world.world_size == 1 or world.is_of_processes:
        with handler.build() as profiler:
            yield profiler
        return
    if world.rank == 0:
        with handler.build() as profiler:
            _shared[:] = [profiler]
            barrier(world)
            yield profiler
            barrier(world)
        profiler.events()  # computed now, not by the first of several threads that ask
        _shared.clear()
    else:
        barrier(world)
        yield _shared[0]
        barrier(world)
    barrier(world)  # the profiler has stopped
