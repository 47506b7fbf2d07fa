"""A script written for Accelerate, with only its import lines changed: handwritten digits, on any number of ranks.

    python examples/accelerate_style.py
    unisono run -n 2 examples/accelerate_style.py --mixed_precision bf16

The script searches for a batch size that fits; accumulation makes up the difference, so a step sees the same samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train_digits import build_loaders

from unisono.compat.accelerate import Accelerator
from unisono.compat.accelerate.logging import get_logger
from unisono.compat.accelerate.utils import find_executable_batch_size, set_seed

STEP = 64
"""Samples per step, on all ranks together."""

logger = get_logger(__name__)


def training_function(args: argparse.Namespace) -> tuple[float, Mapping[str, Any]]:
    """Train. Return the test accuracy of the last epoch, each sample counted once, and the weights."""
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    most = STEP // accelerator.num_processes

    @find_executable_batch_size(starting_batch_size=most, reduce_batch_size_fn=iter([most // 2, most // 4, 1]).__next__)
    def train(batch_size: int) -> tuple[float, Mapping[str, Any]]:
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = most // batch_size
        set_seed(args.seed)
        train_data, test_data = (loader.dataset for loader in build_loaders(1))
        if batch_size > args.largest_batch_size:
            raise torch.OutOfMemoryError(f"a batch of {batch_size} does not fit, as --largest_batch_size says")
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        prepared: Any = accelerator.prepare(
            model, optimizer, DataLoader(train_data, batch_size, shuffle=True), DataLoader(test_data, batch_size)
        )
        model, optimizer, train_loader, test_loader = prepared
        accuracy = 0.0
        for epoch in range(args.num_epochs):
            model.train()
            for images, labels in train_loader:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(images), labels))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            accuracy = evaluate(accelerator, model, test_loader)
            accelerator.print(f"epoch {epoch}: {accuracy:.2%}")
            logger.debug("trained with batches of %d", batch_size)
        return accuracy, accelerator.get_state_dict(model)

    result: tuple[float, Mapping[str, Any]] = train()
    accelerator.end_training()
    return result


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    """The fraction of the samples that are classified correctly."""
    model.eval()
    right = seen = 0
    for images, labels in loader:
        found, wanted = accelerator.gather_for_metrics((model(images).argmax(dim=-1), labels))
        right, seen = right + int((found == wanted).sum()), seen + len(wanted)
    return right / seen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--num_epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--largest_batch_size", type=int, default=STEP, help="act as if a larger one did not fit")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training_function(parse())
