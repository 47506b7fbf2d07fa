"""Digits on one device, which `xla_device()` returns; each step ends with a barrier.

    python examples/torch_xla_style/train_mnist_single.py
    UNISONO_BACKEND=xla python examples/torch_xla_style/train_mnist_single.py

Every loss is read as soon as its step has ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import mnist
import torch
import torch.nn.functional as F
from torch import nn, optim

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.debug.metrics as met
import unisono.compat.torch_xla.utils.utils as xu


def train(
    model: nn.Module, loader: Iterable[Any], optimizer: optim.Optimizer, device: torch.device, tracker: xm.RateTracker
) -> float:
    """Train for one epoch. Return the mean loss."""
    model.train()
    losses = []
    for step, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(device)), target.to(device))
        loss.backward()
        xm.optimizer_step(optimizer, barrier=True)
        losses.append(loss.item())  # after the barrier it has its value, and reading it cuts no graph
        tracker.add(len(data))
        if step % 10 == 0:
            print(f"[{device}]({step}) Loss={losses[-1]:.5f} Rate={tracker.rate():.2f}")
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model: nn.Module, loader: Iterable[Any], device: torch.device) -> float:
    """The fraction of the digits that are classified correctly."""
    model.eval()
    correct, total = torch.zeros((), dtype=torch.int64, device=device), 0
    for data, target in loader:
        correct += (model(data.to(device)).argmax(dim=1) == target.to(device)).sum()
        total += len(data)
        xm.mark_step()
    return correct.item() / total


def train_mnist(flags: argparse.Namespace) -> None:
    train_loader: Iterable[Any]
    test_loader: Iterable[Any]
    if flags.fake_data:
        train_loader = test_loader = xu.SampleGenerator(mnist.fake_batch(flags), mnist.NUM_TRAIN // flags.batch_size)
    else:
        train_loader, test_loader = mnist.loaders(flags, num_replicas=1, ordinal=0)
    device = xm.xla_device()
    model = mnist.model(flags).to(device)
    optimizer = optim.SGD(model.parameters(), lr=flags.lr, momentum=0.9)
    tracker = xm.RateTracker()
    for epoch in range(flags.num_epochs):
        mnist.set_epoch(train_loader, epoch)
        loss = train(model, train_loader, optimizer, device, tracker)
        print(f"Epoch {epoch} loss {loss:.6f} accuracy {test(model, test_loader, device):.2%}", flush=True)
    print(met.metrics_report())


if __name__ == "__main__":
    train_mnist(mnist.parse_flags(__doc__, has_cores=False))
