"""The time of a large result from a worker to the caller, against a plain pipe, and how many copies the caller holds.

    python bench/results.py [--rounds 5] [--megabytes 1024]

The pipe moves the same number of bytes from a forked process into allocated memory. Ratios are ours / the pipe's:
smaller is faster.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import torch
from blocks import ratio_line

import unisono


def make(index: int, size: int) -> torch.Tensor | None:
    return torch.ones(size, dtype=torch.uint8) if index == 0 else None


def by_spawn(size: int) -> float:
    start = time.perf_counter()
    unisono.spawn(make, args=(size,), nprocs=2)
    return time.perf_counter() - start


def by_pipe(size: int) -> float:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        left = memoryview(bytearray(size))
        while left:
            left = left[os.write(writing, left[: 1 << 20]) :]
        os._exit(0)
    os.close(writing)
    start = time.perf_counter()
    left = memoryview(bytearray(size))
    while left:
        left = left[os.readv(reading, [left[: 1 << 20]]) :]
    seconds = time.perf_counter() - start
    os.close(reading)
    os.waitpid(child, 0)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1024)
    arguments = parser.parse_args()
    size = arguments.megabytes << 20
    by_spawn(1)  # starts the zygote
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = by_spawn(size)
    copies = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / size
    print(f"a result of {arguments.megabytes} MB, first {first:.2f} s; the caller holds {copies:.2f} copies at most")
    times: dict[str, list[float]] = {"spawn": [], "pipe": []}
    for _ in range(arguments.rounds):
        times["spawn"].append(by_spawn(size))
        times["pipe"].append(by_pipe(size))
    print(ratio_line("unisono.spawn / a plain pipe", times["spawn"], times["pipe"]))


if __name__ == "__main__":
    main()
