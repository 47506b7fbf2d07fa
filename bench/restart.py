"""From the death of a worker to the first collective of the restarted group: `spawn(max_restarts=1)` against torch's
elastic agent.

    python bench/restart.py [--rounds 5] [--workers 2 4]

Rank 1 notes the time and kills itself with SIGKILL; after the restart every rank notes when its first all_reduce is
done. The agent runs in this process, as in torchrun, with its fastest settings: it polls its workers every
0.1 s instead of every second, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which most restarts fail.
Ratios are ours / theirs: smaller is faster.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from blocks import conditions, interleave, ratio_line
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import unisono


def die_or_reduce(directory: str, rank: int, restart_count: int) -> None:
    dist.all_reduce(torch.ones(1))
    if restart_count == 0 and rank == 1:
        (Path(directory) / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))  # which only the restarted group completes
    (Path(directory) / f"reduced-{rank}").write_text(str(time.monotonic()))


def our_worker(index: int, directory: str) -> None:
    die_or_reduce(directory, index, unisono.current_world().restart_count)


def their_worker(directory: str) -> None:
    dist.init_process_group("gloo")
    die_or_reduce(directory, dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()


def elapsed(run: Callable[[str], object]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        run(directory)
        reduced = max(float(path.read_text()) for path in Path(directory).glob("reduced-*"))
        return reduced - float((Path(directory) / "killed").read_text())


def ours(count: int, directory: str) -> None:
    unisono.spawn(our_worker, args=(directory,), nprocs=count, max_restarts=1)


def theirs(count: int, directory: str) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="bench",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=directory),
    )
    elastic_launch(config, their_worker)(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.disable(logging.ERROR)  # both log each death
    print(f"restart after kill -9, {conditions()}, {arguments.rounds} rounds")
    for count in arguments.workers:
        variants = {
            "spawn(max_restarts=1)": partial(elapsed, partial(ours, count)),
            "torch's elastic agent": partial(elapsed, partial(theirs, count)),
        }
        times = interleave(variants, arguments.rounds)
        print(f"\n{count} workers; median seconds: " + ", ".join(f"{n} {median(t):.3f}" for n, t in times.items()))
        print(ratio_line("spawn(max_restarts=1) / torch's elastic agent", *times.values()))


if __name__ == "__main__":
    main()
