"""The overhead of a loader per batch, with nearly free data: DeviceLoader against the loaders that it replaces.

    python bench/overhead.py [--blocks 30] [--batches 500] [--workers 0 2]

Each block makes one epoch with each variant, all over the same dataset with the same DataLoader options. The peers are
those that can be imported: accelerate's prepared DataLoader, and PyTorch/XLA's MpDeviceLoader, which alone moves its
batches to another device (PJRT_DEVICE=CPU). Ratios are ours / theirs: smaller is faster.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from statistics import median
from typing import Any

import torch
from blocks import conditions, interleave, ratio_line
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unisono import DeviceLoader

BATCH_SIZE = 32
OURS, NOTHING_AHEAD = "unisono", "unisono, nothing read ahead"

Step = Callable[[Any], None]


class Numbers(Dataset[int]):
    """The cheapest possible dataset."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same rows as a TensorDataset, in a user-defined dataset: each sample is fetched and collated."""

    def __init__(self, tensors: TensorDataset) -> None:
        self._inputs, self._labels = tensors.tensors

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index], self._labels[index]


def no_step(batch: Any) -> None:
    pass


def small_step() -> Step:
    """The training step of a small model: many short calls that compete with other threads for the GIL."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        inputs, labels = batch
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def loaders(dataset: Dataset[Any], workers: int, keep_workers: bool = True) -> dict[str, Iterable[Any]]:
    """Our loader, with and without prefetching, the bare one, and those of the installed peers."""
    is_kept = keep_workers and workers > 0

    def bare() -> DataLoader[Any]:
        return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=is_kept)

    made: dict[str, Iterable[Any]] = {
        OURS: DeviceLoader(bare(), "cpu"),
        NOTHING_AHEAD: DeviceLoader(bare(), "cpu", prefetch=0),
        "bare DataLoader": bare(),
    }
    try:
        accelerator = import_module("accelerate").Accelerator(cpu=True)
        made["accelerate"] = accelerator.prepare_data_loader(bare())
    except ModuleNotFoundError:
        pass
    if os.environ.get("PJRT_DEVICE"):
        parallel_loader = import_module("torch_xla.distributed.parallel_loader")
        made["MpDeviceLoader"] = parallel_loader.MpDeviceLoader(bare(), import_module("torch_xla").device())
    return made


def epoch_of(loader: Iterable[Any], step: Step, batches: int) -> Callable[[], float]:
    """Seconds per batch of one epoch, its start and end included."""

    def epoch() -> float:
        count = 0
        start = time.perf_counter()
        for batch in loader:
            step(batch)
            count += 1
        elapsed = time.perf_counter() - start
        assert count == batches
        return elapsed / batches

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more do not help for batches of this size
    length = arguments.batches * BATCH_SIZE
    tensors = TensorDataset(torch.rand(length, 8), torch.randint(10, (length,)))
    rows = Rows(tensors)
    cases: list[tuple[str, Dataset[Any], Callable[[], Step]]] = [
        ("numbers, no step", Numbers(length), lambda: no_step),
        ("8 floats and a label, no step", rows, lambda: no_step),
        ("8 floats and a label, small step", rows, small_step),
        ("TensorDataset of 8 floats and a label, no step", tensors, lambda: no_step),
    ]
    for workers in arguments.workers:
        for title, dataset, make_step in cases:
            is_xla = bool(os.environ.get("PJRT_DEVICE"))
            if is_xla and make_step is small_step:
                continue  # its batches are on another device, where the same step is compiled
            step = make_step()
            made = loaders(dataset, workers)
            variants = {name: epoch_of(loader, step, arguments.batches) for name, loader in made.items()}
            times = interleave(variants, arguments.blocks, warm_up=2)
            print(f"\nbatches of {BATCH_SIZE}: {title}; num_workers={workers}; {conditions()}")
            print("median µs per batch: " + ", ".join(f"{name} {median(t) * 1e6:.0f}" for name, t in times.items()))
            for theirs in list(variants)[2:]:
                for ours in (OURS, NOTHING_AHEAD):
                    print(ratio_line(f"{ours} / {theirs}", times[ours], times[theirs]), flush=True)


if __name__ == "__main__":
    main()
