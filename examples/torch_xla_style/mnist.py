"""Shared by the scripts of this folder, all of it plain torch: the network, the digits, the options.

The 1,797 images of 8 x 8 pixels ship with scikit-learn. A replica's batches are its part of the global ones, so N cores
with batches of B see the same samples as one core with batches of N * B.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NUM_TRAIN, NUM_TEST = 1408, 384  # whole global batches of 128


class MNIST(nn.Module):
    """Two convolutions and two linear layers, with the same initial weights on every replica.

    Args:
        side: the side of the square images, in pixels.
    """

    def __init__(self, side: int) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(10, 20, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(20 * (side // 4) ** 2, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def model(flags: argparse.Namespace) -> MNIST:
    return MNIST(28 if flags.fake_data else 8)


def fake_batch(flags: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch in the shape of MNIST."""
    return torch.zeros(flags.batch_size, 1, 28, 28), torch.zeros(flags.batch_size, dtype=torch.int64)


def loaders(flags: argparse.Namespace, num_replicas: int, ordinal: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The training and the test digits of one replica."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN : NUM_TRAIN + NUM_TEST]
    train_set, test_set = TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
    return (
        DataLoader(train_set, flags.batch_size, sampler=DistributedSampler(train_set, num_replicas, ordinal)),
        DataLoader(test_set, flags.batch_size, sampler=DistributedSampler(test_set, num_replicas, ordinal, False)),
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch that determines the order of the digits; made-up data have no order."""
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def parse_flags(description: str | None, *, has_cores: bool = True) -> argparse.Namespace:
    """The options of the command line. `has_cores`: whether the script has --num_cores."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_cores:
        parser.add_argument("--num_cores", type=int, help="one replica on each; all there are, if not given")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="of one replica")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fake_data", action="store_true", help="made-up data in the shape of MNIST")
    return parser.parse_args()
