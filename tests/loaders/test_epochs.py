"""Each loader counts its own epochs, whoever else reads the same DataLoader."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import tqdm
import tqdm.auto
from epochs import Numbers
from modes import PROCESSES_2, SOLO, THREADS_2, devices
from rereading import COUNT, loop_of, plain, shuffled, taken
from torch import nn
from torch.utils.data import DataLoader, Subset

from unisono import DataParallel, DeviceLoader, ParallelLoader


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


@pytest.mark.parametrize("bar", [tqdm.tqdm, tqdm.auto.tqdm], ids=["tqdm", "auto"])
def test_a_bar_begins_one_epoch_though_it_asks_for_two_iterators(bar):
    loader = DeviceLoader(shuffled())
    for epoch in range(3):
        assert taken(bar(loader, file=io.StringIO())) == plain(epoch)
    once = DeviceLoader(iter([1, 2, 3]))
    assert list(bar(once, file=io.StringIO())) == [1, 2, 3]


def test_loops_that_began_together_are_epochs_in_the_order_of_their_first_batches():
    loader = DeviceLoader(shuffled())
    first, unused, second = iter(loader), iter(loader), iter(loader)
    both = [(a.tolist(), b.tolist()) for a, b in zip(second, first, strict=True)]
    assert [sample for a, _ in both for sample in a] == plain(0)
    assert [sample for _, b in both for sample in b] == plain(1)
    del unused
    assert taken(loader) == plain(2)


def test_an_evaluation_within_each_epoch_moves_no_epoch_of_the_training():
    source = shuffled()
    train, evaluation = DeviceLoader(source), DeviceLoader(source)
    for epoch in range(3):
        seen = []
        for number, batch in enumerate(train):
            seen += batch.tolist()
            if number == 2:
                assert taken(evaluation) == plain(epoch)
        assert seen == plain(epoch)


def test_folds_of_one_dataset_each_begin_at_epoch_zero():
    data = Numbers(COUNT)
    folds = [
        DeviceLoader(DataLoader(Subset(data, range(start, start + 6)), batch_size=2, shuffle=True)) for start in (0, 6)
    ]
    found = [[taken(loader) for _ in range(2)] for loader in folds]
    assert [[sample + 6 for sample in epoch] for epoch in found[0]] == found[1]


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
def test_the_ranks_of_two_loaders_over_one_dataloader_take_every_sample_of_each_epoch(mode):
    source = shuffled()

    def body() -> list[list[int]]:
        train, evaluation = DeviceLoader(source), DeviceLoader(source)
        return [taken(loader) for loader in (train, train, evaluation, train)]

    found = list(zip(*mode.run(body), strict=True))
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


def test_each_call_of_a_data_parallel_is_the_next_epoch_of_the_loader_it_is_given():
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
