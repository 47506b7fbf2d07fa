"""A loader that is created again for each epoch reads the same order each time: it is warned of."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from epochs import Numbers, worlds
from rereading import COUNT, plain, shuffled, taken
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from unisono import Accelerator, DeviceLoader, ParallelLoader
from unisono.loaders import registry


@pytest.fixture
def told(caplog) -> Callable[[], list[str]]:
    registry.say_repetition.cache_clear()

    def warnings() -> list[str]:
        return [each.message for each in caplog.records if each.levelno == logging.WARNING]

    return warnings


@pytest.mark.parametrize(
    "make", [DeviceLoader, lambda source: ParallelLoader(source, ["cpu"]).per_device_loader("cpu")]
)
def test_a_loader_made_again_for_each_epoch_is_told_of_once(told, make):
    source = shuffled()
    assert [taken(make(source)) for _ in range(4)] == [plain(0)] * 4
    (words,) = told()
    assert "a DataLoader is read in the order of epoch 0 again" in words
    assert "set_epoch" in words


@pytest.mark.parametrize(
    "make",
    [
        lambda data, epoch: DataLoader(data, batch_size=2, shuffle=True),
        lambda data, epoch: DataLoader(data, batch_size=2 + epoch, shuffle=True, num_workers=epoch % 2),
        lambda data, epoch: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(epoch, COUNT))),
    ],
    ids=["plain", "with other batches", "with a sampler"],
)
def test_a_dataloader_made_again_for_each_epoch_is_told_of_once(told, make):
    data = Numbers(COUNT)
    for epoch in range(4):
        loader = DeviceLoader(make(data, epoch))
        taken(loader)
    (words,) = told()
    assert "a DataLoader is read in the order of epoch 0 again" in words
    assert "over its dataset" in words


def test_an_accelerator_s_loader_made_again_for_each_epoch_is_told_of(told):
    data, accelerator = Numbers(COUNT), Accelerator()
    for _ in range(2):
        loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))
        taken(loader)
    assert len(told()) == 1


def in_training_and_validation(data: Dataset) -> None:
    train, validation = (DeviceLoader(DataLoader(data, batch_size=2, shuffle=True)) for _ in range(2))
    for _ in range(3):
        taken(train)
        taken(validation)


def in_evaluations_of_their_own(data: Dataset) -> None:
    train = DeviceLoader(DataLoader(data, batch_size=2, shuffle=True))
    for _ in range(3):
        taken(train)
        with torch.no_grad():
            taken(DeviceLoader(DataLoader(data, batch_size=2, shuffle=True)))
        taken(DeviceLoader(DataLoader(data, batch_size=2)))


def with_set_epoch(data: Dataset) -> None:
    for _ in range(2):  # the second time, epoch 0 comes after epoch 2
        for epoch in range(3):
            loader = DeviceLoader(DataLoader(data, batch_size=2, shuffle=True))
            loader.set_epoch(epoch)
            taken(loader)


def with_states(data: Dataset) -> None:
    state = None
    for _ in range(4):
        loader = DeviceLoader(DataLoader(data, batch_size=2, shuffle=True))
        if state is not None:
            loader.load_state_dict(state)
        for number, _ in enumerate(loader):
            if number == 3:
                break
        state = loader.state_dict()


def with_seeds_that_differ(data: Dataset) -> None:
    for epoch in range(3):
        taken(DeviceLoader(DataLoader(data, batch_size=2, shuffle=True), seed=epoch))
        generator = torch.Generator().manual_seed(10 + epoch)
        taken(DeviceLoader(DataLoader(data, batch_size=2, shuffle=True, generator=generator)))


@pytest.mark.parametrize(
    "read",
    [
        in_training_and_validation,
        in_evaluations_of_their_own,
        with_set_epoch,
        with_states,
        with_seeds_that_differ,
    ],
)
def test_a_dataset_that_is_read_by_several_without_repetition_is_not_told_of(told, read):
    read(Numbers(COUNT))
    assert told() == []


class Unhashable(Numbers):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


def test_datasets_are_told_apart_by_identity_and_not_kept(told):
    gc.collect()
    known = len(registry.first_epochs)
    for _ in range(3):
        data = Unhashable(COUNT)
        taken(DeviceLoader(DataLoader(data, batch_size=2, shuffle=True)))
        gone = weakref.ref(data)
        del data
        gc.collect()
        assert gone() is None
    for _ in range(2):
        taken(DeviceLoader(DataLoader([1, 2, 3], batch_size=2, shuffle=True)))  # which cannot be held weakly
    assert (told(), len(registry.first_epochs)) == ([], known)


def test_one_rank_of_several_tells_of_it(told):
    source = shuffled()
    for _ in range(2):
        for world in worlds(3):
            taken(DeviceLoader(source, world=world))
    assert len(told()) == 1
