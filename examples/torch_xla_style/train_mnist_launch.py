"""Digits by today's names: `torch_xla.launch`, `torch_xla.step`, `torch_xla.device`, `runtime`.

    CPU_NUM_DEVICES=2 python examples/torch_xla_style/train_mnist_launch.py

There is one replica per device; on the CPU, CPU_NUM_DEVICES sets their number.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import mnist
import torch
import torch.nn.functional as F
from torch import optim

import unisono.compat.torch_xla as torch_xla
import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.runtime as xr
import unisono.compat.torch_xla.utils.utils as xu


class Training:
    """The training of one replica."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.device = torch_xla.device()
        self.train_loader, self.test_loader = self.make_loaders()
        self.train_device_loader = pl.MpDeviceLoader(self.train_loader, self.device)
        self.test_device_loader = pl.MpDeviceLoader(self.test_loader, self.device)
        self.model = mnist.model(flags).to(self.device)
        self.optimizer = optim.SGD(self.model.parameters(), lr=flags.lr, momentum=0.9)

    def make_loaders(self) -> tuple[Iterable[Any], Iterable[Any]]:
        if self.flags.fake_data:
            sample_count = mnist.NUM_TRAIN // self.flags.batch_size // xr.world_size()
            loader = xu.SampleGenerator(mnist.fake_batch(self.flags), sample_count)
            return loader, loader
        return mnist.loaders(self.flags, xr.world_size(), xr.global_ordinal())

    def train(self) -> float:
        losses = []
        self.model.train()
        for data, target in self.train_device_loader:
            with torch_xla.step():
                self.optimizer.zero_grad()
                loss = F.nll_loss(self.model(data), target)
                loss.backward()
                xm.optimizer_step(self.optimizer)
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def test(self) -> tuple[int, int]:
        self.model.eval()
        correct, total = torch.zeros((), dtype=torch.int64, device=self.device), 0
        for data, target in self.test_device_loader:
            correct += (self.model(data).argmax(dim=1) == target).sum()
            total += len(data)
        torch_xla.sync()
        return int(correct.item()), total

    def run(self) -> None:
        for epoch in range(self.flags.num_epochs):
            mnist.set_epoch(self.train_loader, epoch)
            results = torch.tensor([[self.train(), *self.test()]], device=self.device)
            loss, correct, total = xm.all_reduce(xm.REDUCE_SUM, results)[0].tolist()
            xm.master_print(f"Epoch {epoch} loss {loss / xr.world_size():.6f} accuracy {correct / total:.2%}")


def _mp_fn(index: int, flags: argparse.Namespace) -> None:
    Training(flags).run()


if __name__ == "__main__":
    torch_xla.launch(_mp_fn, args=(mnist.parse_flags(__doc__, has_cores=False),))
