"""Steps per second of the example's loop on N processes, against the same loop hand-written with torch's DDP.

    python bench/steps.py [--blocks 30] [--workers 2]

Both loops run in the same workers, in turns of one epoch, over the same data, model, optimizer and batch size. The
ratio is ours / DDP: larger is faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from blocks import ratio_line
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from unisono import DeviceLoader, barrier, optimizer_step, spawn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import build_loaders, build_model

Epoch = Callable[[], int]


def unisono_epochs(ranks: int) -> Epoch:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = DeviceLoader(build_loaders(ranks)[0])

    def epoch() -> int:
        steps = 0
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer_step(optimizer)
            steps += 1
        return steps

    return epoch


def ddp_epochs(ranks: int) -> Epoch:
    plain: nn.Module = build_model()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    source = build_loaders(ranks)[0]
    sampler: DistributedSampler[Any] = DistributedSampler(source.dataset)
    loader: DataLoader[Any] = DataLoader(source.dataset, batch_size=source.batch_size, sampler=sampler)
    numbers: Iterator[int] = iter(range(1 << 30))

    def epoch() -> int:
        sampler.set_epoch(next(numbers))
        steps = 0
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            steps += 1
        return steps

    return epoch


def measure(index: int, ranks: int, blocks: int) -> dict[str, list[float]]:
    """Steps per second of each variant, block by block."""
    variants = {"unisono": unisono_epochs(ranks), "DDP": ddp_epochs(ranks)}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for block in range(blocks + 2):
        for name in sorted(variants, reverse=bool(block % 2)):
            barrier()
            start = time.perf_counter()
            steps = variants[name]()
            barrier()
            if block >= 2:  # the first ones warm up
                rates[name].append(steps / (time.perf_counter() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    rates = spawn(measure, args=(arguments.workers, arguments.blocks), nprocs=arguments.workers)[0]
    for name, values in rates.items():
        print(f"{name:<10} median {median(values):6.1f} steps/s")
    print(ratio_line(f"unisono / DDP, {arguments.workers} processes", rates["unisono"], rates["DDP"]))


if __name__ == "__main__":
    main()
