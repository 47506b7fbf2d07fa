"""Train a small CNN on handwritten digits: one training function, on one device, on N processes or on N threads.

    python examples/train_digits.py --mode processes --devices 2 --epochs 12

`train` and `evaluate` are the same in every mode. The 1,797 images of 8 x 8 pixels ship with scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import (
    DataParallel,
    DeviceIterator,
    DeviceLoader,
    ReplicaContext,
    Report,
    all_reduce,
    current_world,
    gather_report,
    is_rank_zero,
    optimizer_step,
    spawn,
)

GLOBAL_BATCH = 64


@dataclass
class Result:
    """The result of a run.

    Attributes:
        losses: the mean loss of each step's global batch, float32, over all epochs.
        accuracy: of the test set, each sample counted exactly once.
        weights: the state dict of each rank.
        report: where the time of the training went.
    """

    losses: list[float]
    accuracy: float
    weights: list[dict[str, torch.Tensor]]
    report: Report


def train(
    model: nn.Module, loader: DeviceIterator | DeviceLoader, device: torch.device, context: ReplicaContext
) -> list[float]:
    """Train for one epoch. Return the mean loss of each global batch."""
    optimizer = context.getattr_or(
        "optimizer", lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    )
    context.epoch = context.getattr_or("epoch", 0) + 1
    model.train()
    sums = []
    has_bar = is_rank_zero() and sys.stdout.isatty()
    for images, labels in track(
        loader, f"epoch {context.epoch}", total=len(loader), disable=not has_bar, transient=True
    ):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer_step(optimizer)
        sums.append(torch.stack([loss.detach() * loader.valid_samples, loss.new_tensor(loader.valid_samples)]))
    total = all_reduce(torch.stack(sums))
    losses: list[float] = (total[:, 0] / total[:, 1]).tolist()
    if is_rank_zero():
        print(f"epoch {context.epoch:2d}   loss {sum(losses) / len(losses):.4f}")
    return losses


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DeviceIterator | DeviceLoader, device: torch.device, context: ReplicaContext
) -> float:
    """The fraction of the test samples that are classified correctly; each counts once, on whichever rank it is."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in loader:
        is_right = model(images).argmax(dim=1) == labels
        counts += torch.tensor([int(is_right[: loader.valid_samples].sum()), loader.valid_samples], device=device)
    right, seen = all_reduce(counts).tolist()
    return float(right / seen)


def build_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The network, with the same initial weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    return model.to(dtype)


def build_loaders(ranks: int, dtype: torch.dtype = torch.float32) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of training and test data; a rank's batch is its part of the global batch."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=dtype).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    train_set = torch.utils.data.Subset(data, order[:1437])
    test_set = torch.utils.data.Subset(data, order[1437:])
    return (
        DataLoader(train_set, batch_size=GLOBAL_BATCH // ranks, shuffle=True),
        DataLoader(test_set, batch_size=120 // ranks),
    )


def run_rank(index: int, ranks: int, epochs: int, dtype: torch.dtype) -> tuple[list[float], float, Any, Report | None]:
    """The complete job of one rank, in a plain script and in a worker process."""
    device = current_world().device
    model, context = build_model(dtype).to(device), ReplicaContext(device)
    train_loader, test_loader = (DeviceLoader(loader, device) for loader in build_loaders(ranks, dtype))
    losses = [loss for _ in range(epochs) for loss in train(model, train_loader, device, context)]
    report = gather_report()
    accuracy = evaluate(model, test_loader, device, context)
    return losses, accuracy, in_main_memory(model.state_dict()), report


def run_threads(ranks: int, epochs: int, dtype: torch.dtype) -> Result:
    """The same job, on threads of this process."""
    replicas = DataParallel(build_model(dtype), [f"{current_world().device.type}:{index}" for index in range(ranks)])
    train_loader, test_loader = build_loaders(ranks, dtype)
    losses = [loss for _ in range(epochs) for loss in replicas(train, train_loader)[0]]
    report = replicas(lambda *_: gather_report(), [])[0]
    assert report is not None
    accuracy = replicas(evaluate, test_loader)[0]
    return Result(losses, accuracy, [in_main_memory(model.state_dict()) for model in replicas.models], report)


def in_main_memory(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.cpu() for name, weight in weights.items()}


def run(mode: str, ranks: int = 1, epochs: int = 1, dtype: torch.dtype = torch.float32) -> Result:
    """Train in one of the modes "solo", "processes" and "threads"; the result does not depend on it."""
    if mode == "threads":
        return run_threads(ranks, epochs, dtype)
    if mode == "solo":
        results = [run_rank(0, 1, epochs, dtype)]
    else:
        results = spawn(run_rank, args=(ranks, epochs, dtype), nprocs=ranks)
    losses, accuracy, _, report = results[0]
    assert report is not None
    return Result(losses, accuracy, [weights for _, _, weights, _ in results], report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["solo", "processes", "threads"], default="processes")
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; by itself an accelerator, where there is one")
    parser.add_argument("--devices", type=int, help=f"ranks, a divisor of {GLOBAL_BATCH}; 2 unless the mode is solo")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--picture", type=Path, default=Path("out/digits.png"))
    arguments = parser.parse_args()
    devices = (1 if arguments.mode == "solo" else 2) if arguments.devices is None else arguments.devices
    if devices < 1 or GLOBAL_BATCH % devices:
        parser.error(f"--devices {devices} does not divide the global batch of {GLOBAL_BATCH}; pass 1, 2, 4, ...")
    if arguments.mode == "solo" and devices > 1:
        parser.error(f"--mode solo runs on one device, not on --devices {devices}; pass --mode processes or threads")
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs} trains nothing; pass a number of at least 1")
    if arguments.backend:
        os.environ["UNISONO_BACKEND"] = arguments.backend
    result = run(arguments.mode, devices, arguments.epochs)
    result.report.print()
    print(f"test accuracy {result.accuracy:.2%}")
    print(f"picture {result.report.save_picture(result.losses, arguments.picture)}")


if __name__ == "__main__":
    main()
