"""How long until N workers have passed their first barrier: `unisono.spawn` against torch's own ways.

    python bench/launch.py [--rounds 5] [--workers 2 4 8]

Each round starts every variant once, one after another; a variant's time is from the call (for torchrun: the start of
its process) to the moment when the last worker has passed the barrier, read from the machine's one monotonic clock.
Ratios are ours / theirs: smaller is faster.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from blocks import ratio_line
from torch.multiprocessing.spawn import spawn as torch_multiprocessing_spawn

import unisono

COLD = """
import time; from pathlib import Path; import sys
import unisono
from unisono import spawn, barrier
def pass_barrier(index):
    barrier()
    return time.monotonic()
start = time.monotonic()
print(max(spawn(pass_barrier, nprocs=int(sys.argv[1]))) - start)
"""


def pass_barrier(index: int) -> float:
    unisono.barrier()
    return time.monotonic()


def torch_worker(index: int, count: int, directory: str) -> None:
    """What a user writes for `torch.multiprocessing.spawn`, with the fastest store."""
    store = dist.FileStore(f"{directory}/store", count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=index, world_size=count)
    report_barrier(Path(directory), index)


def report_barrier(directory: Path, index: int) -> None:
    dist.barrier()
    (directory / f"passed-{index}").write_text(str(time.monotonic()))
    dist.destroy_process_group()


def last_passed(directory: str) -> float:
    return max(float(path.read_text()) for path in Path(directory).glob("passed-*"))


def warm_unisono(count: int) -> float:
    start = time.monotonic()
    return float(max(unisono.spawn(pass_barrier, nprocs=count)) - start)


def cold_unisono(count: int) -> float:
    """The first spawn of a fresh process, with the start of the zygote, without imports, as for mp.spawn."""
    output = subprocess.run([sys.executable, "-c", COLD, str(count)], capture_output=True, text=True, check=True).stdout
    return float(output)


def torch_spawn(count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        start = time.monotonic()
        torch_multiprocessing_spawn(torch_worker, args=(count, directory), nprocs=count)
        return last_passed(directory) - start


def torchrun(count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        start = time.monotonic()
        environ = {**os.environ, "TORCHRUN_TARGET": directory, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, __file__], env=environ, capture_output=True, check=True)
        return last_passed(directory) - start


VARIANTS: dict[str, Callable[[int], float]] = {
    "unisono.spawn, warm": warm_unisono,
    "unisono.spawn, cold": cold_unisono,
    "torch.multiprocessing.spawn": torch_spawn,
    "torchrun": torchrun,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    print(f"first barrier, torch {torch.__version__}, {os.cpu_count()} cores, {arguments.rounds} rounds")
    warm_unisono(2)  # starts the zygote
    for count in arguments.workers:
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(arguments.rounds):
            for name, variant in VARIANTS.items():
                times[name].append(variant(count))
        print(f"\n{count} workers; median seconds: " + ", ".join(f"{n} {median(t):.3f}" for n, t in times.items()))
        for ours in ("unisono.spawn, warm", "unisono.spawn, cold"):
            for theirs in ("torch.multiprocessing.spawn", "torchrun"):
                print(ratio_line(f"{ours} / {theirs}", times[ours], times[theirs]))


if "TORCHRUN_TARGET" in os.environ:
    dist.init_process_group("gloo")
    report_barrier(Path(os.environ["TORCHRUN_TARGET"]), dist.get_rank())
elif __name__ == "__main__":
    main()
