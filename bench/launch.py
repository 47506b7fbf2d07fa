"""How long until N workers have passed their first barrier: `unisono.spawn` against torch's own ways.

    python bench/launch.py [--blocks 3] [--workers 2 8]

From the call (for torchrun: the start of its process) to the moment when the last worker has passed the barrier.
*Cold* is the first spawn of a process, which starts the zygote.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from tempfile import TemporaryDirectory

import torch.distributed as dist
from blocks import interleave, options, show
from peers import WAYS, Work, latest, stamp

DEVICES = ("cpu",)

COLD = """
import sys, time
import unisono
from unisono import barrier
def pass_barrier(index):
    barrier()
    return time.monotonic()
start = time.monotonic()
print(max(unisono.spawn(pass_barrier, nprocs=int(sys.argv[1]))) - start)
"""


def pass_barrier(rank: int, directory: str) -> None:
    dist.barrier()
    stamp(directory, f"passed-{rank}")


def seconds_of(name: str, count: int, work: Work = pass_barrier) -> float:
    with TemporaryDirectory() as directory:
        start = time.monotonic()
        WAYS[name](work, count, directory)
        return latest(directory, "passed-*") - start


def cold(count: int) -> float:
    output = subprocess.run([sys.executable, "-c", COLD, str(count)], capture_output=True, text=True, check=True).stdout
    return float(output)


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=3, workers=[2, 8])
    seconds_of("unisono.spawn", 2)  # starts the zygote
    ours, *theirs = WAYS
    for count in arguments.workers:
        variants = {"cold": partial(cold, count), **{name: partial(seconds_of, name, count) for name in WAYS}}
        times = interleave(variants, arguments.blocks, warm_up=0)
        times["warm"] = times.pop(ours)
        show(f"{count} workers", times, [(each, other) for each in ("warm", "cold") for other in theirs])


if __name__ == "__main__":
    main()
