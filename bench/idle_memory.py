"""Memory of N idle workers that have passed a barrier: `unisono.spawn` against torch's own ways.

    python bench/idle_memory.py [--rounds 3] [--workers 8]

PSS divides shared memory among the processes that share it, so the sum over the workers is their use of the machine.
Helper processes, the zygote or torchrun's agent, are included. Ratios are ours / theirs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch.distributed as dist
from blocks import conditions, interleave, ratio_line
from torch.multiprocessing.spawn import spawn as torch_multiprocessing_spawn

import unisono


class Lounge:
    """Two named pipes by which workers report that they are idle, and wait until they may exit."""

    def __init__(self, directory: str) -> None:
        self.arrivals, self.exit = Path(directory) / "arrivals", Path(directory) / "exit"
        for path in (self.arrivals, self.exit):
            if not path.exists():  # the caller creates them, before the workers start
                os.mkfifo(path)

    @contextmanager
    def opened(self, count: int) -> Iterator[None]:
        """Wait until `count` workers are idle; they may exit when the block ends."""
        arrivals, leave = (os.open(path, os.O_RDWR) for path in (self.arrivals, self.exit))
        try:
            for _ in range(count):
                assert os.read(arrivals, 1) == b"."
            yield
        finally:
            os.write(leave, count * b".")

    def idle(self) -> None:
        """The part of a worker."""
        dist.barrier()
        with self.arrivals.open("wb", buffering=0) as file:
            file.write(b".")
        with self.exit.open("rb", buffering=0) as file:
            file.read(1)


def idle(index: int, directory: str) -> None:
    Lounge(directory).idle()


def torch_worker(index: int, count: int, directory: str) -> None:
    store = dist.FileStore(f"{directory}/store", count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=index, world_size=count)
    Lounge(directory).idle()
    dist.destroy_process_group()


def pss_below(process: psutil.Process) -> float:
    """MiB of all its descendants."""
    return sum(each.memory_full_info().pss for each in process.children(recursive=True)) / 2**20


def ours(count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        lounge = Lounge(directory)
        context = unisono.spawn(idle, args=(directory,), nprocs=count, join=False)
        with lounge.opened(count):
            used = pss_below(psutil.Process())
        context.join()
        return used


def multiprocessing_spawn(count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        lounge = Lounge(directory)
        context = torch_multiprocessing_spawn(torch_worker, args=(count, directory), nprocs=count, join=False)
        with lounge.opened(count):
            pids = set(context.pids())
            used = sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**20
        while not context.join():
            pass
        return used


def torchrun(count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        lounge = Lounge(directory)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        environ = {**os.environ, "TORCHRUN_TARGET": directory, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([*command, __file__], env=environ, stderr=subprocess.DEVNULL) as process:
            with lounge.opened(count):
                agent = psutil.Process(process.pid)
                return pss_below(agent) + agent.memory_full_info().pss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    arguments = parser.parse_args()
    print(f"memory of idle workers, {conditions()}, {arguments.rounds} rounds")
    for count in arguments.workers:
        variants = {
            "unisono.spawn": partial(ours, count),
            "torch.multiprocessing.spawn": partial(multiprocessing_spawn, count),
            "torchrun": partial(torchrun, count),
        }
        found = interleave(variants, arguments.rounds)
        print(f"\n{count} workers; median MiB: " + ", ".join(f"{n} {median(m):.0f}" for n, m in found.items()))
        for theirs in list(variants)[1:]:
            print(ratio_line(f"unisono.spawn / {theirs}", found["unisono.spawn"], found[theirs]))


if "TORCHRUN_TARGET" in os.environ:
    dist.init_process_group("gloo")
    idle(dist.get_rank(), os.environ["TORCHRUN_TARGET"])
    dist.destroy_process_group()
elif __name__ == "__main__":
    main()
