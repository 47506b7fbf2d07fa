"""Contrastive learning: a loss over the images of all devices, with gradients through the gather.

    python examples/contrastive.py --devices 2

The views are drawn in a loader worker, seeded by the sample, so the losses are those of one device.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unisono import Accelerator, functional, spawn, world_size


class Views(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Two random views of each image, each shifted by up to a pixel and with noise."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.view(index), self.view(index)

    def view(self, index: int) -> torch.Tensor:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll((down, right), dims=(1, 2)) + 0.1 * torch.randn(1, 8, 8)


def build_model() -> nn.Module:
    """Map an image to 32 numbers."""
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 9, 32))


def contrastive_loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The contrastive loss, mean over the images: low if the two views of an image are close, and others are not."""
    closeness = F.normalize(first) @ F.normalize(second).T / 0.2
    return F.cross_entropy(closeness, torch.arange(len(closeness), device=closeness.device))


def train(index: int, epochs: int) -> tuple[list[float], float]:
    """The last loss of each epoch, and how many of 360 test images are nearest to a training image of their digit."""
    accelerator = Accelerator(seed=0, split_batches=True)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(Views(images[360:]), batch_size=120, shuffle=True, num_workers=1)
    plain_loader = DataLoader(TensorDataset(images, labels), batch_size=120)
    model, optimizer, loader, plain_loader = accelerator.prepare(model, optimizer, loader, plain_loader)
    losses = []
    for epoch in range(epochs):
        for views in loader:
            optimizer.zero_grad()
            own = tuple(model(view) for view in views)
            first, second = functional.all_gather_samples(own, loader.valid_samples)  # of all ranks
            loss = contrastive_loss(first, second)
            accelerator.backward(loss, weight=len(first) / world_size())  # each rank has the loss of all
            optimizer.step()
        losses.append(loss.item())
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    found = []
    with torch.no_grad():
        for batch, batch_labels in plain_loader:
            found.append(accelerator.gather_for_metrics((F.normalize(model(batch)), batch_labels)))
    points, labels = (torch.cat(column) for column in zip(*found, strict=True))
    nearest = (points[:360] @ points[360:].T).argmax(dim=1)
    return losses, float((labels[360:][nearest] == labels[:360]).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; an accelerator by default, where there is one")
    parser.add_argument("--epochs", type=int, default=6)
    given = parser.parse_args()
    _, accuracy = spawn(train, args=(given.epochs,), nprocs=given.devices, backend=given.backend)[0]
    print(f"accuracy by the nearest neighbour {accuracy:.2%}")
