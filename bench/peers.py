"""Three ways to start workers that run `work(rank, directory)`: ours, torch.multiprocessing.spawn and torchrun.

Workers leave times of the machine's one monotonic clock in the directory. As a script, this is what torchrun starts.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn as torch_multiprocessing_spawn

import unisono

Work = Callable[[int, str], object]


def by_unisono(work: Work, count: int, directory: str) -> None:
    unisono.spawn(work, args=(directory,), nprocs=count)


def by_torch(work: Work, count: int, directory: str) -> None:
    torch_multiprocessing_spawn(_torch_worker, args=(work, count, directory), nprocs=count)


def by_torchrun(work: Work, count: int, directory: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", __file__]
    command += [Path(inspect.getfile(work)).stem, work.__name__, directory]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)


WAYS = {"unisono.spawn": by_unisono, "torch.multiprocessing.spawn": by_torch, "torchrun": by_torchrun}


def _torch_worker(index: int, work: Work, count: int, directory: str) -> None:
    """What a user writes for `torch.multiprocessing.spawn`, with the fastest store."""
    store = dist.FileStore(f"{directory}/store", count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=index, world_size=count)
    work(index, directory)
    dist.destroy_process_group()


def stamp(directory: str | Path, name: str) -> None:
    """Note this time under that name."""
    (Path(directory) / name).write_text(str(time.monotonic()))


def latest(directory: str | Path, names: str) -> float:
    """The last of the times that were noted under names of that pattern."""
    return max(float(path.read_text()) for path in Path(directory).glob(names))


if __name__ == "__main__":
    module, name, directory = sys.argv[1:]
    dist.init_process_group("gloo")
    getattr(import_module(module), name)(dist.get_rank(), directory)
    dist.destroy_process_group()
