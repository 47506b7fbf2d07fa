"""How soon the caller of `spawn` is notified of a failure, in seconds, while the other ranks are in a collective.

    python bench/failures.py [--rounds 10] [--workers 2 8]

`raise`: rank 1 raises, and the time ends where `spawn` raises its exception in the caller. `SIGKILL`: the same for a
rank that is killed. The peers are torch.multiprocessing.spawn and torchrun (until its process ends). Ratios are ours
/ theirs: smaller is sooner.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from blocks import conditions, interleave, ratio_line
from torch.multiprocessing.spawn import spawn as torch_multiprocessing_spawn

import unisono


def fail(directory: str, rank: int, is_killed: bool) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        (Path(directory) / "failed").write_text(str(time.monotonic()))
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("as planned")
    dist.all_reduce(torch.ones(1))


def our_worker(index: int, directory: str, is_killed: bool) -> None:
    fail(directory, index, is_killed)


def torch_worker(index: int, count: int, directory: str, is_killed: bool) -> None:
    store = dist.FileStore(f"{directory}/store", count)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=index, world_size=count)
    fail(directory, index, is_killed)


def since(directory: str) -> float:
    return time.monotonic() - float((Path(directory) / "failed").read_text())


def ours(count: int, is_killed: bool) -> float:
    with tempfile.TemporaryDirectory() as directory:
        try:
            unisono.spawn(our_worker, args=(directory, is_killed), nprocs=count)
        except (ValueError, unisono.errors.WorkerDiedError):
            return since(directory)
    raise AssertionError("no failure was told")


def multiprocessing_spawn(count: int, is_killed: bool) -> float:
    with tempfile.TemporaryDirectory() as directory:
        with suppress(Exception):
            torch_multiprocessing_spawn(torch_worker, args=(count, directory, is_killed), nprocs=count)
        return since(directory)


def torchrun(count: int, is_killed: bool) -> float:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        plan = {"TORCHRUN_TARGET": directory, "TORCHRUN_KILLS": str(int(is_killed)), "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, __file__], env={**os.environ, **plan}, capture_output=True)
        return since(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    arguments = parser.parse_args()
    print(f"time to report a failure, {conditions()}, {arguments.rounds} rounds")
    for count in arguments.workers:
        for what, is_killed in (("raise", False), ("SIGKILL", True)):
            variants = {
                each.__name__: partial(each, count, is_killed) for each in (ours, multiprocessing_spawn, torchrun)
            }
            times = interleave(variants, arguments.rounds)
            told = ", ".join(f"{name} {median(each):.3f} (worst {max(each):.3f})" for name, each in times.items())
            print(f"\n{count} workers, {what}; median seconds: {told}")
            for theirs in list(variants)[1:]:
                print(ratio_line(f"ours / {theirs}", times["ours"], times[theirs]))


if "TORCHRUN_TARGET" in os.environ:
    dist.init_process_group("gloo")
    fail(os.environ["TORCHRUN_TARGET"], dist.get_rank(), os.environ["TORCHRUN_KILLS"] == "1")
elif __name__ == "__main__":
    main()
