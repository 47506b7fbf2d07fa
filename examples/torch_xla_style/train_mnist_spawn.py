"""Digits on several devices, with a process for each: `spawn`, `MpDeviceLoader`, `mesh_reduce`.

    python examples/torch_xla_style/train_mnist_spawn.py --num_cores 2
    UNISONO_BACKEND=xla PJRT_DEVICE=CPU python examples/torch_xla_style/train_mnist_spawn.py --num_cores 2

Closures read the losses after the end of their step, while the next one is in progress.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import mnist
import numpy as np
import torch
import torch.nn.functional as F
from torch import optim

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp
import unisono.compat.torch_xla.utils.utils as xu


def train_mnist(flags: argparse.Namespace) -> None:
    train_loader: Iterable[Any]
    test_loader: Iterable[Any]
    if flags.fake_data:
        sample_count = mnist.NUM_TRAIN // flags.batch_size // xm.xrt_world_size()
        train_loader = test_loader = xu.SampleGenerator(mnist.fake_batch(flags), sample_count)
    else:
        train_loader, test_loader = mnist.loaders(flags, xm.xrt_world_size(), xm.get_ordinal())
    device = xm.xla_device()
    model = mnist.model(flags).to(device)
    optimizer = optim.SGD(model.parameters(), lr=flags.lr, momentum=0.9)
    train_device_loader = pl.MpDeviceLoader(train_loader, device)
    test_device_loader = pl.MpDeviceLoader(test_loader, device)
    losses: list[float] = []

    def update(step: int, loss: torch.Tensor, tracker: xm.RateTracker) -> None:
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"[{xm.get_ordinal()}]({step}) Loss={losses[-1]:.5f} Rate={tracker.rate():.2f}", flush=True)

    def train_loop_fn(loader: pl.MpDeviceLoader) -> None:
        tracker = xm.RateTracker()
        model.train()
        for step, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(flags.batch_size)
            xm.add_step_closure(update, args=(step, loss.detach(), tracker))

    @torch.no_grad()
    def test_loop_fn(loader: pl.MpDeviceLoader) -> float:
        model.eval()
        correct, total = torch.zeros((), dtype=torch.int64, device=device), 0
        for data, target in loader:
            correct += (model(data).argmax(dim=1) == target).sum()
            total += len(data)
        return float(xm.mesh_reduce("test_accuracy", correct.item() / total, np.mean))

    for epoch in range(flags.num_epochs):
        losses.clear()
        mnist.set_epoch(train_loader, epoch)
        train_loop_fn(train_device_loader)
        mean_loss = xm.mesh_reduce("loss", np.mean(losses), np.mean)
        accuracy = test_loop_fn(test_device_loader)
        xm.master_print(f"Epoch {epoch} loss {mean_loss:.6f} accuracy {accuracy:.2%}", flush=True)


def _mp_fn(index: int, flags: argparse.Namespace) -> None:
    train_mnist(flags)


if __name__ == "__main__":
    FLAGS = mnist.parse_flags(__doc__)
    xmp.spawn(_mp_fn, args=(FLAGS,), nprocs=FLAGS.num_cores)
