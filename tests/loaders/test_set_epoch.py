"""A sampler or dataset with `set_epoch` is given the epoch of each loop that begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from epochs import Numbers
from modes import PROCESSES_2, THREADS_2
from rereading import COUNT, taken
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from unisono import DeviceLoader


class ByEpoch(Dataset):
    """Sample i of epoch e is 100 e + i."""

    epoch = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class StreamByEpoch(ByEpoch, IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter([100 * self.epoch + index for index in range(4)])


class Persistent:
    """A sampler whose order is its epoch's, and that keeps it until it is told another one."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_a_sampler_that_threads_share_is_told_the_epoch_of_each_loop(mode):
    source = DataLoader(Numbers(COUNT), batch_size=1, sampler=Persistent())

    def body() -> list[list[int]]:
        train, evaluation = DeviceLoader(source), DeviceLoader(source)
        train.set_epoch(3)
        return [taken(loader) for loader in (train, evaluation, train, evaluation)]

    assert mode.run(body) == [[[3, 3], [0, 0], [4, 4], [1, 1]]] * 2


@pytest.mark.parametrize("is_within", [False, True], ids=["a sampler", "within a batch sampler"])
def test_a_sampler_with_an_epoch_is_told_that_of_the_loop_each_time_one_begins(is_within):
    sampler = Persistent()
    batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if is_within else {"sampler": sampler, "batch_size": 2}
    source = DataLoader(Numbers(COUNT), **batches)
    train, evaluation = DeviceLoader(source), DeviceLoader(source)
    found = []
    for loader in (train, train, evaluation, train, evaluation):
        sampler.set_epoch(99)  # whoever has told it another one
        found.append(taken(loader))
    assert found == [[epoch] * 4 for epoch in (0, 1, 0, 2, 1)]


@pytest.mark.parametrize("kind", [ByEpoch, StreamByEpoch])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_dataset_with_an_epoch_is_told_that_of_each_loop(kind, options):
    source = DataLoader(kind(), batch_size=2, **options)
    train, evaluation = DeviceLoader(source), DeviceLoader(source)
    found = [taken(loader)[0] for loader in (train, train, evaluation, train, evaluation, evaluation)]
    assert found == [0, 100, 0, 200, 100, 200]
    train.set_epoch(7)
    assert taken(train) == [700, 701, 702, 703]
