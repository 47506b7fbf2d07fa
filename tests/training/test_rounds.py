"""Ranks whose loaders have drifted apart are told, on every rank, before a wrong gradient is applied."""

from __future__ import annotations

import random

import pytest
import torch
from modes import PROCESSES_2
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from unisono import DeviceLoader, optimizer_step, rank

DATA = TensorDataset(torch.arange(40.0).unsqueeze(1))


class OwnOrder(Sampler):
    """Another order on each rank."""

    def __len__(self) -> int:
        return 40

    def __iter__(self):
        order = list(range(40))
        random.Random(rank()).shuffle(order)
        return iter(order)


class OwnStream(IterableDataset):
    def __iter__(self):
        yield from ((torch.tensor([float(number)]), number) for number in OwnOrder())


def steps(loader) -> int:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    done = 0
    for inputs, *_ in loader:
        (weight * inputs).sum().backward()
        optimizer_step(optimizer)
        done += 1
    return done


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(DATA, batch_size=5, sampler=OwnOrder()), "must read the same batches"),
        (lambda: DataLoader(OwnStream(), batch_size=5), "read different streams"),
    ],
)
def test_ranks_that_read_in_different_orders_are_told(make, words):
    with pytest.raises(RuntimeError, match=words) as caught:
        PROCESSES_2.run(lambda: steps(DeviceLoader(make())))
    assert not any("cannot be read" in note for note in caught.value.__notes__), "of no batch"


class OwnAugmentation(OwnStream):
    def __iter__(self):
        noise = random.Random(rank())
        for label in range(40):
            yield torch.tensor([noise.random()]), torch.full((2,), noise.randrange(256), dtype=torch.uint8), label


def test_ranks_that_augment_the_same_samples_in_their_own_ways_are_not():
    assert PROCESSES_2.run(lambda: steps(DeviceLoader(DataLoader(OwnAugmentation(), batch_size=5)))) == [4, 4]
