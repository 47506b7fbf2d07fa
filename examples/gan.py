"""A GAN on images of digits: two models and two optimizers, on any number of devices.

    python examples/gan.py --devices 2

The dataset draws the noise of a sample in a loader worker, seeded by the sample, so the losses are those of one device.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from unisono import Accelerator, spawn

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


def train(index: int, epochs: int) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Return the last losses of critic and generator in each epoch, and generated images (16, 64)."""
    accelerator = Accelerator(seed=0, split_batches=True)
    generator, critic = network(NOISE, 64, nn.Tanh()), network(64, 1, nn.Identity())
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(Digits(), batch_size=64, shuffle=True, num_workers=1)
    generator, critic, optimizer_g, optimizer_c, loader = accelerator.prepare(
        generator, critic, optimizer_g, optimizer_c, loader
    )
    losses = []
    for epoch in range(epochs):
        for real, noise in loader:
            fake = generator(noise)

            optimizer_c.zero_grad()
            loss_c = loss_for(critic(real), True) + loss_for(critic(fake.detach()), False)
            accelerator.backward(loss_c)
            optimizer_c.step()

            optimizer_g.zero_grad()
            loss_g = loss_for(critic(fake), True)
            accelerator.backward(loss_g)
            optimizer_g.step()
        mean = accelerator.reduce(torch.stack([loss_c, loss_g]).detach() * loader.weight, "sum")
        losses.append((mean[0].item(), mean[1].item()))
        accelerator.print(f"epoch {epoch}: critic {losses[-1][0]:.3f}, generator {losses[-1][1]:.3f}")
    with torch.no_grad():
        noise = torch.randn(16, NOISE, generator=torch.Generator().manual_seed(1)).to(accelerator.device)
        return losses, generator(noise).cpu()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; an accelerator by default, where there is one")
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    spawn(train, args=(given.epochs,), nprocs=given.devices, backend=given.backend)
