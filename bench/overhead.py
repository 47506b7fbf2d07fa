"""The overhead of a loader per batch, with nearly free data: DeviceLoader against the loaders that it replaces.

    python bench/overhead.py [--blocks 8] [--device cuda] [--batches 500] [--workers 0 2]

Each block makes one epoch with each variant, all over the same dataset with the same DataLoader options. The peers are
those that can be imported: accelerate's prepared DataLoader, and with `--device xla` PyTorch/XLA's MpDeviceLoader. A
bare DataLoader's batches are moved by the loop, on CUDA from pinned memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from blocks import interleave, options, show
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unisono import DeviceLoader
from unisono.devices import get_backend

DEVICES = ("cpu", "cuda", "mps", "xla")
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


def small_step(device: str) -> Step:
    """The training step of a small model: many short calls that compete with other threads for the GIL."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        inputs, labels = batch
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


class Moved:
    """A DataLoader whose batches are moved in the loop that reads them."""

    def __init__(self, loader: DataLoader[Any], device: str) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if isinstance(batch, torch.Tensor):
                yield batch.to(self._device, non_blocking=True)
            else:
                yield [each.to(self._device, non_blocking=True) for each in batch]


def loaders(dataset: Dataset[Any], workers: int, device: str, keep_workers: bool = True) -> dict[str, Iterable[Any]]:
    """Our loader, with and without prefetching, the bare one, and those of the installed peers."""
    is_kept = keep_workers and workers > 0

    def bare() -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": is_kept}
        return DataLoader(dataset, BATCH_SIZE, shuffle=True, pin_memory=device == "cuda", **options)

    made: dict[str, Iterable[Any]] = {
        OURS: DeviceLoader(bare(), device),
        NOTHING_AHEAD: DeviceLoader(bare(), device, prefetch=0),
        "a bare DataLoader": bare() if device == "cpu" else Moved(bare(), device),
    }
    if device != "xla" and find_spec("accelerate"):
        accelerator = import_module("accelerate").Accelerator(cpu=device == "cpu")
        made["accelerate"] = accelerator.prepare_data_loader(bare())
    if device == "xla":
        parallel_loader = import_module("torch_xla.distributed.parallel_loader")
        made["MpDeviceLoader"] = parallel_loader.MpDeviceLoader(bare(), import_module("torch_xla").device())
    return made


def epoch_of(loader: Iterable[Any], step: Step, batches: int, device: str) -> Callable[[], float]:
    """Seconds per batch of one epoch, its start and end included."""

    family = get_backend(device)

    def epoch() -> float:
        count = 0
        start = time.perf_counter()
        for batch in loader:
            step(batch)
            count += 1
        family.synchronize(family.device(0))
        elapsed = time.perf_counter() - start
        assert count == batches
        return elapsed / batches

    return epoch


def main() -> None:
    arguments = options(__doc__, DEVICES, blocks=8, batches=500, workers=[0, 2])
    device = arguments.device
    torch.set_num_threads(1)  # more do not help for batches of this size
    length = arguments.batches * BATCH_SIZE
    tensors = TensorDataset(torch.rand(length, 8), torch.randint(10, (length,)))
    rows = Rows(tensors)
    cases: dict[str, tuple[Dataset[Any], Step]] = {
        "numbers": (Numbers(length), no_step),
        "8 floats and a label": (rows, no_step),
        "the same as a TensorDataset": (tensors, no_step),
    }
    if device != "xla":  # where a step is compiled
        cases["8 floats and a label, a small step"] = (rows, small_step(device))
    for workers in arguments.workers:
        for case, (dataset, step) in cases.items():
            made = loaders(dataset, workers, device)
            variants = {name: epoch_of(loader, step, arguments.batches, device) for name, loader in made.items()}
            times = interleave(variants, arguments.blocks, warm_up=2)
            pairs = [(OURS, theirs) for theirs in list(made)[2:]] + [(NOTHING_AHEAD, list(made)[2])]
            show(f"{case}, num_workers={workers}", times, pairs)


if __name__ == "__main__":
    main()
