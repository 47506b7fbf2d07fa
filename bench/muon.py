"""Muon on two ranks that each update all matrices, or their share of them: the time of a step, on CPUs.

python bench/muon.py
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from blocks import interleave, options, show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, spawn

DEVICES = ("cpu",)
WIDTH, LAYERS, ROWS = 512, 6, 64


def _steps(_: int, strategy: Any, count: int) -> float:
    """Seconds for a step; the first two are left out."""
    data = TensorDataset(torch.ones(2 * ROWS * (count + 2), WIDTH))
    accelerator = Accelerator(seed=0, strategy=strategy)
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * (LAYERS // 2)
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    optimizer: Any = torch.optim.Muon(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(DataLoader(data, ROWS))
    for number, (inputs,) in enumerate(loader):
        if number == 2:
            begin = time.perf_counter()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - begin) / count


def main() -> None:
    given = options(__doc__, DEVICES, 8, steps=6)

    def run(strategy: str) -> float:
        return max(spawn(_steps, (strategy, given.steps), nprocs=2, backend="cpu", cores=1))

    show(
        "Muon, 6 matrices",
        interleave({name: partial(run, name) for name in ("zero1", "ddp", "fsdp")}, given.blocks),
        [("zero1", "ddp"), ("fsdp", "ddp")],
    )


if __name__ == "__main__":
    main()
