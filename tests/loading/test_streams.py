"""Iterable datasets: every sample once over all ranks and loader workers, whoever cuts the stream."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3
from stand_ins import stand_ins
from streams import (
    COUNT,
    SIZE,
    CutsItself,
    Sharded,
    Stream,
    all_of,
    loader_of,
    loop,
    passes,
    refused,
    through_json,
)
from torch.utils.data import get_worker_info

from unisono import DeviceLoader, ParallelLoader, current_world, rank
from unisono.errors import CollectiveMismatchError


class OneFile(Sharded):
    """Has fewer shards than there are ranks."""

    def shard(self, num_shards: int, index: int) -> Sharded:
        raise IndexError(f"1 file for {num_shards} shards")


class ShardedInPlace(Sharded):
    def shard(self, num_shards: int, index: int) -> Any:
        return None


class ShardsByOtherNames(Stream):
    """`shard(index, count)`, the other way round than others have it."""

    def __init__(self, part: range = range(COUNT)) -> None:
        super().__init__()
        self.part = part

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)

    def shard(self, index: int, count: int) -> ShardsByOtherNames:
        return ShardsByOtherNames(self.part[index::count])


class OfItsNode(Stream):
    """Was cut by rank before, as HuggingFace's `split_dataset_by_node` does."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self._distributed = (rank(), current_world().world_size)

    def __iter__(self) -> Iterator[int]:
        first, row = self._distributed
        yield from range(first, self.count, row)


class OfMosaic(Stream):
    """Cuts itself by the rank that it has found, and by the rank's workers, as mosaicml-streaming's do."""

    __module__ = "streaming.base.dataset"

    def __init__(self, place: int, places: int) -> None:
        super().__init__()
        self.place, self.places = place, places

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from range(self.place * workers + worker, self.count, self.places * workers)


@pytest.mark.parametrize("workers", [0, 2])
@stand_ins()
def test_mosaics_streams_are_cut_by_rank_once_if_they_see_the_ranks(monkeypatch, workers):
    for places in (1, 2):

        def seen(places: int = places) -> Any:
            return SimpleNamespace(rank=rank() % places, num_ranks=places)

        monkeypatch.setitem(sys.modules, "streaming.base.world", SimpleNamespace(World=SimpleNamespace(detect=seen)))
        found = passes(THREADS_2, lambda places=places: OfMosaic(rank() % places, places), None, workers=workers)
        assert all_of(found) == list(range(COUNT))


class Ranged(Stream):
    """As in torch's documentation: `worker_init_fn` sets each worker's range."""

    start, end = 0, COUNT

    def __iter__(self) -> Iterator[int]:
        yield from range(self.start, self.end)


def set_range(worker: int) -> None:
    info = get_worker_info()
    whole = info.dataset.end
    share = -(-whole // info.num_workers)
    info.dataset.start = info.id * share
    info.dataset.end = min(info.dataset.start + share, whole)
    assert worker == info.id


def only_seeds(worker: int) -> None:
    random.seed(worker)
    torch.manual_seed(worker)


class Tensors(Stream):
    """Gives batches of its own, of several sizes."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = iter(range(self.count))
        for size in itertools.cycle((3, 1, 2)):
            if not (batch := list(itertools.islice(numbers, size))):
                return
            yield torch.tensor(batch)


DATASETS = [Stream, CutsItself, Sharded, OneFile, ShardedInPlace, ShardsByOtherNames, OfItsNode]


def by_stride(samples: Sequence[Any], ranks: int, workers: int, size: int) -> list[list[list[Any]]]:
    """The oracle: each rank's batches, its workers taking turns."""
    workers = max(workers, 1)
    dealt = []
    for place in range(ranks):
        parts = [samples[place * workers + worker :: ranks * workers] for worker in range(workers)]
        lists = [[list(part[start : start + size]) for start in range(0, len(part), size)] for part in parts]
        dealt.append([batch for turn in itertools.zip_longest(*lists) for batch in turn if batch])
    return dealt


HOW = pytest.mark.parametrize(("mode", "workers"), [(SOLO, 3), (THREADS_2, 0), (THREADS_2, 2), (THREADS_3, 1)])


@HOW
@stand_ins()
def test_every_sample_once_whoever_cuts_the_stream(mode, workers):
    for dataset in DATASETS:
        found = passes(mode, dataset, None, workers=workers)
        assert all_of(found) == list(range(COUNT)), dataset.__name__
        for each in zip(*found, strict=True):
            assert len({len(got.batches) for got in each}) == 1, "in step"
            for got in each:
                assert [len(batch) for batch in got.batches] == [valid or 1 for valid in got.valid]


@HOW
@stand_ins()
def test_the_stride_deals_as_a_list_is_dealt(mode, workers):
    for count in (0, 1, 2, COUNT):
        found = passes(mode, lambda count=count: Stream(count), None, workers=workers)
        dealt = [[batch for batch, valid in zip(each.batches, each.valid, strict=True) if valid] for (each,) in found]
        assert dealt == by_stride(range(count), mode.ranks, workers, SIZE), count


def test_processes_take_every_sample_once_and_resume():
    def body() -> list[Any]:
        found = []
        for dataset, workers in ((Stream, 2), (CutsItself, 2), (Sharded, 0)):
            loader = DeviceLoader(loader_of(dataset(), workers))
            whole = loop(loader)
            loader.set_epoch(0)
            first = loop(loader, 2)
            loader.load_state_dict(through_json(first.state))
            found.append((whole, first, loop(loader)))
        return found

    by_rank = PROCESSES_2.run(body)
    for kind in zip(*by_rank, strict=True):
        assert sorted(sample for whole, _, _ in kind for sample in whole.counted) == list(range(COUNT))
        for whole, first, rest in kind:
            assert first.batches + rest.batches == whole.batches
        assert kind[0][1].state == kind[1][1].state


@pytest.mark.parametrize(("count", "workers"), [(1, 2), (2, 0), (3, 2)])
@stand_ins()
def test_the_devices_of_one_process_share_a_stream(count, workers):
    devices = [f"cpu:{place}" for place in range(count)]
    with ParallelLoader(loader_of(Stream(), workers), devices) as parallel:
        iterators = [parallel.per_device_loader(device) for device in devices]
        found = [[batch[: each.valid_samples].tolist() for batch in each] for each in iterators]
    assert sorted(sample for each in found for batch in each for sample in batch) == list(range(COUNT))
    assert len({len(each) for each in found}) == 1


def test_a_stream_that_is_said_to_be_cut_is_taken_as_it_comes():
    for workers in (0, 2):
        found = passes(THREADS_2, CutsItself, None, workers=workers, already_sharded=True)
        assert [sorted(each.counted) for (each,) in found] == [list(range(COUNT))] * 2


@pytest.mark.parametrize(("mode", "workers"), [(SOLO, 2), (THREADS_2, 0), (THREADS_2, 2)])
@stand_ins()
def test_a_stream_may_give_batches_of_its_own(mode, workers):
    assert all_of(passes(mode, Tensors, None, workers=workers, size=None)) == list(range(COUNT))


@pytest.mark.parametrize(("mode", "init"), [(SOLO, set_range), (THREADS_2, only_seeds), (THREADS_3, set_range)])
@stand_ins()
def test_a_worker_init_fn_may_cut_the_stream_or_not(mode, init):
    found = passes(mode, Ranged, None, workers=2, worker_init_fn=init)
    assert all_of(found) == list(range(COUNT))
    share = -(-COUNT // (2 * mode.ranks)) if init is set_range else 1
    assert [sorted(batch[0] for batch in each.batches[:2]) for (each,) in found] == [
        [2 * place * share, (2 * place + 1) * share] for place in range(mode.ranks)
    ]


class ById(Stream):
    """Each loader worker has a list of its own, chosen by its number alone."""

    alike = 0  # samples at the beginning that all have

    def __init__(self, count: int = COUNT, form: Callable[[int], Any] = int) -> None:
        super().__init__(count)
        self.form = form

    def __iter__(self) -> Iterator[Any]:
        place = get_worker_info().id
        for number in range(self.count):
            yield self.form(number + 1000 * place * (number >= self.alike))


class BeginsAlike(ById):
    alike = 2


class OfItsProcess(Stream):
    """Another stream in each process, which no number says."""

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(os.getpid()).sample(range(10**9), self.count)


def set_place(worker: int) -> None:
    get_worker_info().dataset.place = worker


class Placed(Stream):
    place = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(1000 * self.place, 1000 * self.place + self.count)


def with_label(number: int) -> tuple[Any, int]:
    return torch.tensor(float(number)), 0


@pytest.mark.parametrize(("kind", "form"), [(ById, int), (BeginsAlike, int), (ById, with_label), (BeginsAlike, float)])
@stand_ins()
def test_loader_workers_of_a_single_rank_read_what_they_read_with_torch(kind, form):
    for count in (1, 2, 3, COUNT):
        (found,) = passes(SOLO, lambda count=count: kind(count, form), None, None, workers=2)
        own = [number + 1000 * (number >= kind.alike) for number in range(count)]
        for got in found:
            assert sorted(got.counted) == sorted([*range(count), *own]), count


def test_so_do_processes_whatever_makes_their_streams_differ():
    def in_torch(dataset: Any, init: Any) -> list[Any]:
        return [batch.tolist() for batch in loader_of(dataset, 2, worker_init_fn=init)]

    for dataset, init in ((ById(), None), (Placed(), set_place)):
        (got,) = passes(SOLO, lambda dataset=dataset: dataset, None, workers=2, worker_init_fn=init)[0]
        assert got.batches == in_torch(dataset, init)
    for got in passes(SOLO, OfItsProcess, None, None, workers=2, persistent_workers=True)[0]:
        assert len({*got.counted}) == len(got.counted) == 2 * COUNT


@pytest.mark.parametrize(
    ("kind", "count", "size"), [(ById, 2, 1), (ById, 3, 2), (ById, 7, 32), (BeginsAlike, 25, 2), (BeginsAlike, 25, 32)]
)
@stand_ins()
def test_several_ranks_refuse_streams_chosen_by_worker_number_alone(kind, count, size):
    errors = refused(THREADS_2, lambda: kind(count), None, workers=2, size=size)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 2
    assert all("read different streams" in str(error) for error in errors)


def test_a_global_batch_is_split_over_the_ranks():
    found = passes(THREADS_2, Stream, None, size=4, split="global")
    assert [each[0].batches[0] for each in found] == [[0, 2], [1, 3]]
    assert all_of(found) == list(range(COUNT))
    for error in refused(THREADS_2, Stream, None, size=1, split="global"):
        assert type(error) is ValueError
        assert str(error).startswith("batch_size=1 with split='global' does not divide among world_size=2")


def test_the_length_is_told_by_a_dataset_that_has_one(recwarn):
    class Sized(Stream):
        def __len__(self) -> int:
            return self.count

    def body() -> tuple[int, int]:
        loader = DeviceLoader(loader_of(Sized()))
        return len(loader), len(loop(loader).batches)

    assert SOLO.run(body) == [(8, 8)]
    assert THREADS_2.run(body) == [(4, 4)] * 2
    assert not [each for each in recwarn if "length" in str(each.message)]
    with pytest.raises(TypeError):
        len(DeviceLoader(loader_of(Stream())))
