"""Train on handwritten digits twice, with the Accelerator and by hand, with the functions that it calls: equal weights.

    python examples/by_hand.py --devices 2

Both accumulate two batches per step, clip gradients, compute in bfloat16, follow a schedule, and count each test sample
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LinearLR
from train_digits import build_loaders

from unisono import (
    Accelerator,
    DeviceLoader,
    all_gather_samples,
    backward,
    current_world,
    is_rank_zero,
    optimizer_step,
    spawn,
    world_size,
)


class Result(NamedTuple):
    """The result of a training: the weights, by name, and the fraction of test samples classified correctly."""

    weights: dict[str, torch.Tensor]
    accuracy: float


def build() -> tuple[Any, ...]:
    """Model, optimizer, scheduler and loaders, as in plain torch."""
    torch.manual_seed(0)  # the same initial weights on every rank
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(current_world().device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return model, optimizer, LinearLR(optimizer, 1.0, 0.1, total_iters=80), *build_loaders(world_size())


def train_by_accelerator(epochs: int) -> Result:
    """The plain loop, with prepared objects."""
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=2, max_grad_norm=1.0, schedule_unit="step"
    )
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(*build())
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
    return Result(model.state_dict(), evaluate(model, test_loader, accelerator.gather_for_metrics))


def train_by_hand(epochs: int) -> Result:
    """The same in five lines, which are numbered."""
    model, optimizer, scheduler, loader, test_loader = build()
    loader, test_loader = DeviceLoader(loader), DeviceLoader(test_loader)  # 1
    optimizer.register_step_pre_hook(lambda *_: clip(model))  # 2: after the reduction
    for _ in range(epochs):
        for number, (images, labels) in enumerate(loader, 1):
            with torch.autocast(current_world().device.type, torch.bfloat16):  # 3
                outputs = model(images)
            backward(F.cross_entropy(outputs.float(), labels))  # 4: the mean over all samples of the step
            if number % 2 == 0 or number == len(loader):
                optimizer_step(optimizer)  # 5: over all ranks
                optimizer.zero_grad()
                scheduler.step()
    with torch.autocast(current_world().device.type, torch.bfloat16):
        accuracy = evaluate(model, test_loader, lambda rows: all_gather_samples(rows, test_loader.valid_samples))
    return Result(model.state_dict(), accuracy)


def clip(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1.0)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Any], gather: Callable[[Any], Any]) -> float:
    """The accuracy; `gather` returns the rows of all ranks."""
    model.eval()
    found = [gather((model(images).argmax(1), labels)) for images, labels in loader]
    predictions, labels = (torch.cat(column) for column in zip(*found, strict=True))
    assert len(labels) == 360, "each test sample once"
    return float((predictions == labels).float().mean())


def compare(epochs: int = 8) -> tuple[Result, Result]:
    """Train both ways on this rank."""
    ours, by_hand = train_by_accelerator(epochs), train_by_hand(epochs)
    for name, weight in ours.weights.items():  # bit by bit on one and two devices; on more, the order of sums differs
        torch.testing.assert_close(by_hand.weights[name], weight, rtol=0, atol=5e-3)  # and bfloat16 steps are 4e-3 wide
    if is_rank_zero():
        print(f"the same weights both ways; test accuracy {ours.accuracy:.2%}")
    return ours, by_hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="cpu, cuda, mps or xla; by itself an accelerator, where there is one")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    spawn(lambda _: compare(arguments.epochs), nprocs=arguments.devices, backend=arguments.backend)


if __name__ == "__main__":
    main()
