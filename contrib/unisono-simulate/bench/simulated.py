"""Steps on 1, 2 and 4 processes of this machine, measured and predicted by `unisono-simulate`.

    python contrib/unisono-simulate/bench/simulated.py [--steps 60] [--width 1024] [--blocks 3]

The runs on one process say how long a step computes; those on two, by which bandwidth they reduce. Four are predicted.
More processes than cores take turns: a step then computes longer, by processes / cores. Other programs disturb all of
this: the runs alternate, a figure is the fastest tenth of all steps, and how much steps vary is left out.
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Output, spawn, world_size
from unisono.report.run import read_run
from unisono_simulate.description import Fleet, Model, measure
from unisono_simulate.prediction import predict

BATCH = 64


def network(width: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))


def train(index: int, steps: int, width: int) -> None:
    """Some steps; the batch of a process is the same for any number of them."""
    torch.set_num_threads(1)
    accelerator = Accelerator(seed=0)
    model = network(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(steps * BATCH * world_size(), width))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH))
    for (x,) in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()


def steps_s(path: Path) -> list[float]:
    """The times from the end of a step to that of the next, of all ranks."""
    loops = [max(each.spans().values(), key=len) for each in read_run(path).ranks]
    ends = [[stop for phase, _, stop in spans if phase == "step"] for spans in loops]
    return [(after - before) / 1e9 for each in ends for before, after in pairwise(each)]


def main() -> None:
    """Measure, and print a line for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=3)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}")
    steps: dict[int, list[float]] = {1: [], 2: [], 4: []}
    with TemporaryDirectory() as directory:
        path = Path(directory)
        for ranks in [*steps] * options.blocks:
            spawn(train, args=(options.steps, options.width), nprocs=ranks, output=Output(path))
            steps[ranks] += steps_s(path)
            if ranks == 1:
                found = measure(path)
    measured = {ranks: quantiles(each, n=10)[0] for ranks, each in steps.items()}
    parameters = sum(each.numel() for each in network(options.width).parameters())
    times = {name: found[name] for name in ("forward_s", "backward_s", "optimizer_s")}
    scale = measured[1] / sum(times.values())

    def predicted_s(ranks: int, bytes_per_s: float) -> float:
        turns = scale * max(ranks / cores, 1)
        model = Model(parameters, BATCH, **{name: turns * seconds for name, seconds in times.items()})
        return predict(model, Fleet(per_machine=8, within_bytes_per_s=bytes_per_s), ranks).step_s

    low, high = 1e6, 1e12
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted_s(2, middle) > measured[2] else (low, middle)
    print(f"{parameters:,} parameters; two processes reduce by {low / 1e9:.2f} GB/s, as fitted to their step")
    for ranks, seconds in measured.items():
        predicted = predicted_s(ranks, low)
        error = "  (fitted)" if ranks < 4 else f"  {predicted / seconds - 1:+.0%}"
        print(f"{ranks} processes: {1e3 * seconds:7.1f} ms measured, {1e3 * predicted:7.1f} ms predicted{error}")


if __name__ == "__main__":
    main()
