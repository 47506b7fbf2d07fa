"""What is random in a stream is the same for all who read it, and streams that differ are refused."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from epochs import PATIENCE_S
from modes import PROCESSES_2, SOLO, THREADS_2
from stand_ins import stand_ins
from streams import COUNT, ByEpoch, Sharded, Stream, all_of, loader_of, passes, refused
from torch.utils.data import get_worker_info

from unisono import DeviceLoader, rank
from unisono.errors import CollectiveMismatchError


class AsksTooLate(Stream):
    def __iter__(self) -> Iterator[int]:
        yield 0
        yield from range(1, self.count, get_worker_info().num_workers)


class ShuffledPrivately(Stream):
    """By each rank and by each loader worker in another way, after `alike` samples; of each, `form` is given."""

    def __init__(self, form: Callable[[int], Any] = int, alike: int = 0) -> None:
        super().__init__()
        self.form, self.alike, self.place = form, alike, rank()

    def __iter__(self) -> Iterator[Any]:
        own = random.Random(f"{self.place}/{os.getpid()}").sample(range(self.alike, 10**9), self.count)
        yield from map(self.form, (*range(self.alike), *own))


class Fractions(Stream):
    """Shuffles with torch's global generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(self.count):
            yield number.float()


class OfItsRankAndWorker(Stream):
    """Cuts itself as scripts for torchrun do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        place, places = torch.distributed.get_rank(), torch.distributed.get_world_size()
        yield from range(place * workers + worker, self.count, places * workers)


def test_asking_for_the_workers_too_late_is_an_error():
    with pytest.raises(RuntimeError, match=r"the AsksTooLate asks get_worker_info\(\) .* only after it has yielded"):
        passes(SOLO, AsksTooLate, None, workers=2)


class Unequal(Stream):
    """The same numbers, but more of them on one rank."""

    def __init__(self, *counts: int) -> None:
        super().__init__(counts[rank()])


def with_one_label() -> Stream:
    return ShuffledPrivately(lambda number: (float(number), 0))


def later() -> Stream:
    """As a buffer that is not shuffled before it is full."""
    return ShuffledPrivately(alike=8)


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        (ShuffledPrivately, 0),
        (ShuffledPrivately, 2),
        (with_one_label, 0),
        (Fractions, 0),
        (later, 0),
        *((partial(Unequal, *counts), 0) for counts in ((22, 24), (23, 0), (0, 23))),
        (partial(Unequal, 10, 20), 1),
    ],
)
def test_streams_that_differ_wherever_they_do_are_refused(dataset, workers):
    errors = refused(THREADS_2, dataset, None, workers=workers)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 2
    words = r"the ranks or loader workers read different streams.* DeviceLoader\(loader, already_sharded=True\);.*=1\)$"
    assert all(re.match(words, str(error)) for error in errors)


@stand_ins()
def test_a_shuffle_refused_in_the_loops_process_works_in_loader_workers():
    for workers in (1, 2):
        assert all_of(passes(THREADS_2, Fractions, None, workers=workers)) == list(range(COUNT))


def test_who_cuts_itself_by_rank_and_worker_is_cut_once():
    def body() -> tuple[Any, ...]:
        found = passes(SOLO, OfItsRankAndWorker, None, workers=2)[0][0].counted
        (error,) = refused(SOLO, OfItsRankAndWorker, None)
        return found, str(error), torch.distributed.get_world_size()

    by_rank = PROCESSES_2.run(body)
    assert sorted(sample for found, _, _ in by_rank for sample in found) == list(range(COUNT))
    for _, error, ranks in by_rank:
        assert "pass DeviceLoader(loader, already_sharded=True)" in error
        assert ranks == 2


class Shuffled(Stream):
    """Shuffles with all global generators of a loader worker, and augments with one."""

    def __init__(self, cuts_itself: bool = False) -> None:
        super().__init__()
        self.cuts_itself = cuts_itself

    def __iter__(self) -> Iterator[int]:
        order = random.sample(numpy.random.permutation(torch.randperm(self.count)).tolist(), self.count)
        info = get_worker_info()
        for number in order[info.id :: info.num_workers] if self.cuts_itself else order:
            yield number * 1000 + random.randrange(1000)


@pytest.mark.parametrize("cuts_itself", [False, True])
@stand_ins()
def test_a_global_shuffle_is_the_same_in_all_workers_and_new_each_epoch(cuts_itself):
    found = passes(THREADS_2, lambda: Shuffled(cuts_itself), None, None, workers=2)
    for place in (0, 1):
        assert sorted(sample // 1000 for each in found for sample in each[place].counted) == list(range(COUNT))
    assert found[0][0].counted != found[0][1].counted
    first = passes(THREADS_2, lambda: Shuffled(cuts_itself), 2, workers=2)
    rest = passes(THREADS_2, lambda: Shuffled(cuts_itself), None, workers=2, state=first[0][0].state)
    for (whole, _), (before,), (after,) in zip(found, first, rest, strict=True):
        assert before.batches + after.batches == whole.batches


@pytest.mark.parametrize("make", [Shuffled, lambda: Shuffled(True), Sharded], ids=["stride", "itself", "shards"])
def test_stand_ins_read_what_processes_read(make):
    found = passes(THREADS_2, make, None, None, workers=2, persistent_workers=True)
    assert len({sample % 10**6 // (1000 if make is not Sharded else 1) for sample in all_of(found)}) == COUNT
    with stand_ins():
        assert found == passes(THREADS_2, make, None, None, workers=2, persistent_workers=True)


class EpochInSharedMemory(ByEpoch):
    """As HuggingFace's: what several processes change at the same moment adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.gates = [multiprocessing.Semaphore(0) for _ in range(2)]
        self.place = 0

    def set_epoch(self, epoch: int) -> None:
        change = epoch - int(self.epoch)
        if get_worker_info() is not None:  # the two meet
            self.gates[self.place].release()
            assert self.gates[1 - self.place].acquire(timeout=PATIENCE_S)
        self.epoch += change


def set_place(worker: int) -> None:
    """Without asking for the number, by which the worker might choose its samples."""
    get_worker_info().dataset.place = worker


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_loader_workers_share_is_set_once(persistent):
    options = {"workers": 2, "persistent_workers": persistent, "worker_init_fn": set_place}
    found = passes(SOLO, EpochInSharedMemory, None, None, None, **options)
    for epoch in range(3):
        assert all_of(found, epoch) == [1000 * epoch + number for number in range(COUNT)]


def test_passes_side_by_side_have_epochs_of_their_own():
    loader = DeviceLoader(loader_of(ByEpoch(), 2))
    pairs = list(zip(loader, loader, strict=True))
    assert sorted(sample for first, _ in pairs for sample in first.tolist()) == list(range(COUNT))
    assert sorted(sample - 1000 for _, second in pairs for sample in second.tolist()) == list(range(COUNT))
