"""From the death of a worker to the first collective of the restarted group: `spawn(max_restarts=1)` against torch's
elastic agent.

    python bench/restart.py [--blocks 4] [--workers 2]

Rank 1 notes the time and kills itself with SIGKILL; after the restart every rank notes when its first all_reduce is
done. The agent runs in this process, as in torchrun, with its fastest settings: it polls its workers every
0.1 s instead of every second, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which most restarts fail.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from blocks import interleave, options, show
from peers import latest, stamp
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import unisono

DEVICES = ("cpu",)


def die_or_reduce(directory: str, rank: int, restart_count: int) -> None:
    dist.all_reduce(torch.ones(1))
    if restart_count == 0 and rank == 1:
        stamp(directory, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))  # which only the restarted group completes
    stamp(directory, f"reduced-{rank}")


def our_worker(index: int, directory: str) -> None:
    die_or_reduce(directory, index, unisono.current_world().restart_count)


def their_worker(directory: str) -> None:
    dist.init_process_group("gloo")
    die_or_reduce(directory, dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()


def elapsed(run: Callable[[str], object]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        run(directory)
        return latest(directory, "reduced-*") - latest(directory, "killed")


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
    arguments = options(__doc__, DEVICES, blocks=4, workers=2)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.disable(logging.ERROR)  # both log each death
    ways = {"spawn(max_restarts=1)": ours, "torch's elastic agent": theirs}
    variants = {name: partial(elapsed, partial(way, arguments.workers)) for name, way in ways.items()}
    show(f"{arguments.workers} workers", interleave(variants, arguments.blocks))


if __name__ == "__main__":
    main()
