"""Reductions between processes of one machine: shared memory against gloo, and against a copy of one's own tensor.

    python bench/shared_memory.py [--blocks 30] [--workers 2 4]

All variants run in the same workers, one after the other in each block. Ratios are times, gloo / ours: larger is
faster; and ours / copy, where 1 is the time in which one thread copies the tensor once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import psutil
import torch
import torch.distributed as dist
from blocks import conditions, interleave, ratio_line

from unisono import spawn

SIZES = {"100 MB": 25_000_000, "25 MB": 6_250_000, "1 MB": 250_000, "4 KB": 1000, "4 B": 1}
OURS, GLOO, COPY = "ours", "gloo", "copy"


def measure(index: int, blocks: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
    """Seconds for each size and variant, block by block; and the bytes that each variant has added to this process."""
    torch.set_num_threads(1)
    ours, gloo = dist.new_group(), dist.new_group(backend="gloo")
    found, held = {}, {}
    largest = torch.ones(max(SIZES.values()))
    for name, group in ((OURS, ours), (GLOO, gloo)):
        before = psutil.Process().memory_full_info().pss
        dist.all_reduce(largest, group=group)
        held[name] = psutil.Process().memory_full_info().pss - before
    for size, length in SIZES.items():
        found[size] = interleave(variants(length, ours, gloo), blocks, warm_up=2)
    return found, held


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    for workers in arguments.workers:
        found, held = spawn(measure, args=(arguments.blocks,), nprocs=workers)[0]
        print(f"\nall_reduce between {workers} processes; {conditions()}")
        for size, times in found.items():
            print(ratio_line(f"{size}: gloo / ours", times[GLOO], times[OURS]), end="   ")
            print(" ".join(f"{name} {median(each) * 1e3:.3f} ms" for name, each in times.items()))
            print(ratio_line(f"{size}: ours / copy", times[OURS], times[COPY]), flush=True)
        print(
            "memory of rank 0 that 100 MB have added:",
            ", ".join(f"{name} {n / 1e6:.0f} MB" for name, n in held.items()),
        )


if __name__ == "__main__":
    main()
