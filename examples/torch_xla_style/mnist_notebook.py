"""Digits as in a notebook: a model built once and wrapped, data prepared worker by worker, a loader per epoch.

    python examples/torch_xla_style/mnist_notebook.py --num_cores 2

The original forks a process for each device; its `start_method` argument stays, and is safe here.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import mnist
import torch
import torch.nn.functional as F
from torch import optim

import unisono.compat.torch_xla.core.xla_model as xm
import unisono.compat.torch_xla.distributed.parallel_loader as pl
import unisono.compat.torch_xla.distributed.xla_multiprocessing as xmp
import unisono.compat.torch_xla.utils.utils as xu

# %% What the workers share
FLAGS = mnist.parse_flags(__doc__)
SERIAL_EXEC = xmp.MpSerialExecutor()
WRAPPED_MODEL = xmp.MpModelWrapper(mnist.model(FLAGS))


# %% What a worker does
def get_loaders() -> tuple[Any, Any]:
    if FLAGS.fake_data:
        count = mnist.NUM_TRAIN // FLAGS.batch_size // xm.xrt_world_size()
        return xu.SampleGenerator(mnist.fake_batch(FLAGS), count), xu.SampleGenerator(mnist.fake_batch(FLAGS), count)
    return mnist.loaders(FLAGS, xm.xrt_world_size(), xm.get_ordinal())


def train_loop_fn(model: torch.nn.Module, optimizer: optim.Optimizer, loader: pl.PerDeviceLoader) -> float:
    losses: list[float] = []
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.add_step_closure(lambda loss: losses.append(loss.item()), args=(loss.detach(),))
    return sum(losses) / len(losses)


@torch.no_grad()
def test_loop_fn(model: torch.nn.Module, device: torch.device, loader: pl.PerDeviceLoader) -> tuple[int, int]:
    model.eval()
    correct, total = torch.zeros((), dtype=torch.int64, device=device), 0
    for data, target in loader:
        correct += (model(data).argmax(dim=1) == target).sum()
        total += len(data)
    return int(correct.item()), total


def _mp_fn(rank: int, flags: argparse.Namespace) -> None:
    train_loader, test_loader = SERIAL_EXEC.run(get_loaders)  # one after another, so that a download would be made once
    device = xm.xla_device()
    model = WRAPPED_MODEL.to(device)
    optimizer = optim.SGD(model.parameters(), lr=flags.lr, momentum=0.9)
    for epoch in range(flags.num_epochs):
        mnist.set_epoch(train_loader, epoch)
        loss = train_loop_fn(model, optimizer, pl.ParallelLoader(train_loader, [device]).per_device_loader(device))
        correct, total = test_loop_fn(model, device, pl.ParallelLoader(test_loader, [device]).per_device_loader(device))
        payloads = xm.rendezvous(f"epoch_{epoch}", json.dumps([loss, correct, total]).encode())
        results = [json.loads(payload) for payload in payloads]  # by ordinal
        loss, correct, total = (sum(each) for each in zip(*results, strict=True))
        xm.master_print(f"Epoch {epoch} loss {loss / len(results):.6f} accuracy {correct / total:.2%}", flush=True)


# %% Start them
if __name__ == "__main__":
    xmp.spawn(_mp_fn, args=(FLAGS,), nprocs=FLAGS.num_cores, start_method="fork")
