"""The plain twin of images.py: one device, and torch alone."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images of 8 x 8 pixels to train on, and 360 to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])


def build_model() -> nn.Module:
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 9, 10))


def train(epochs: int) -> tuple[list[float], float]:
    """Return the mean loss of each epoch, and the accuracy on the test images."""
    torch.manual_seed(0)
    train_set, test_set = load()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(train_set, batch_size=60, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=120)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * len(loader))
    losses = []
    for epoch in range(epochs):
        total = torch.zeros(())
        for images, labels in tqdm(loader, desc=f"epoch {epoch}", leave=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.detach() * len(labels)
        losses.append(total.item() / len(train_set))
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    right = 0
    with torch.no_grad():
        for images, labels in test_loader:
            predictions = model(images).argmax(dim=1)
            right += int((predictions == labels).sum())
    return losses, right / len(test_set)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    given = parser.parse_args()
    _, accuracy = train(given.epochs)
    print(f"test accuracy {accuracy:.2%}")
