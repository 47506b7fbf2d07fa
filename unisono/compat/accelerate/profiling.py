"""torch's profiler for ranks: one per process; ranks that are threads of one process share one.

*Threads:* rank zero's starts and stops it, between two barriers; torch's profiler belongs to the process, which a
second concurrent one would end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from unisono.compat.accelerate.utils.dataclasses import ProfileKwargs
from unisono.parallel.collectives import barrier
from unisono.world import World

_shared: list[torch.profiler.profile] = []  # among threads; at most one


@contextmanager
def profiled(handler: ProfileKwargs, world: World) -> Iterator[torch.profiler.profile]:
    """Profile the block by `torch.profiler.profile`; with `output_trace_dir`, export `profile_{rank}.json` there.

    Among threads it is a collective, records what rank zero's thread does, and is exported once.
    """
    is_shared = world.world_size > 1 and not world.is_of_processes
    meet = partial(barrier, world) if is_shared else lambda: None
    if is_shared and world.rank > 0:
        meet()
        yield _shared[0]
        meet()
    else:
        with handler.build() as profiler:
            _shared[:] = [profiler]
            meet()
            yield profiler
            meet()
        _shared.clear()
        if is_shared:
            profiler.events()  # computed now, not by the first of several threads that ask
        if handler.output_trace_dir is not None:
            Path(handler.output_trace_dir).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(handler.output_trace_dir) / f"profile_{world.rank}.json"))
    meet()  # the profiler has stopped
