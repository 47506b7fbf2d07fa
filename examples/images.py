"""Classify images of digits: with a schedule, checkpoints, a tracker and a progress bar, on any number of devices.

    python examples/images.py --devices 2

Interrupt it and start it again: it continues after the last complete epoch. If a worker dies, all are started again,
and continue from the last step, which is in memory. The losses are those of one device.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Accuracy, Mean, spawn, tqdm


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images of 8 x 8 pixels to train on, and 360 to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])


def build_model() -> nn.Module:
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 9, 10))


def train(index: int, epochs: int, directory: str) -> tuple[list[float], float]:
    """Return the mean loss of each epoch, and the accuracy on the test images."""
    accelerator = Accelerator(seed=0, split_batches=True, project_dir=directory, total_limit=2, schedule_unit="step")
    train_set, test_set = load()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(train_set, batch_size=60, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=120)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    mean, accuracy = accelerator.prepare(Mean(), Accuracy())
    scheduler = accelerator.prepare(OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * len(loader)))
    accelerator.init_trackers("digits", config={"epochs": epochs})
    accelerator.load_state(must_exist=False)
    losses = []
    for epoch in range(loader.epoch, epochs):
        for images, labels in tqdm(loader, desc=f"epoch {epoch}", leave=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            mean.update(loss, labels)
        losses.append(mean.compute())
        mean.reset()
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
        accelerator.log({"loss": losses[-1], "lr": scheduler.get_last_lr()[0]}, step=epoch)
        accelerator.save_state(is_async=True)
    with torch.no_grad():
        for images, labels in test_loader:
            accuracy.update(model(images), labels)
    accelerator.end_training()
    return losses, accuracy.compute()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; an accelerator by default, where there is one")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--directory", default="runs/images")
    given = parser.parse_args()
    _, accuracy = spawn(
        train,
        args=(given.epochs, given.directory),
        nprocs=given.devices,
        backend=given.backend,
        max_restarts=3,
        snapshot_every=1,
    )[0]
    print(f"test accuracy {accuracy:.2%}")
