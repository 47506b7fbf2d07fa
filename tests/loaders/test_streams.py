"""Iterable datasets: every sample once over all ranks and loader workers, from any point at which a loop was left.

The oracles deal lists: a stream that is cut by stride is one list, of which part p of P takes `[p::P]`. Where many
ranks, workers and datasets are combined, stand-ins take the place of loader workers that are processes.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import logging
import os
import random
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from epochs import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from stand_ins import stand_ins
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono import DeviceLoader, ParallelLoader, current_world, optimizer_step, rank
from unisono.errors import BrokenWorldError, BusyError, StateError, UnpicklableError
from unisono.loaders.stream_parts import Cut, PartReader
from unisono.loaders.stream_position import Layer, Read, Taken
from unisono.loaders.streams import StreamSource

COUNT = 23
SIZE = 3


class Stream(IterableDataset):
    """The numbers 0 .. count - 1, whoever asks. `reads` notes what was read in this process."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            self.reads.append(number)
            yield number


class CutsItself(Stream):
    """Asks for its place among the loader workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, row = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, self.count, row)


class Sharded(Stream):
    """Gives shards, as HuggingFace's datasets do."""

    def __init__(self, count: int = COUNT, first: int = 0, row: int = 1) -> None:
        super().__init__(count)
        self.first, self.row = first, row

    def shard(self, num_shards: int, index: int) -> Sharded:
        return type(self)(self.count, index, num_shards)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.first, self.count, self.row)


class ShardedKeywords(Sharded):
    def shard(self, index: int, num_shards: int, contiguous: bool = False) -> Sharded:
        return super().shard(num_shards, index)


class OneFile(Sharded):
    """Has fewer shards than there are ranks."""

    def shard(self, num_shards: int, index: int) -> Sharded:
        raise IndexError(f"1 file for {num_shards} shards")


class ShardedInPlace(Sharded):
    def shard(self, num_shards: int, index: int) -> Any:
        return None


class OfItsNode(Stream):
    """Was cut by rank before, as HuggingFace's `split_dataset_by_node` does."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self._distributed = (rank(), current_world().world_size)

    def __iter__(self) -> Iterator[int]:
        first, row = self._distributed
        yield from range(first, self.count, row)


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


DATASETS = [Stream, CutsItself, Sharded, ShardedKeywords, OneFile, OfItsNode]


class Got(NamedTuple):
    """One rank's pass: what it was given in each step, how many of that count, and the state at the end."""

    batches: list[list[Any]]
    valid: list[int]
    state: dict[str, Any]

    @property
    def counted(self) -> list[Any]:
        return [sample for batch, valid in zip(self.batches, self.valid, strict=True) for sample in batch[:valid]]


def loop(loader: DeviceLoader, most: int | None = None) -> Got:
    """What is left of the pass, or the next `most` batches of it."""
    iterator = iter(loader)
    batches, valid = [], []
    for batch in iterator:
        batches.append(batch.tolist())
        valid.append(iterator.valid_samples)
        if len(batches) == most:
            break
    return Got(batches, valid, loader.state_dict())


def loader_of(dataset: Any, workers: int = 0, size: int | None = SIZE, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=size, num_workers=workers, **options)


def passes(
    mode: Mode, make: Callable[[], Any], *plan: int | None, workers: int = 0, state: Any = None, **options: Any
) -> list[list[Got]]:
    """For each rank one pass for each place of the plan, which says how many batches it takes; None takes all."""

    def body() -> list[Got]:
        device_options = {name: options[name] for name in ("tail", "split", "already_sharded") if name in options}
        more = {name: value for name, value in options.items() if name not in device_options}
        loader = DeviceLoader(loader_of(make(), workers, **more), **device_options)
        if state is not None:
            loader.load_state_dict(state)
        return [loop(loader, most) for most in plan]

    return mode.run(body)


def refused(mode: Mode, *arguments: Any, **options: Any) -> list[Exception]:
    """What each rank's loop ends with."""

    def loop_over() -> Exception | None:
        try:
            passes(SOLO, *arguments, **options)
        except Exception as error:
            return type(error)(*error.args)  # the error itself holds all that it saw
        return None

    return [error for error in mode.run(loop_over) if error is not None]


def all_of(found: Sequence[Sequence[Got]], place: int = 0) -> list[Any]:
    return sorted(sample for each in found for sample in each[place].counted)


def assert_in_step(found: Sequence[Sequence[Got]]) -> None:
    for each in zip(*found, strict=True):
        assert len({len(got.batches) for got in each}) == 1
        for got in each:
            assert all(len(batch) == (valid or 1) for batch, valid in zip(got.batches, got.valid, strict=True))


def by_stride(samples: Sequence[Any], ranks: int, workers: int, size: int) -> list[list[list[Any]]]:
    """The oracle: each rank's batches, its workers taking turns."""
    workers = max(workers, 1)
    dealt = []
    for place in range(ranks):
        parts = [samples[place * workers + worker :: ranks * workers] for worker in range(workers)]
        lists = [[list(part[start : start + size]) for start in range(0, len(part), size)] for part in parts]
        dealt.append([batch for turn in itertools.zip_longest(*lists) for batch in turn if batch])
    return dealt


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# Every sample once.


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, THREADS_3], ids=str)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@stand_ins()
def test_every_sample_once_whoever_cuts_the_stream(mode, workers):
    for dataset in DATASETS:
        found = passes(mode, dataset, None, workers=workers)
        assert all_of(found) == list(range(COUNT)), dataset.__name__
        assert_in_step(found)


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, THREADS_3], ids=str)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@stand_ins()
def test_the_stride_deals_as_a_list_is_dealt(mode, workers):
    assert dealt_by_stride(mode, workers) == by_stride(range(COUNT), mode.ranks, workers, SIZE)


def test_the_stride_deals_so_to_processes_too():
    assert dealt_by_stride(THREADS_2, 2) == by_stride(range(COUNT), 2, 2, SIZE)


def dealt_by_stride(mode: Mode, workers: int) -> list[list[list[Any]]]:
    found = passes(mode, Stream, None, workers=workers)
    return [[batch for batch, valid in zip(each.batches, each.valid, strict=True) if valid] for (each,) in found]


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


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
@stand_ins()
def test_the_devices_of_one_process_share_a_stream(count, workers):
    assert_shared(count, workers)


def test_the_devices_of_one_process_share_what_processes_read():
    assert_shared(2, 2)


def assert_shared(count: int, workers: int) -> None:
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


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
@stand_ins()
def test_a_stream_may_give_batches_of_its_own(mode, workers):
    assert all_of(passes(mode, Tensors, None, workers=workers, size=None)) == list(range(COUNT))


def test_a_stream_may_give_batches_of_its_own_in_processes():
    assert all_of(passes(SOLO, Tensors, None, workers=2, size=None)) == list(range(COUNT))


@pytest.mark.parametrize("init", [set_range, only_seeds])
@pytest.mark.parametrize("mode", [SOLO, THREADS_2, THREADS_3], ids=str)
@stand_ins()
def test_a_worker_init_fn_may_cut_the_stream_or_not(mode, init):
    assert_cut_by_init(mode, init)


@pytest.mark.parametrize(("mode", "init"), [(THREADS_2, set_range), (SOLO, only_seeds)])
def test_a_worker_init_fn_may_cut_the_stream_or_not_in_processes(mode, init):
    assert_cut_by_init(mode, init)


def assert_cut_by_init(mode: Mode, init: Callable[[int], None]) -> None:
    found = passes(mode, Ranged, None, workers=2, worker_init_fn=init)
    assert all_of(found) == list(range(COUNT))
    share = -(-COUNT // (2 * mode.ranks)) if init is set_range else 1
    assert [sorted(batch[0] for batch in each.batches[:2]) for (each,) in found] == [
        [2 * place * share, (2 * place + 1) * share] for place in range(mode.ranks)
    ]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_more_ranks_than_samples_are_kept_in_step(count):
    found = passes(THREADS_3, lambda: Stream(count), None, None)
    assert [all_of(found, 0), all_of(found, 1)] == [list(range(count))] * 2
    assert [len(each[0].batches) for each in found] == [min(count, 1)] * 3


def test_who_refuses_to_shard_is_told_of(caplog):
    with caplog.at_level(logging.INFO):
        passes(THREADS_2, OneFile, None)
    assert (
        "OneFile.shard gives no part 1 of 2 (IndexError: 1 file for 2 shards), so it is sharded by stride"
        in caplog.text
    )


def test_a_global_batch_is_split_over_the_ranks():
    found = passes(THREADS_2, Stream, None, size=4, split="global")
    assert [each[0].batches[0] for each in found] == [[0, 2], [1, 3]]
    assert all_of(found) == list(range(COUNT))
    for error in refused(THREADS_2, Stream, None, size=1, split="global"):
        assert type(error) is ValueError
        assert str(error).startswith("batch_size=1 with split='global' is too small for world_size=2")


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


# Streams that are not the same for all.


class AsksTooLate(Stream):
    def __iter__(self) -> Iterator[int]:
        yield 0
        yield from range(1, self.count, get_worker_info().num_workers)


class ShuffledPrivately(Stream):
    """By each rank and by each loader worker in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.place = rank()

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(f"{self.place}/{os.getpid()}").sample(range(10**9), self.count)


class OfItsRank(Stream):
    """Cuts itself by rank, and says so to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.places = rank(), current_world().world_size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.place, self.count, self.places)


class Fractions(Stream):
    """Shuffles with torch's global generator, and gives nothing by which samples can be told apart for certain."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(self.count):
            yield number.float()


class BytesOfFiles(Fractions):
    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield torch.full((2, 5, 5), int(number), dtype=torch.uint8)


class DiffersLater(Stream):
    """Begins alike everywhere, as a buffer that is not shuffled before it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.place = rank()

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        yield from random.Random(self.place).sample(range(8, self.count), self.count - 8)


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


@pytest.mark.parametrize(("mode", "workers"), [(SOLO, 2), (THREADS_2, 0), (THREADS_2, 1)])
def test_streams_that_differ_are_refused(mode, workers):
    errors = refused(mode, ShuffledPrivately, None, workers=workers)
    assert len(errors) == mode.ranks
    for error in errors:
        assert type(error) is RuntimeError
        assert re.match("the ranks or loader workers read different streams.*pass already_sharded=True", str(error))


@pytest.mark.parametrize("dataset", [Fractions, BytesOfFiles, DiffersLater, OfItsRank])
def test_streams_that_differ_only_in_what_is_looked_at_last_are_refused_too(dataset):
    for error in (errors := refused(THREADS_2, dataset, None)):
        assert type(error) is RuntimeError
        assert re.match(
            r"the ranks or loader workers read different streams.*\(num_workers=1\), which are seeded alike", str(error)
        )
    assert len(errors) == 2


@stand_ins()
def test_what_is_refused_in_the_loops_process_is_shuffled_alike_in_loader_workers():
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
        assert "pass already_sharded=True" in error
        assert ranks == 2


def test_a_shard_that_is_none_is_no_shard(caplog):
    with caplog.at_level(logging.INFO):
        assert all_of(passes(THREADS_2, ShardedInPlace, None)) == list(range(COUNT))
    assert "TypeError: it gave a NoneType" in caplog.text


# What is random.


class Shuffled(Stream):
    """Shuffles with the global generators of a loader worker, and augments with them."""

    def __init__(self, which: str, cuts_itself: bool = False) -> None:
        super().__init__()
        self.which, self.cuts_itself = which, cuts_itself

    def __iter__(self) -> Iterator[tuple[int, float]]:
        order = {
            "random": lambda: random.sample(range(self.count), self.count),
            "numpy": lambda: numpy.random.permutation(self.count).tolist(),
            "torch": lambda: torch.randperm(self.count).tolist(),
            "all": lambda: random.sample(numpy.random.permutation(torch.randperm(self.count)).tolist(), self.count),
        }[self.which]()
        info = get_worker_info()
        for number in order[info.id :: info.num_workers] if self.cuts_itself else order:
            yield number * 1000 + random.randrange(1000)


class ShuffledAtOnce(Shuffled):
    """Draws when it is asked for an iterator, before the first sample is."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__()))


@stand_ins()
def test_a_shuffle_before_the_first_sample_is_the_same_in_all_workers_too():
    found = passes(THREADS_2, lambda: ShuffledAtOnce("all"), None, workers=2)
    assert [sample // 1000 for sample in all_of(found)] == list(range(COUNT))


@pytest.mark.parametrize("which", ["random", "numpy", "torch"])
@pytest.mark.parametrize("cuts_itself", [False, True])
@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
@stand_ins()
def test_a_shuffle_with_global_generators_is_the_same_in_all_workers_and_another_in_each_epoch(
    mode, cuts_itself, which
):
    found = passes(mode, lambda: Shuffled(which, cuts_itself), None, None, workers=2)
    for place in (0, 1):
        assert sorted(sample // 1000 for each in found for sample in each[place].counted) == list(range(COUNT))
    assert found[0][0].counted != found[0][1].counted
    again = passes(mode, lambda: Shuffled(which, cuts_itself), None, workers=2)
    assert [each[0].batches for each in found] == [each[0].batches for each in again]


@pytest.mark.parametrize(
    "make",
    [lambda: Shuffled("all"), lambda: Shuffled("all", True), Sharded],
    ids=["by stride", "by itself", "by shards"],
)
def test_stand_ins_read_what_processes_read(make):
    found = passes(THREADS_2, make, None, None, workers=2, persistent_workers=True)
    assert len({sample % 10**6 // (1000 if make is not Sharded else 1) for sample in all_of(found)}) == COUNT
    with stand_ins():
        assert found == passes(THREADS_2, make, None, None, workers=2, persistent_workers=True)


def test_what_a_sample_is_augmented_with_differs_between_parts():
    (found,) = passes(SOLO, lambda: Shuffled("random", True), None, workers=2)
    augmented = [sample % 1000 for sample in found[0].counted]
    assert len(set(augmented)) > COUNT - 4


class ByEpoch(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (self.epoch * 1000 + number for number in range(self.count))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_dataset_hears_of_the_epoch_in_persistent_workers_too(workers):
    loader = DeviceLoader(loader_of(ByEpoch(), workers, persistent_workers=bool(workers)))
    first, second = loop(loader, 1), loop(loader)
    loader.set_epoch(7)
    assert [first.counted[0], second.counted[0], loop(loader).counted[0]] == [0, 1000, 7000]


def test_passes_side_by_side_have_epochs_of_their_own():
    loader = DeviceLoader(loader_of(ByEpoch(), 2))
    pairs = list(zip(loader, loader, strict=True))
    assert sorted(sample for first, _ in pairs for sample in first.tolist()) == list(range(COUNT))
    assert sorted(sample - 1000 for _, second in pairs for sample in second.tolist()) == list(range(COUNT))


# Rounds and gradients.


@pytest.mark.parametrize(("tail", "steps", "counted"), [("split", 4, 23), ("pad", 4, 23), ("drop", 3, 18)])
def test_the_tail_of_uneven_parts(tail, steps, counted):
    found = passes(THREADS_2, Stream, None, tail=tail)
    assert [len(each[0].batches) for each in found] == [steps, steps]
    assert len(all_of(found)) == counted
    if tail == "pad":
        assert {len(batch) for each in found for batch in each[0].batches} == {SIZE}


def test_drop_and_error_end_before_a_round_that_not_all_ranks_have():
    found = passes(THREADS_2, lambda: Stream(13), None, tail="drop", size=2)
    assert [len(each[0].batches) for each in found] == [3, 3]
    errors = refused(THREADS_2, lambda: Stream(13), None, tail="error", size=1)
    assert len(errors) == 2
    assert all(str(error).startswith("tail='error': the data of rank(s) 1 has ended") for error in errors)
    errors = refused(THREADS_2, lambda: Stream(13), None, tail="error", size=2)
    assert any(
        str(each).startswith("tail='error': 7 samples do not divide into rounds of 1 batches of 2") for each in errors
    )


@pytest.mark.parametrize("workers", [0, 2])
@stand_ins()
def test_one_device_keeps_the_tail_policies_of_a_stream(workers):
    def sizes(tail: str) -> list[int]:
        return sorted(len(batch) for batch in DeviceLoader(loader_of(Stream(11), workers, size=4), tail=tail))

    whole, short = ([4, 4], [3]) if not workers else ([4, 4], [1, 2])
    assert sizes("split") == short + whole
    assert sizes("drop") == whole
    assert sizes("pad") == [4] * len(short) + whole
    with pytest.raises(ValueError, match=r"tail='error': \d+ samples do not divide into rounds of 1 batches of 4"):
        sizes("error")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_drop_last_leaves_out_is_counted(workers):
    def body() -> tuple[int, int, int]:
        got = loop(DeviceLoader(loader_of(Stream(14), workers, drop_last=True)))
        timeline = current_world().timeline
        counts = [track.counts["dropped"] for track in timeline.tracks()]
        return sum(map(len, got.batches)), sum(counts), len(got.batches)

    assert THREADS_2.run(body) == [(6, 1, 2), (6, 1, 2)]


class Pairs(Stream):
    """Inputs and targets in float64, with their numbers."""

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.count, 5, generator=numbers, dtype=torch.float64)
        yield from zip(inputs, inputs.sum(1, keepdim=True).sin(), range(self.count), strict=True)


def network() -> nn.Module:
    model = nn.Linear(5, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    return model


@pytest.mark.parametrize("mode", [THREADS_2, THREADS_3, PROCESSES_2], ids=str)
def test_steps_over_uneven_parts_are_those_of_one_device_with_the_whole_rounds(mode):
    count = 4 * mode.ranks + 1

    def body() -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        model, rounds = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            batches = iter(DeviceLoader(loader_of(Pairs(count), size=2)))
            for inputs, targets, numbers in batches:
                rounds.append(numbers[: batches.valid_samples].tolist())
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer_step(optimizer)
        return rounds, model.state_dict()

    found = mode.run(body)
    samples = list(Pairs(count))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for together in zip(*(rounds for rounds, _ in found), strict=True):
        chosen = [samples[number] for numbers in together for number in numbers]
        inputs, targets = torch.stack([each[0] for each in chosen]), torch.stack([each[1] for each in chosen])
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert {0} < {len(numbers) for rounds, _ in found for numbers in rounds}, "some rank had nothing in some round"
    for _, state in found:
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-11, atol=1e-13)


# State.


@given(data=st.data(), count=st.integers(0, 40), size=st.integers(1, 4))
def test_what_was_left_is_dealt_anew_with_any_numbers_again_and_again(data, count, size):
    left = list(range(count))
    taken = Taken.nothing("stride", 1, 1)
    for _ in range(data.draw(st.integers(1, 4))):
        ranks, workers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        row = ranks * workers
        parts = [left[part::row] for part in range(row)]
        # A layer of its own for each turn, although the numbers may be those of the turn before.
        taken = replace(taken, layers=(*taken.layers, Layer(ranks, workers, (0,) * row)), last=(0,) * ranks)
        for part in range(row):
            cut = Cut(part // workers, "stride", 0, 0, taken)
            reader = PartReader(Stream(count), list, size, False, cut)
            assert [sample for made in reader.made(cut, part % workers) for sample in made.batch] == parts[part]
        numbers = [data.draw(st.integers(0, len(part))) for part in parts]
        taken = taken.after([Read(part, number) for part, number in enumerate(numbers)])
        left = sorted(sample for part, number in zip(parts, numbers, strict=True) for sample in part[number:])


class Stateful(Stream):
    """Keeps its place in an attribute of its own."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.count:
            self.reads.append(self.place)
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


RESUMED = [Stream, CutsItself, Sharded, Stateful]


@pytest.mark.parametrize("dataset", RESUMED)
@pytest.mark.parametrize(("mode", "workers"), [(SOLO, 0), (THREADS_2, 0), (SOLO, 3), (THREADS_2, 2)])
@stand_ins()
def test_the_rest_is_the_same_wherever_the_loop_was_left(mode, workers, dataset):
    (whole,) = zip(*passes(mode, dataset, None, workers=workers), strict=True)
    for steps in range(1, len(whole[0].batches)):
        assert_resumed(whole, mode, workers, dataset, steps)


@pytest.mark.parametrize(("mode", "workers", "dataset"), [(THREADS_2, 2, Stateful), (SOLO, 3, CutsItself)])
def test_the_rest_is_the_same_for_processes_too(mode, workers, dataset):
    with stand_ins():
        (whole,) = zip(*passes(mode, dataset, None, workers=workers), strict=True)
    assert_resumed(whole, mode, workers, dataset, 3)


def assert_resumed(whole: Sequence[Got], mode: Mode, workers: int, dataset: type[Stream], steps: int) -> None:
    """Each rank's loop over the rest gives what the whole pass has after that number of steps."""

    def body() -> tuple[Got, Got]:
        first = loop(DeviceLoader(loader_of(dataset(), workers)), steps)
        resumed = DeviceLoader(loader_of(dataset(), workers))
        resumed.load_state_dict(through_json(first.state))
        return first, loop(resumed)

    for expected, (first, rest) in zip(whole, mode.run(body), strict=True):
        assert first.batches + rest.batches == expected.batches
        assert first.valid + rest.valid == expected.valid
        assert rest.state == expected.state


@pytest.mark.parametrize("dataset", [Stream, Stateful])
@stand_ins()
def test_a_state_of_other_numbers_loses_no_sample(dataset):
    assert_none_lost(dataset)


def test_a_state_of_other_numbers_of_processes_loses_no_sample():
    assert_none_lost(Stateful)


def assert_none_lost(dataset: type[Stream]) -> None:
    taken: list[int] = []
    state = None
    for mode, workers, most in ((THREADS_2, 2, 2), (SOLO, 0, 1), (THREADS_3, 1, 1), (THREADS_2, 0, None)):
        found = passes(mode, dataset, most, workers=workers, state=state, size=2)
        taken += all_of(found)
        states = [through_json({**each[0].state, "states": 0}) for each in found]
        assert all(each == states[0] for each in states), "the states of all ranks tell the same"
        state = through_json(found[-1][0].state)
    assert sorted(taken) == list(range(COUNT))


@pytest.mark.parametrize(
    ("dataset", "before", "after", "words"),
    [
        (CutsItself, (SOLO, 2), (SOLO, 3), r"by 1 rank\(s\) with 2 loader worker\(s\) .* here are 1 with 3"),
        (CutsItself, (SOLO, 2), (THREADS_2, 1), r"by 1 rank\(s\) with 2 loader worker\(s\) .* here are 2 with 1"),
        (CutsItself, (SOLO, 0), (SOLO, 1), "cut by the stride; .* cut by the worker"),
        (Sharded, (THREADS_2, 0), (THREADS_3, 0), r"by 2 rank\(s\) with 1 loader worker\(s\) .* here are 3 with 1"),
        (Sharded, (THREADS_2, 0), (SOLO, 0), "cut by the dataset; .* cut by the stride"),
    ],
)
@stand_ins()
def test_a_stream_that_was_not_cut_by_stride_needs_the_same_numbers(dataset, before, after, words):
    state = passes(before[0], dataset, 1, workers=before[1])[0][0].state
    errors = refused(after[0], dataset, None, workers=after[1], state=state)
    assert len(errors) == after[0].ranks
    for error in errors:
        assert type(error) is StateError
        assert re.search(words, str(error))


def test_processes_refuse_a_stream_that_was_cut_otherwise():
    state = passes(SOLO, CutsItself, 1)[0][0].state
    (error,) = refused(SOLO, CutsItself, None, workers=1, state=state)
    assert type(error) is StateError
    assert "cut by the stride; here are 1 with 1, and it is cut by the worker" in str(error)


def test_the_ranks_own_shards_may_be_read_by_other_numbers_of_workers():
    first = passes(THREADS_2, Sharded, 2, workers=2)
    rest = passes(THREADS_2, Sharded, None, workers=0, state=first[0][0].state)
    assert sorted(all_of(first) + all_of(rest)) == list(range(COUNT))


def test_a_stream_that_began_uncut_by_rank_goes_on_so():
    first = passes(SOLO, Sharded, 2, workers=2)
    rest = passes(THREADS_2, Sharded, None, None, state=first[0][0].state)
    assert sorted(all_of(first) + all_of(rest)) == list(range(COUNT))
    assert all_of(rest, 1) == list(range(COUNT))


def test_a_dataset_with_a_state_is_not_read_again():
    state = loop(DeviceLoader(loader_of(Stateful())), 3).state
    resumed = Stateful()
    loader = DeviceLoader(loader_of(resumed))
    loader.load_state_dict(state)
    loop(loader)
    assert resumed.reads == list(range(9, COUNT))


def test_one_without_is_read_again_and_says_so(caplog):
    state = loop(DeviceLoader(loader_of(Stream())), 3).state
    resumed = Stream()
    loader = DeviceLoader(loader_of(resumed))
    loader.load_state_dict(state)
    with caplog.at_level(logging.INFO):
        loop(loader)
    assert "resumes the stream by reading and discarding what was delivered before" in caplog.text
    assert resumed.reads == list(range(COUNT))


@stand_ins()
def test_a_part_that_had_no_turn_yet_needs_no_state(caplog):
    state = loop(DeviceLoader(loader_of(Stateful(), 2)), 1).state
    assert list(state["states"]) == [0]
    loader = DeviceLoader(loader_of(Stateful(), 2))
    loader.load_state_dict(state)
    with caplog.at_level(logging.INFO):
        assert len(loop(loader).counted) == COUNT - SIZE
    assert "reading and dropping" not in caplog.text


@stand_ins()
def test_a_state_goes_through_json_and_torch():
    for dataset, workers in ((Stream, 0), (Stateful, 2)):
        state = loop(DeviceLoader(loader_of(dataset(), workers)), 2).state
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == state
        for saved in (through_json(state), state):
            loader = DeviceLoader(loader_of(dataset(), workers))
            loader.load_state_dict(saved)
            assert len(loop(loader).counted) == COUNT - 2 * SIZE


def test_the_state_tells_what_was_delivered_though_all_was_read():
    dataset = Stream()
    loader = DeviceLoader(loader_of(dataset))
    iterator = iter(loader)
    next(iterator)
    while len(dataset.reads) < COUNT:  # the reader needs nobody to continue
        threading.Event().wait(0.001)
    state = loader.state_dict()
    assert (state["epoch"], state["offset"], state["layers"]) == (0, SIZE, [[1, 1, [SIZE]]])
    list(iterator)
    after = loader.state_dict()
    assert (after["epoch"], after["offset"]) == (1, 0)


@pytest.mark.parametrize("persistent", [True, False])
@stand_ins()
def test_the_epochs_after_a_resumed_one_are_those_of_an_uninterrupted_run(persistent):
    options = {"persistent_workers": persistent, "workers": 2}
    for dataset in (CutsItself, ByEpoch):
        whole = passes(SOLO, dataset, None, None, None, **options)[0]
        loader = DeviceLoader(loader_of(dataset(), 2, persistent_workers=persistent))
        loop(loader)
        loader.load_state_dict(loop(DeviceLoader(loader_of(dataset(), 2)), 3).state)
        rest, second = loop(loader), loop(loader, 3)
        loader.load_state_dict(second.state)
        rest_of_second, third = loop(loader), loop(loader)
        assert rest.batches == whole[0].batches[3:]
        assert second.batches + rest_of_second.batches == whole[1].batches
        assert third.batches == whole[2].batches


def test_persistent_processes_continue_after_a_resumed_epoch():
    loader = DeviceLoader(loader_of(ByEpoch(), 2, persistent_workers=True))
    first = loop(loader, 3)
    loader.load_state_dict(first.state)
    rest, *later = loop(loader), loop(loader), loop(loader)
    found = [first.batches + rest.batches, *(each.batches for each in later)]
    for epoch, batches in enumerate(found):
        assert [batches] == by_stride(range(epoch * 1000, epoch * 1000 + COUNT), 1, 2, SIZE)


def test_a_state_of_another_kind_is_refused():
    state = DeviceLoader([[1]] * 4).state_dict()
    with pytest.raises(StateError, match="it is not the state of a stream"):
        DeviceLoader(loader_of(Stream())).load_state_dict({**state, "offset": 2})


# Failures.


class CodedError(Exception):
    """An error of the user's own."""


class Failing(Stream):
    """Fails on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = rank() == 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number == 12 and self.failing:
                raise CodedError(f"code {number}")
            yield number


class Unpicklable(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield 0
        yield threading.Lock()


class Killed(Stream):
    def __iter__(self) -> Iterator[int]:
        yield 0
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_of_the_dataset_comes_in_its_own_type_behind_the_batches_before_it(workers):
    got = []
    with pytest.raises(CodedError) as caught:
        for batch in DeviceLoader(loader_of(Failing(), workers)):
            got += batch.tolist()
    assert str(caught.value) == "code 12"
    assert any(note.startswith("in sample number 12 of the stream that part") for note in caught.value.__notes__)
    assert sorted(got) == list(range(12))


def test_an_error_on_one_rank_ends_the_others():
    own, peer = refused(THREADS_2, Failing, None)
    assert (type(own), own.args) == (CodedError, ("code 12",))
    assert (type(peer), str(peer)) == (BrokenWorldError, "the loader of rank 0 failed with CodedError: code 12")
    with pytest.raises(CodedError, match="code 12"):
        passes(PROCESSES_2, Failing, None, workers=1)


def test_a_batch_that_cannot_be_sent_is_named():
    with pytest.raises(UnpicklableError, match="a batch of samples of a stream, read for part 0, cannot be sent"):
        list(DeviceLoader(loader_of(Unpicklable(), 1, size=1, collate_fn=list)))


def test_a_killed_worker_is_told_of():
    with pytest.raises(RuntimeError, match=r"worker .*(killed|died|exited)"):
        list(DeviceLoader(loader_of(Killed(), 1, timeout=1)))
    for thread in threading.enumerate():
        if thread.name == "unisono-reader":  # torch looks after its workers once in that time
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
def test_leaving_all_ranks_loops_early_begins_the_next_epoch(workers, persistent):
    found = passes(THREADS_2, Stream, 1, 2, None, workers=workers, persistent_workers=persistent)
    assert all_of(found, 2) == list(range(COUNT))
    assert [each[2].state["epoch"] for each in found] == [3, 3]


def test_a_rank_that_leaves_earlier_breaks_the_others():
    def body() -> str:
        loader = DeviceLoader(loader_of(Stream(200), size=1))
        try:
            loop(loader, 1 if rank() else None)
        except BrokenWorldError as error:
            return type(error).__name__
        return "left"

    with contextlib.suppress(BrokenWorldError):
        assert THREADS_2.run(body) == ["BrokenWorldError", "left"]


def test_fifty_loops_that_are_left_leave_nothing():
    loader = DeviceLoader(loader_of(Stream()))
    for _ in range(50):
        loop(loader, 1)
    assert loop(loader).state["epoch"] == 51


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_gone_keeps_nothing_alive(workers):
    dataset = Stream()
    torch_loader = loader_of(dataset, workers, persistent_workers=bool(workers))
    loader = DeviceLoader(torch_loader)
    loop(loader)
    gone = [weakref.ref(dataset), weakref.ref(torch_loader)]
    del dataset, torch_loader, loader
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_persistent_workers_serve_the_loop_that_was_begun_last():
    loader = DeviceLoader(loader_of(Stream(200), 1, persistent_workers=True))
    first = iter(loader)
    next(first)
    assert [sample for batch in loader for sample in batch.tolist()] == list(range(200))
    with pytest.raises(BusyError, match="have begun another loop"):
        list(first)
    assert loop(loader).state["epoch"] == 3


def test_threads_that_begin_passes_at_once_have_an_epoch_each():
    loader = loader_of(ByEpoch())
    gate = threading.Barrier(4)
    epochs: list[int] = []

    def begin(source: StreamSource) -> None:
        gate.wait(PATIENCE_S)
        epochs.append(source.begin(DeviceLoader(loader)._never_begun._rule, lambda samples: None).epoch)

    source = StreamSource(loader, 0, 1, 0, None)
    threads = [threading.Thread(target=begin, args=(source,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(epochs) == [0, 1, 2, 3]


class ShardsByOtherNames(Stream):
    """`shard(index, count)`, the other way round than others have it."""

    def __init__(self, part: range = range(COUNT)) -> None:
        super().__init__()
        self.part = part

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)

    def shard(self, index: int, count: int) -> ShardsByOtherNames:
        return ShardsByOtherNames(self.part[index::count])


def test_a_method_with_other_parameters_is_not_called_by_place():
    found = passes(THREADS_2, ShardsByOtherNames, None)
    assert sorted(all_of(found)) == list(range(COUNT))


def test_a_state_over_another_stream_is_told_of():
    class Other(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100, 100 + COUNT))

    first = DeviceLoader(loader_of(Stream()))
    for number, _ in enumerate(first):
        if number == 2:
            break
    second = DeviceLoader(loader_of(Other()))
    second.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="saved over another stream: the first samples differ"):
        list(second)
