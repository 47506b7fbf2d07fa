"""The plain twin of gan.py: one device, and torch alone."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

NOISE = 16


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each image with fresh noise for the generator."""

    def __init__(self) -> None:
        self.images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], torch.randn(NOISE)


def network(inputs: int, outputs: int, last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs), last)


def loss_for(scores: torch.Tensor, is_real: bool) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def train(epochs: int) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Return the last losses of critic and generator in each epoch, and generated images (16, 64)."""
    torch.manual_seed(0)
    generator, critic = network(NOISE, 64, nn.Tanh()), network(64, 1, nn.Identity())
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(Digits(), batch_size=64, shuffle=True, num_workers=1)
    losses = []
    for epoch in range(epochs):
        for real, noise in loader:
            fake = generator(noise)

            optimizer_c.zero_grad()
            loss_c = loss_for(critic(real), True) + loss_for(critic(fake.detach()), False)
            loss_c.backward()
            optimizer_c.step()

            optimizer_g.zero_grad()
            loss_g = loss_for(critic(fake), True)
            loss_g.backward()
            optimizer_g.step()
        losses.append((loss_c.item(), loss_g.item()))
        print(f"epoch {epoch}: critic {losses[-1][0]:.3f}, generator {losses[-1][1]:.3f}")
    with torch.no_grad():
        return losses, generator(torch.randn(16, NOISE, generator=torch.Generator().manual_seed(1)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    train(parser.parse_args().epochs)
