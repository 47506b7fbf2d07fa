"""Each loader counts its own epochs; samplers and datasets are given them; one created for each epoch is warned of."""

from __future__ import annotations

import gc
import io
import logging
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import tqdm
import tqdm.auto
from epochs import Numbers
from modes import THREADS_2, devices
from rereading import COUNT, loop_of, plain, shuffled, taken
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from unisono import DataParallel, DeviceLoader, ParallelLoader
from unisono.loading import registry


def test_each_loader_over_a_dataloader_counts_epochs_of_its_own():
    source = shuffled()
    train, evaluation = DeviceLoader(source), DeviceLoader(source)
    assert [taken(train), taken(train)] == [plain(0), plain(1)]
    assert (train.epoch, evaluation.epoch) == (2, 0)
    assert taken(evaluation) == plain(0)
    train.set_epoch(7)
    assert (train.epoch, evaluation.epoch) == (7, 1)
    assert (taken(evaluation), taken(train)) == (plain(1), plain(7))
    parallel = ParallelLoader(source, ["cpu"])
    assert taken(parallel.per_device_loader("cpu")) == plain(0)


def test_a_bar_begins_one_epoch_though_it_asks_for_two_iterators():
    loader = DeviceLoader(shuffled())
    for epoch, bar in enumerate((tqdm.tqdm, tqdm.auto.tqdm)):
        assert taken(bar(loader, file=io.StringIO())) == plain(epoch)
    once = DeviceLoader(iter([1, 2, 3]))
    assert list(bar(once, file=io.StringIO())) == [1, 2, 3]


def test_loops_begun_together_count_as_epochs_by_their_first_batches():
    loader = DeviceLoader(shuffled())
    first, unused, second = iter(loader), iter(loader), iter(loader)
    both = [(a.tolist(), b.tolist()) for a, b in zip(second, first, strict=True)]
    assert [sample for a, _ in both for sample in a] == plain(0)
    assert [sample for _, b in both for sample in b] == plain(1)
    del unused
    assert taken(loader) == plain(2)


def test_two_loaders_over_one_dataloader_each_take_every_sample_per_epoch():
    source = shuffled()

    def body() -> list[list[int]]:
        train, evaluation = DeviceLoader(source), DeviceLoader(source)
        return [taken(loader) for loader in (train, train, evaluation, train)]

    found = list(zip(*THREADS_2.run(body), strict=True))
    assert [sorted(sample for part in parts for sample in part) for parts in found] == [list(range(COUNT))] * 4
    assert found[2] == found[0] != found[1] != found[3]


def test_nothing_is_set_on_the_users_loader_and_nothing_keeps_it():
    source = shuffled()
    before = dict(vars(source))
    train = DeviceLoader(source)
    taken(train)
    replicas = DataParallel(nn.Identity(), devices(2))
    replicas(lambda _, batches, *__: taken(batches), source)
    assert vars(source) == before
    gone = weakref.ref(source)
    del source, train
    gc.collect()
    assert gone() is None, "not by the DataParallel, which lives"


def merged(each_ranks: list[list[int]]) -> list[int]:
    """The samples in the order of one device, where each batch has two."""
    pairs = [[part[at : at + 2] for at in range(0, len(part), 2)] for part in each_ranks]
    return [sample for round_ in zip(*pairs, strict=True) for pair in round_ for sample in pair]


def test_each_data_parallel_call_is_the_next_epoch_of_its_loader():
    replicas, others = (DataParallel(nn.Identity(), devices(2)) for _ in range(2))
    train, evaluation = shuffled(), shuffled()
    calls = [(replicas, train), (replicas, train), (replicas, evaluation), (replicas, train), (others, train)]
    found = [merged(each(loop_of, source)) for each, source in calls]
    assert found == [plain(epoch) for epoch in (0, 1, 0, 2, 0)]


class Pid(Numbers):
    def __getitem__(self, index: int) -> int:
        import os

        return os.getpid()


def test_persistent_workers_serve_each_call_of_a_data_parallel():
    source = DataLoader(Pid(4), batch_size=2, num_workers=1, persistent_workers=True)
    replicas = DataParallel(nn.Identity(), devices(2))
    assert len({pid for _ in range(2) for part in replicas(loop_of, source) for pid in part}) == 1


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


def test_a_sampler_that_threads_share_is_told_the_epoch_of_each_loop():
    source = DataLoader(Numbers(COUNT), batch_size=1, sampler=Persistent())

    def body() -> list[list[int]]:
        train, evaluation = DeviceLoader(source), DeviceLoader(source)
        train.set_epoch(3)
        return [taken(loader) for loader in (train, evaluation, train, evaluation)]

    assert THREADS_2.run(body) == [[[3, 3], [0, 0], [4, 4], [1, 1]]] * 2


@pytest.mark.parametrize("is_within", [False, True], ids=["a sampler", "within a batch sampler"])
def test_a_sampler_is_told_its_loops_epoch_whenever_one_begins(is_within):
    sampler = Persistent()
    batches = {"batch_sampler": BatchSampler(sampler, 2, False)} if is_within else {"sampler": sampler, "batch_size": 2}
    source = DataLoader(Numbers(COUNT), **batches)
    train, evaluation = DeviceLoader(source), DeviceLoader(source)
    found = []
    for loader in (train, train, evaluation, train, evaluation):
        sampler.set_epoch(99)  # whoever has told it another one
        found.append(taken(loader))
    assert found == [[epoch] * 4 for epoch in (0, 1, 0, 2, 1)]


def test_an_epoch_set_on_the_sampler_matches_the_loop_or_is_warned_about(caplog: pytest.LogCaptureFixture):
    data = Numbers(COUNT)
    loader = DeviceLoader(DataLoader(data, batch_size=2, sampler=(sampler := DistributedSampler(data, 1, 0))))
    other = DeviceLoader(DataLoader(data, batch_size=2, sampler=sampler))
    for epoch in range(3):  # as scripts for torch's DistributedDataParallel do
        loader.sampler.set_epoch(epoch)
        expected = list(sampler)
        assert [int(each) for batch in loader for each in batch] == expected
    assert len(list(other)) == COUNT // 2  # its first loop, epoch 0
    assert not caplog.text
    for epoch in (7, 9):
        loader.sampler.set_epoch(epoch)
        list(loader)
    words = "epoch 7 was set on the DistributedSampler, and the loop takes epoch 3: a prepared loader counts its loops"
    assert caplog.text.count("was set on") == caplog.text.count(words) == 1
    loader.set_epoch(11)
    sampler.set_epoch(11)
    expected = list(sampler)
    assert [int(each) for batch in loader for each in batch] == expected


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ByEpoch, {}),
        (StreamByEpoch, {"num_workers": 1}),
        *((kind, {"num_workers": 1, "persistent_workers": True}) for kind in (ByEpoch, StreamByEpoch)),
    ],
    ids=str,
)
def test_a_dataset_with_an_epoch_is_told_that_of_each_loop(kind, options):
    source = DataLoader(kind(), batch_size=2, **options)
    train, evaluation = DeviceLoader(source), DeviceLoader(source)
    assert [taken(loader)[0] for loader in (train, train, evaluation, train)] == [0, 100, 0, 200]
    train.set_epoch(7)
    assert taken(train) == [700, 701, 702, 703]


@pytest.fixture
def told(caplog) -> Callable[[], list[str]]:
    registry.say_repetition.cache_clear()

    def warnings() -> list[str]:
        return [each.message for each in caplog.records if each.levelno == logging.WARNING]

    return warnings


@pytest.mark.parametrize(
    "make",
    [
        DeviceLoader,
        lambda source: ParallelLoader(source, ["cpu"]).per_device_loader("cpu"),
        lambda source: DeviceLoader(DataLoader(source.dataset, batch_size=2, shuffle=True)),
    ],
    ids=["DeviceLoader", "ParallelLoader", "DataLoader"],
)
def test_a_loader_made_again_for_each_epoch_is_told_of_once(told, make):
    source = shuffled()
    assert [taken(make(source)) for _ in range(4)] == [plain(0)] * 4
    (words,) = told()
    assert "a shuffled dataset is read in the order of epoch 0 again" in words
    assert "set_epoch" in words


def test_a_loader_read_by_several_without_repetition_draws_no_warning(told):
    training, evaluated, reseeded, jumping, resumed = (shuffled() for _ in range(5))
    train, validation, other = DeviceLoader(training), DeviceLoader(training), DeviceLoader(evaluated)
    state = DeviceLoader(resumed).state_dict()
    for epoch in (0, 1, 2, 0, 1, 2):  # the second time, epoch 0 comes after epoch 2
        taken(train), taken(validation), taken(other)
        with torch.no_grad():
            taken(DeviceLoader(evaluated))
        taken(DeviceLoader(DataLoader(training.dataset, batch_size=2)))
        taken(DeviceLoader(reseeded, seed=epoch))
        loader = DeviceLoader(jumping)
        loader.set_epoch(epoch)
        taken(loader)
        loader = DeviceLoader(resumed)
        loader.load_state_dict(state)
        next(batches := iter(loader))
        state = loader.state_dict()
        del batches
    assert told() == []
