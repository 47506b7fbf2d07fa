"""A loader that is created again for each epoch reads the same order each time: it is warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from epochs import worlds
from rereading import plain, shuffled, taken
from torch.utils.data import DataLoader

from unisono import DeviceLoader, ParallelLoader
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


def in_training_and_validation(source: DataLoader) -> None:
    train, validation = DeviceLoader(source), DeviceLoader(source)
    for _ in range(3):
        taken(train)
        taken(validation)


def in_evaluations_of_their_own(source: DataLoader) -> None:
    train = DeviceLoader(source)
    for _ in range(3):
        taken(train)
        with torch.no_grad():
            taken(DeviceLoader(source))


def in_order(source: DataLoader) -> None:
    for _ in range(3):
        taken(DeviceLoader(DataLoader(source.dataset, batch_size=2)))


def with_set_epoch(source: DataLoader) -> None:
    for _ in range(2):  # the second time, epoch 0 comes after epoch 2
        for epoch in range(3):
            loader = DeviceLoader(source)
            loader.set_epoch(epoch)
            taken(loader)


def with_states(source: DataLoader) -> None:
    state = None
    for _ in range(4):
        loader = DeviceLoader(source)
        if state is not None:
            loader.load_state_dict(state)
        for number, _ in enumerate(loader):
            if number == 3:
                break
        state = loader.state_dict()


def with_seeds_that_differ(source: DataLoader) -> None:
    for epoch in range(3):
        taken(DeviceLoader(source, seed=epoch))


@pytest.mark.parametrize(
    "read",
    [
        in_training_and_validation,
        in_evaluations_of_their_own,
        in_order,
        with_set_epoch,
        with_states,
        with_seeds_that_differ,
    ],
)
def test_a_loader_that_is_read_by_several_without_repetition_is_not_told_of(told, read):
    read(shuffled())
    assert told() == []


def test_one_rank_of_several_tells_of_it(told):
    source = shuffled()
    for _ in range(2):
        for world in worlds(3):
            taken(DeviceLoader(source, world=world))
    assert len(told()) == 1
