"""Who gets which sample: the arithmetic against plain oracles, and the DataLoader that follows it."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unisono import BusyError, DeviceLoader, ParallelLoader
from unisono.loaders import indexed as indexed_module
from unisono.loaders import sharding
from unisono.loaders.indexed import IndexedLoader, is_indexed
from unisono.loaders.sharding import Piece, Shard, Size, cut, deal, glimpse, measure, rounds
from unisono.world import World, thread_worlds

COUNTS = st.integers(1, 9)


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stopping(Numbers):
    """Sample 5 raises what a loop takes for its end."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise StopIteration
        return index


class Pids(Numbers):
    """Sample i is the process that loads it."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Augmented(Numbers):
    """Sample i is drawn, as an augmentation is."""

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


def worlds(count: int) -> list[World]:
    return thread_worlds([torch.device("cpu", rank) for rank in range(count)])


def values(pieces: list[Piece]) -> list[list[int]]:
    """The numbers that count of each piece."""
    return [piece.batch[: piece.samples].tolist() for piece in pieces]


def shards(
    loader: DataLoader, count: int, fixed_batch_size: bool = False, seed: int | None = None
) -> list[list[Piece]]:
    """Each rank's pieces of one epoch."""
    return [list(IndexedLoader(loader, Shard(rank, count), seed).pieces(fixed_batch_size)) for rank in range(count)]


def global_batches(each_ranks: list[list[Piece]]) -> list[list[int]]:
    """The samples of each round, in rank order."""
    assert len({len(pieces) for pieces in each_ranks}) == 1, "every rank makes the same number of steps"
    return [list(itertools.chain(*round_)) for round_ in zip(*map(values, each_ranks), strict=True)]


# The arithmetic.


def size_of(batch: Any) -> Size:
    return Size(len(batch))


@st.composite
def short_rounds(draw: Any) -> tuple[list[int], int]:
    """The sizes of a round's batches, at most as many as there are ranks, and the number of ranks."""
    count = draw(COUNTS)
    return draw(st.lists(st.integers(1, 12), min_size=1, max_size=count)), count


@given(short_rounds())
def test_a_round_is_dealt_contiguously_and_each_sample_once(case):
    sizes, count = case
    whole = [(batch, sample) for batch, size in enumerate(sizes) for sample in range(size)]
    dealt = [
        (part.batch, sample)
        for part in deal([*map(Size, sizes)], count)
        if part.samples
        for sample in range(*part[1:3])
    ]
    assert dealt == whole


@given(short_rounds())
def test_every_rank_gets_a_part_and_knows_the_whole(case):
    sizes, count = case
    parts = deal([*map(Size, sizes)], count)
    assert len(parts) == count
    for part in parts:
        assert 0 <= part.start < part.stop <= sizes[part.batch]
        assert part.total == sum(sizes)
        assert part.samples in (0, part.stop - part.start)


@given(short_rounds())
def test_the_ranks_that_share_a_batch_share_it_evenly_and_earlier_ones_have_more(case):
    sizes, count = case
    for batch, shared in itertools.groupby(deal([*map(Size, sizes)], count), key=lambda part: part.batch):
        taken = [part.samples for part in shared]
        plain = [sizes[batch] // len(taken) + (place < sizes[batch] % len(taken)) for place in range(len(taken))]
        assert taken == plain


@given(short_rounds())
def test_a_rank_without_a_sample_repeats_one_that_counts_nothing(case):
    sizes, count = case
    fillers = [part for part in deal([*map(Size, sizes)], count) if not part.samples]
    assert all((part.start, part.stop) == (0, 1) for part in fillers)
    if len(sizes) == 1:
        assert len(fillers) == max(0, count - sizes[0])  # no more than must be


@given(short_rounds())
def test_the_batches_of_a_round_have_as_many_ranks_each_to_within_one(case):
    sizes, count = case
    sharers = Counter(part.batch for part in deal([*map(Size, sizes)], count))
    assert sorted(sharers) == list(range(len(sizes)))
    assert max(sharers.values()) - min(sharers.values()) <= 1


def test_a_full_round_gives_batch_i_to_rank_i():
    assert deal([Size(4), Size(2), Size(3)], 3) == [(0, 0, 4, 4, 9), (1, 0, 2, 2, 9), (2, 0, 3, 3, 9)]


@given(st.lists(st.integers(1, 5), max_size=20), COUNTS)
def test_rounds_take_the_batches_in_order_and_lose_none(sizes, count):
    batches = [list(range(size)) for size in sizes]
    dealt = list(rounds(batches, count, size_of))
    assert [batch for each in dealt for batch in each.batches] == batches
    assert all(len(each.batches) == count for each in dealt[:-1])
    assert all(each.parts == deal(each.sizes, count) for each in dealt)


@given(st.lists(st.integers(1, 3), max_size=20), COUNTS)
def test_fixed_rounds_end_before_the_first_that_differs(sizes, count):
    whole = [sizes[start : start + count] for start in range(0, len(sizes), count)]
    kept = list(itertools.takewhile(lambda group: group == [sizes[0]] * count, whole))
    dealt = rounds([[None] * size for size in sizes], count, size_of, fixed_batch_size=True)
    assert [[len(batch) for batch in each.batches] for each in dealt] == kept


@given(st.lists(st.integers(1, 3), max_size=20), COUNTS)
def test_rounds_that_drop_their_tail_keep_every_full_round(sizes, count):
    dealt = rounds([[None] * size for size in sizes], count, size_of, drop_tail=True)
    assert [len(each.batches) for each in dealt] == [count] * (len(sizes) // count)


def test_rounds_read_no_further_than_the_round_they_give():
    read = []
    source = (read.append(number) or [number] for number in range(100))
    dealt = rounds(source, 3, size_of)
    next(dealt)
    assert read == [0, 1, 2]


def test_what_a_fixed_size_leaves_out_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "unisono"):
        list(rounds([[1, 2], [3, 4], [5]], 2, size_of, fixed_batch_size=True))
    assert "ends the epoch before round 1" in caplog.text
    assert "[1] samples" in caplog.text


def test_a_batch_that_does_not_tell_its_size_is_one_sample_that_all_who_share_it_get_whole():
    (dealt,) = rounds(["text"], 3, lambda batch: measure(batch, 0))
    pieces = [cut(dealt, rank, 0) for rank in range(3)]
    assert [piece[:3] for piece in pieces] == [("text", 1, 1), ("text", 0, 1), ("text", 0, 1)]


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_out_of_range_is_refused(index, count):
    with pytest.raises(ValueError, match=re.escape(f"Shard(index={index}, count={count})")):
        Shard(index, count)


def documented_table() -> list[list[list[int]]]:
    """The rows of the table in the module's text: rank 0, rank 1 and the global batch of each round."""
    lines = sharding.__doc__.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:2] == ["round", "rank"])
    rows = itertools.takewhile(bool, lines[start + 1 :])
    cells = [re.split(r"\s{2,}", row.strip())[1:4] for row in rows]
    return [[[int(number) for number in cell.split()] for cell in row] for row in cells]


def test_the_table_in_the_module_text_is_true():
    each_ranks = shards(DataLoader(Numbers(10), batch_size=2), 2)
    rows = zip(*map(values, each_ranks), global_batches(each_ranks), strict=True)
    assert [list(row) for row in rows] == documented_table()
    assert len(documented_table()) == 3


# The DataLoader that follows it.


@given(
    samples=st.integers(0, 70),
    batch=st.sampled_from([12, 24]),
    count=st.sampled_from([2, 3, 4, 6]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(samples, batch, count, shuffle, drop_last):
    def load(ranks: int) -> list[list[int]]:
        loader = DataLoader(
            Numbers(samples), batch_size=batch // ranks, shuffle=shuffle and samples > 0, drop_last=drop_last
        )
        return global_batches(shards(loader, ranks, seed=3))

    alone = load(1)
    assert load(count) == alone
    found = list(itertools.chain(*alone))
    assert len(found) == len(set(found)) == (samples - samples % batch if drop_last else samples)


@given(samples=st.integers(1, 40), batch=st.integers(1, 5), count=st.integers(1, 4), shuffle=st.booleans())
def test_cutting_at_the_indices_and_cutting_loaded_batches_give_each_rank_the_same(samples, batch, count, shuffle):
    loader = DataLoader(Numbers(samples), batch_size=batch, shuffle=shuffle)
    cut_at_indices = shards(loader, count)
    loaded = (piece.batch for piece in IndexedLoader(loader, Shard(0, 1), None).pieces())
    dealt = list(rounds(loaded, count, size_of))
    for rank, pieces in enumerate(cut_at_indices):
        cut_when_loaded = [cut(each, rank, 0) for each in dealt]
        assert [(p.batch.tolist(), *p[1:3]) for p in pieces] == [(p.batch.tolist(), *p[1:3]) for p in cut_when_loaded]


def orders(loader: DataLoader, epochs: int, seed: int | None = None) -> list[list[int]]:
    indexed = IndexedLoader(loader, Shard(0, 1), seed)
    return [list(itertools.chain(*values(list(indexed.pieces())))) for _ in range(epochs)]


def shuffled(generator: torch.Generator | None = None) -> DataLoader:
    return DataLoader(Numbers(50), batch_size=4, shuffle=True, generator=generator)


def test_the_order_is_a_function_of_seed_and_epoch():
    torch.manual_seed(1)
    first = orders(shuffled(), 3, seed=7)
    torch.manual_seed(2)
    assert orders(shuffled(), 3, seed=7) == first
    assert len({tuple(order) for order in first + orders(shuffled(), 3, seed=8)}) == 6
    assert all(sorted(order) == list(range(50)) for order in first)


def test_the_seed_is_that_of_the_loaders_generator_and_zero_without_one():
    by_generator = shuffled(torch.Generator().manual_seed(5))
    assert orders(by_generator, 2) == orders(shuffled(), 2, seed=5)
    assert orders(shuffled(), 2) == orders(shuffled(), 2, seed=0)
    own = DataLoader(Numbers(50), sampler=RandomSampler(range(50), generator=torch.Generator().manual_seed(5)))
    assert orders(own, 2) == orders(by_generator, 2)


def test_an_order_without_shuffling_stays():
    assert orders(DataLoader(Numbers(9), batch_size=2), 2) == [list(range(9))] * 2


def test_a_random_sampler_with_replacement_draws_as_many_as_it_is_told():
    sampler = RandomSampler(range(10), replacement=True, num_samples=200)
    one, two = orders(DataLoader(Numbers(10), sampler=sampler, batch_size=7), 2)
    assert len(one) == len(two) == 200
    assert set(one) == set(range(10))
    assert one != two


def test_a_subset_sampler_gives_its_subset_in_a_new_order_each_epoch():
    subset = list(range(3, 60, 3))
    one, two = orders(DataLoader(Numbers(99), sampler=SubsetRandomSampler(subset), batch_size=4), 2)
    assert sorted(one) == sorted(two) == subset
    assert one != two


def test_a_weighted_sampler_keeps_its_weights():
    weights = [0.0, 1.0, 3.0]
    (drawn,) = orders(DataLoader(Numbers(3), sampler=WeightedRandomSampler(weights, 4000), batch_size=64), 1)
    counts = Counter(drawn)
    assert counts[0] == 0
    assert len(drawn) == 4000
    assert 2.5 < counts[2] / counts[1] < 3.5  # 3 to 1; five standard deviations are about 0.4


class Bucketed:
    """A batch sampler of one's own, with batches of several sizes."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
def test_a_batch_sampler_of_ones_own_is_followed(kind):
    groups = [[5, 1, 4], [0], [2, 3], [9, 8, 7, 6], [11, 10, 12]]
    loader = DataLoader(Numbers(13), batch_sampler=Bucketed([kind(group) for group in groups]))
    first, second = (values(pieces) for pieces in shards(loader, 2))
    assert first == [[5, 1, 4], [2, 3], [11, 10]]
    assert second == [[0], [9, 8, 7, 6], [12]]


def test_drop_last_drops_the_tail_instead_of_splitting_it():
    loader = DataLoader(Numbers(14), batch_size=2, drop_last=True)
    assert global_batches(shards(loader, 4)) == [list(range(8))]
    explicit = DataLoader(Numbers(14), batch_sampler=BatchSampler(SequentialSampler(range(14)), 2, drop_last=True))
    assert global_batches(shards(explicit, 4)) == [list(range(8))]
    batches = ParallelLoader(loader, [f"cpu:{index}" for index in range(4)])
    assert [len(list(batches.per_device_loader(f"cpu:{index}"))) for index in range(4)] == [1] * 4 == [len(batches)] * 4


def test_a_fixed_batch_size_ends_on_every_rank_before_the_same_round():
    loader = DataLoader(Numbers(23), batch_size=2)
    assert global_batches(shards(loader, 3, fixed_batch_size=True)) == [
        list(range(6)),
        list(range(6, 12)),
        list(range(12, 18)),
    ]


def test_a_loader_that_a_distributed_sampler_cuts_is_not_cut_again():
    for world in worlds(2):
        sampler = DistributedSampler(Numbers(12), num_replicas=2, rank=world.rank, shuffle=False)
        loader = DeviceLoader(DataLoader(Numbers(12), batch_size=3, sampler=sampler), world=world)
        assert [batch.tolist() for batch in loader] == [
            list(range(world.rank, 12, 2))[:3],
            list(range(world.rank, 12, 2))[3:],
        ]
        assert len(loader) == 2


def test_a_loader_that_cuts_itself_ends_at_the_first_other_size_when_sizes_are_fixed():
    world = worlds(2)[1]
    sampler = DistributedSampler(Numbers(14), num_replicas=2, rank=1, shuffle=False)
    loader = DeviceLoader(DataLoader(Numbers(14), batch_size=3, sampler=sampler), fixed_batch_size=True, world=world)
    assert [len(batch) for batch in loader] == [3, 3]


def test_a_loader_without_batches_keeps_seed_and_epoch_on_every_rank():
    def load(world: World) -> list[list[int]]:
        loader = DataLoader(Numbers(11), batch_size=None, shuffle=True)
        torch.manual_seed(world.rank)
        device_loader = DeviceLoader(loader, world=world, seed=4)
        found = []
        for _ in range(2):
            iterator = iter(device_loader)
            found.append([sample for sample in iterator if iterator.valid_samples])
        return found

    each_ranks = [load(world) for world in worlds(2)]
    first, second = ([each[epoch] for each in each_ranks] for epoch in range(2))
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(11))
    assert first != second


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("count", [6, 20], ids=["in the last batch", "in the midst"])
def test_a_stop_iteration_in_a_dataset_is_an_error_and_no_end(num_workers, count):
    loader = DataLoader(Stopping(count), batch_size=3, num_workers=num_workers)
    with pytest.raises(RuntimeError, match="its dataset or collate_fn raised StopIteration"):
        list(DeviceLoader(loader))


def test_the_users_loader_is_not_touched():
    loader = shuffled(torch.Generator().manual_seed(5))
    before, state = dict(vars(loader)), loader.generator.get_state()
    plain = [batch.tolist() for batch in shuffled(torch.Generator().manual_seed(5))]
    orders(loader, 2)
    assert vars(loader) == before
    assert torch.equal(loader.generator.get_state(), state)
    assert [batch.tolist() for batch in loader] == plain


def test_the_twin_keeps_the_options_of_the_users_loader():
    loader = DataLoader(
        Numbers(8),
        batch_size=2,
        num_workers=1,
        collate_fn=list,
        timeout=77,
        worker_init_fn=print,
        multiprocessing_context="fork",
        prefetch_factor=3,
        persistent_workers=True,
    )
    twin = IndexedLoader(loader, Shard(0, 1), None)._loader
    for name in ("dataset", "num_workers", "collate_fn", "timeout", "worker_init_fn", "prefetch_factor", "pin_memory"):
        assert getattr(twin, name) is getattr(loader, name), name
    assert twin.persistent_workers
    assert twin.multiprocessing_context == loader.multiprocessing_context


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterating_leaves_the_global_random_states_alone(num_workers):
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    orders(DataLoader(Numbers(50), batch_size=4, shuffle=True, num_workers=num_workers), 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(numpy.array_equal(one, other) for one, other in zip(numpy.random.get_state(), before[2], strict=True))


def test_no_two_ranks_workers_draw_the_same_numbers_and_a_second_run_draws_them_again():
    loader = DataLoader(Augmented(8), batch_size=1, num_workers=1)
    drawn = [[piece.batch.item() for piece in pieces] for pieces in shards(loader, 2)]
    assert len({*drawn[0], *drawn[1]}) == 8
    assert [[piece.batch.item() for piece in pieces] for pieces in shards(loader, 2)] == drawn


def test_persistent_workers_serve_epoch_after_epoch_and_after_an_early_end():
    indexed = IndexedLoader(DataLoader(Pids(12), num_workers=2, persistent_workers=True), Shard(0, 1), None)

    def workers() -> set[int]:
        return {piece.batch.item() for piece in indexed.pieces()}

    first = workers()
    assert len(first) == 2
    assert os.getpid() not in first
    assert workers() == first
    early = indexed.pieces()
    next(early)
    del early
    assert len(list(indexed.pieces())) == 12
    assert workers() == first


def test_persistent_workers_that_serve_another_pass_are_busy(monkeypatch):
    monkeypatch.setattr(indexed_module, "_BUSY_S", 0.01)
    indexed = IndexedLoader(DataLoader(Numbers(4), num_workers=1, persistent_workers=True), Shard(0, 1), None)
    running = indexed.pieces()
    with pytest.raises(BusyError, match="persistent workers serve another loop"):
        indexed.pieces()
    assert len(list(running)) == 4


def test_a_pass_that_cannot_begin_does_not_keep_the_workers():
    class Broken(Bucketed):
        def __iter__(self) -> Iterator[Any]:
            raise OSError("no batches today")

    loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=True, batch_sampler=Broken([]))
    indexed = IndexedLoader(loader, Shard(0, 1), None)
    for _ in range(2):
        with pytest.raises(OSError, match="no batches today"):
            indexed.pieces()


def test_passes_begun_by_several_threads_at_once_are_each_complete():
    indexed = IndexedLoader(DataLoader(Numbers(20), batch_size=3, shuffle=True), Shard(0, 1), None)
    together = threading.Barrier(4)
    found: list[list[int]] = []

    def load() -> None:
        for _ in range(10):
            together.wait()
            found.append(list(itertools.chain(*values(list(indexed.pieces())))))

    threads = [threading.Thread(target=load) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many meetings as can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [sorted(order) for order in found] == [list(range(20))] * 40
    assert len({tuple(order) for order in found}) == 40


class Subclass(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_only_what_names_its_samples_by_index_is_cut_there():
    assert is_indexed(DataLoader(Numbers(3)))
    assert is_indexed(DataLoader(Numbers(3), batch_size=None))
    assert not is_indexed(Subclass(Numbers(3)))
    assert not is_indexed(DataLoader(Stream()))
    assert not is_indexed([1, 2, 3])


def test_the_cut_twin_of_a_loader_goes_with_it():
    loader = DataLoader(Numbers(4))
    list(DeviceLoader(loader))
    gone = threading.Event()
    weakref.finalize(loader, gone.set)
    del loader
    gc.collect()
    assert gone.is_set()


# What tells one loaded batch from another.


@pytest.mark.parametrize(
    "batch",
    [
        torch.eye(3).long().to_sparse(),
        torch.empty(2, dtype=torch.int64, device="meta"),
        torch.nested.nested_tensor([torch.ones(2).long(), torch.ones(3).long()], layout=torch.jagged),
        pack_sequence([torch.ones(2, 1).long()]),
        torch.rand(2, 3),
        torch.zeros(2, 3, dtype=torch.uint8),
        numpy.array([object()]),
        numpy.zeros(3),
        None,
        object(),
        1.5,
    ],
    ids=lambda batch: f"{type(batch).__name__}",
)
def test_what_tells_nothing_for_certain_is_not_looked_at(batch):
    assert glimpse([batch, "name"]) == ["name"]


def test_a_few_whole_numbers_and_texts_are_looked_at():
    assert glimpse({"image": torch.rand(20, 3), "label": torch.arange(20), "name": "a"}) == [list(range(8)), "a"]
    assert glimpse(numpy.arange(60).reshape(5, 12)) == [[list(range(8))]], "of the first sample"
    assert glimpse([torch.tensor(7), numpy.array(["x", "y"]), torch.empty(0, 3).long()]) == [7, ["x", "y"], []]
    assert glimpse([1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4]
