"""Digits on several devices of one process: `DataParallel` runs a loop on each, in a thread.

    CPU_NUM_DEVICES=2 python examples/torch_xla_style/train_mnist_threads.py --num_cores 2

--num_cores 0 is the native run: no threads, no copies of the model.
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
import unisono.compat.torch_xla.distributed.data_parallel as dp
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.utils.utils as xu


def train_mnist(flags: argparse.Namespace) -> None:
    loader: Iterable[Any]
    test_loader: Iterable[Any]
    if flags.fake_data:
        loader = test_loader = xu.SampleGenerator(mnist.fake_batch(flags), mnist.NUM_TRAIN // flags.batch_size)
    else:
        loader, test_loader = mnist.loaders(flags, num_replicas=1, ordinal=0)  # the devices take batches in turn
    devices = [] if flags.num_cores == 0 else xm.get_xla_supported_devices(max_devices=flags.num_cores)
    model_parallel = dp.DataParallel(mnist.model(flags), device_ids=devices)

    def train_loop_fn(
        model: nn.Module, loader: pl.PerDeviceLoader, device: torch.device, context: dp.Context
    ) -> list[float]:
        optimizer = context.getattr_or("optimizer", lambda: optim.SGD(model.parameters(), lr=flags.lr, momentum=0.9))
        tracker = context.getattr_or("tracker", lambda: xm.RateTracker())
        losses: list[float] = []

        def update(step: int, loss: torch.Tensor) -> None:
            losses.append(loss.item())
            if step % 10 == 0:
                print(f"[{xm.get_ordinal()}]({step}) Loss={losses[-1]:.5f} Rate={tracker.rate():.2f}\n", end="")

        model.train()
        for step, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(flags.batch_size)
            xm.add_step_closure(update, args=(step, loss.detach()))
        return losses

    @torch.no_grad()
    def test_loop_fn(
        model: nn.Module, loader: pl.PerDeviceLoader, device: torch.device, context: dp.Context
    ) -> tuple[int, int]:
        model.eval()
        correct, total = torch.zeros((), dtype=torch.int64, device=device), 0
        for data, target in loader:
            correct += (model(data).argmax(dim=1) == target).sum()
            total += len(data)
        return int(correct.item()), total

    for epoch in range(flags.num_epochs):
        mnist.set_epoch(loader, epoch)
        losses = [loss for each in model_parallel(train_loop_fn, loader) for loss in each]
        correct, total = (sum(each) for each in zip(*model_parallel(test_loop_fn, test_loader), strict=True))
        print(f"Epoch {epoch} loss {sum(losses) / len(losses):.6f} accuracy {correct / total:.2%}", flush=True)


if __name__ == "__main__":
    train_mnist(mnist.parse_flags(__doc__))
