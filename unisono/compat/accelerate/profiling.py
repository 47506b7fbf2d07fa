"""torch's profiler for ranks: one of each process, and among threads, which share a process, one that all of them hold.

*Threads:* rank zero's starts and stops it, between two barriers; torch's profiler is the process's, and two at once end
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.compat.accelerate.utils.dataclasses import ProfileKwargs
from unisono.parallel.collectives import barrier
from unisono.world import World

_shared: list[torch.profiler.profile] = []  # of threads; at most one


@contextmanager
def profiled(handler: ProfileKwargs, world: World) -> Iterator[torch.profiler.profile]:
    """A block under the profiler. Among threads a collective; what rank zero's thread does is recorded there."""
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
        profiler.events()  # made now, and not by the first of several threads that ask
        _shared.clear()
    else:
        barrier(world)
        yield _shared[0]
        barrier(world)
    barrier(world)  # it has stopped
