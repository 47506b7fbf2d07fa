"""Reductions between processes of one machine: shared memory against gloo, and against a copy of one's own tensor.

    python bench/shared_memory.py [--blocks 15] [--workers 2 4]

All variants run in the same workers, one after the other in each block. *A copy* is the time in which one thread copies
the tensor once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from blocks import interleave, options, show

from unisono import spawn

DEVICES = ("cpu",)
SIZES = {"100 MB": 25_000_000, "25 MB": 6_250_000, "1 MB": 250_000, "4 KB": 1000, "4 bytes": 1}
OURS, GLOO, COPY = "shared memory", "gloo", "a copy"


def measure(index: int, blocks: int) -> dict[str, dict[str, list[float]]]:
    """Seconds for each size and variant, block by block."""
    torch.set_num_threads(1)
    ours, gloo = dist.new_group(), dist.new_group(backend="gloo")
    return {size: interleave(variants(length, ours, gloo), blocks, warm_up=2) for size, length in SIZES.items()}


def variants(length: int, ours: dist.ProcessGroup, gloo: dist.ProcessGroup) -> dict[str, Callable[[], float]]:
    """The measured operations, on tensors of that length: each returns the seconds of one operation."""
    tensor, other = torch.ones(length), torch.empty(length)
    repeats = max(1, min(200, 2_000_000 // length))

    def timed(operation: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            tensor.fill_(0.0)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                operation()
            return (time.perf_counter() - start) / repeats

        return run

    return {
        OURS: timed(lambda: dist.all_reduce(tensor, group=ours)),
        GLOO: timed(lambda: dist.all_reduce(tensor, group=gloo)),
        COPY: timed(lambda: other.copy_(tensor)),
    }


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=15, workers=[2, 4])
    for workers in arguments.workers:
        found = spawn(measure, args=(arguments.blocks,), nprocs=workers)[0]
        for size, times in found.items():
            is_large = SIZES[size] > 1_000_000  # less is in the cache
            show(f"{size}, {workers} processes", times, [(OURS, GLOO), *([(OURS, COPY)] if is_large else [])])


if __name__ == "__main__":
    main()
