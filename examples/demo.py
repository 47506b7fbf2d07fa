"""Train a small CNN, with BatchNorm and dropout, on handwritten digits: on any number of devices the weights are the
same, to the last bit.

    python examples/demo.py --devices 3

The 1,797 images of 8 x 8 pixels ship with scikit-learn. The last line is the hash of the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from train_digits import build_loaders

from unisono import Accelerator, Accuracy, gather_report, spawn

VIRTUAL_RANKS = 4  # each computes 16 of the 64 samples of a step


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(rank: int, epochs: int, picture: Path) -> tuple[str, float]:
    """The complete job of a rank. Returns the hash of the weights, and the accuracy on the test set."""
    accelerator = Accelerator(seed=0, split_batches=True, virtual_ranks=VIRTUAL_RANKS)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    model, optimizer, loader, test_loader, accuracy = accelerator.prepare(
        model, optimizer, *build_loaders(ranks=1), Accuracy()
    )
    losses: list[float] = []
    for epoch in range(1, epochs + 1):
        model.train()
        sums, step = [], torch.zeros(2)  # of the losses of a step, and the number of its samples
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            step += torch.stack([loss.detach() * loader.valid_samples, torch.tensor(loader.valid_samples)])
            if accelerator.sync_gradients:  # all virtual ranks have had their turn
                sums.append(step)
                step = torch.zeros(2)
        total = accelerator.reduce(torch.stack(sums), "sum")
        losses += (total[:, 0] / total[:, 1]).tolist()
        accelerator.print(f"epoch {epoch:2d}   loss {sum(losses[-len(sums) :]) / len(sums):.4f}")
    report = gather_report()
    model.eval()
    with torch.no_grad():
        for images, labels in test_loader:
            accuracy.update(model(images), labels)
    right = accuracy.compute()
    if report is not None:  # on rank zero
        report.print()
        print(f"picture {report.save_picture(losses, picture)}")
    accelerator.print(f"test accuracy {right:.2%}")
    accelerator.end_training()
    return accelerator.digest(), right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help=f"worker processes, up to {VIRTUAL_RANKS}; default 2")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--picture", type=Path, default=Path("out/digits.png"))
    arguments = parser.parse_args()
    if not 1 <= arguments.devices <= VIRTUAL_RANKS:
        parser.error(f"--devices {arguments.devices} is not in 1 to {VIRTUAL_RANKS}, the number of virtual ranks")
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs} trains nothing; pass a number of at least 1")
    spawn(train, args=(arguments.epochs, arguments.picture), nprocs=arguments.devices, backend="cpu")


if __name__ == "__main__":
    main()
