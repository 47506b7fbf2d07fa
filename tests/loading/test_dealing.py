"""Whole epochs as they are dealt to ranks, by property: each sample once, whatever the numbers."""

from __future__ import annotations

import itertools

import pytest
from dealing import COUNTS, EVERY, rule_of, size_of
from epochs import Bucketed, Numbers, chunks, dealt, ranks_of, take, worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from unisono import DeviceLoader, ParallelLoader
from unisono.loading.indexed import IndexedSource
from unisono.loading.sharding import cut, rounds


def order_of(samples: int, size: int, drop_last: bool) -> list[int]:
    """The plain order of an epoch of the numbers, as far as it makes batches."""
    return list(range(samples - samples % size if drop_last else samples))


@settings(max_examples=100)
@given(**EVERY, tail=st.sampled_from(["split", "pad", "drop"]), drop_last=st.booleans())
def test_an_epoch_is_cut_into_global_batches_and_each_sample_counts_once(samples, count, size, split, tail, drop_last):
    loader = DataLoader(Numbers(samples), batch_size=size, drop_last=drop_last)
    found = dealt(loader, count, split=split, tail=tail)
    whole = size if split == "global" else size * count
    expected = chunks(order_of(samples, size, drop_last), whole)
    if tail == "drop":
        expected = [chunk for chunk in expected if len(chunk) == whole]
    assert found.global_batches == expected
    for deliveries in found.rounds:
        for each in deliveries:
            assert each.batch, "every rank has something to compute"
            assert set(each.batch[each.valid :]) <= set(itertools.chain(*(other.counted for other in deliveries)))
    claims = [
        [(piece.claim, piece.position["offset"]) for piece in pieces] for pieces in zip(*found.pieces, strict=True)
    ]
    for claim in claims:
        assert sum(each.samples for each, _ in claim) == claim[0][0].total
        assert len({(each.total, each.mark, offset) for each, offset in claim}) == 1
    assert count == 1 or len({claim[0][0].mark for claim in claims}) == len(claims), "each round has a mark of its own"
    if tail == "pad":
        full = -(-size // count) if split == "global" else size
        assert {len(each.batch) for deliveries in found.rounds for each in deliveries} <= {full}
        assert all(each.repeated == full - each.samples for claim in claims for each, _ in claim)


@settings(max_examples=30)
@given(samples=st.integers(0, 70), whole=st.sampled_from([8, 16, 24]), shuffle=st.booleans(), drop_last=st.booleans())
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(samples, whole, shuffle, drop_last):
    def load(count: int, split: str) -> list[list[int]]:
        loader = DataLoader(
            Numbers(samples),
            batch_size=whole if split == "global" else whole // count,
            shuffle=shuffle and samples > 0,
            drop_last=drop_last,
        )
        return dealt(loader, count, seed=3, split=split, tail="drop" if drop_last else "split").global_batches

    alone = load(1, "global")
    assert all(load(count, split) == alone for count in (1, 2, 4, 8) for split in ("global", "rank"))
    assert len(list(itertools.chain(*alone))) == (samples - samples % whole if drop_last else samples)


@given(**EVERY, tail=st.sampled_from(["split", "pad", "drop"]), drop_last=st.booleans(), is_fixed=st.booleans())
def test_the_length_is_the_number_of_rounds(samples, count, size, split, tail, drop_last, is_fixed):
    loader = DataLoader(Numbers(samples), batch_size=size, drop_last=drop_last)
    rule = {"split": split, "tail": tail, "fixed_batch_size": is_fixed}
    found = dealt(loader, count, **rule)
    assert {len(pieces) for pieces in found.pieces} == {IndexedSource(loader, None).num_rounds(rule_of(count, **rule))}


@given(
    sizes=st.lists(st.integers(1, 4), max_size=12),
    count=COUNTS,
    split=EVERY["split"],
    tail=st.sampled_from(["split", "pad", "drop"]),
)
def test_batches_of_ones_own_are_dealt_in_their_order(sizes, count, split, tail):
    batches = chunks_of(sizes)
    loader = DataLoader(Numbers(sum(sizes)), batch_sampler=Bucketed(batches))
    found = dealt(loader, count, split=split, tail=tail)
    each = 1 if split == "global" else count
    groups = [list(itertools.chain(*batches[start : start + each])) for start in range(0, len(batches), each)]
    if tail == "drop" and len(batches) % each:
        groups = groups[:-1]
    assert found.global_batches == groups
    assert len(groups) == IndexedSource(loader, None).num_rounds(rule_of(count, split=split, tail=tail))


def chunks_of(sizes: list[int]) -> list[list[int]]:
    bounds = itertools.accumulate(sizes, initial=0)
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


@given(samples=st.integers(1, 40), size=st.integers(1, 5), count=st.integers(1, 4), shuffle=st.booleans())
def test_cutting_indices_and_cutting_loaded_batches_give_ranks_the_same(samples, size, count, shuffle):
    loader = DataLoader(Numbers(samples), batch_size=size, shuffle=shuffle)
    loaded = [pieces.batch for pieces in dealt(loader, 1, seed=0).pieces[0]]
    found = dealt(loader, count, seed=0)
    for each, deliveries in zip(rounds(loaded, rule_of(count), size_of), found.rounds, strict=True):
        for rank, delivery in enumerate(deliveries):
            piece = cut(each, rank, 0)
            assert (piece.batch.tolist(), piece.claim.samples) == delivery


def test_drop_last_drops_the_tail_unless_it_shall_be_split():
    loader = DataLoader(Numbers(14), batch_size=2, drop_last=True)
    explicit = DataLoader(Numbers(14), batch_sampler=BatchSampler(SequentialSampler(range(14)), 2, drop_last=True))
    for each in (loader, explicit):
        assert [take(rank) for rank in ranks_of(each, 4)] == [[([2 * rank, 2 * rank + 1], 2)] for rank in range(4)]
        rest = [take(rank)[1:] for rank in ranks_of(each, 4, tail="split")]
        assert rest == [[([8], 1)], [([9], 1)], [([10, 11], 2)], [([12, 13], 2)]]
    batches = ParallelLoader(loader, [f"cpu:{index}" for index in range(4)])
    assert [len(list(batches.per_device_loader(f"cpu:{index}"))) for index in range(4)] == [1] * 4 == [len(batches)] * 4


@pytest.mark.parametrize("samples", [12, 13])
def test_a_loader_that_a_distributed_sampler_cuts_is_not_cut_again(samples):
    for rank, world in enumerate(worlds(2)):
        sampler = DistributedSampler(Numbers(samples), num_replicas=2, rank=rank, shuffle=False)
        loader = DeviceLoader(DataLoader(Numbers(samples), batch_size=3, sampler=sampler), world=world)
        own = [number % samples for number in range(rank, samples + samples % 2, 2)]
        assert [each.batch for each in take(loader)] == chunks(own, 3)
        assert len(loader) == len(chunks(own, 3))


@pytest.mark.parametrize("is_said", [False, True])
def test_a_global_split_of_a_sharded_loader_is_refused_with_two_ways_out(is_said):
    data, options = Numbers(24), {"already_sharded": True} if is_said else {}
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    cut, own = DataLoader(data, batch_size=4, sampler=sampler), DataLoader(data, batch_size=4)
    world = worlds(2)[0]
    with pytest.raises(ValueError, match="of the loader, of 4, the global batch, which 2 ranks divide; but"):
        DeviceLoader(cut, split="global", world=world, **options)
    assert len(DeviceLoader(own, split="global", world=world)) == 6
    assert len(DeviceLoader(cut, world=world, **options)) == 3
    alone = DistributedSampler(data, num_replicas=1, rank=0)
    assert len(DeviceLoader(DataLoader(data, batch_size=4, sampler=alone), split="global", **options)) == 6


def test_a_loader_that_is_said_to_be_cut_gives_all_of_it():
    loaders = ranks_of(DataLoader(Numbers(5), batch_size=2), 2, already_sharded=True)
    assert [take(loader) for loader in loaders] == [[([0, 1], 2), ([2, 3], 2), ([4], 1)]] * 2


def test_a_sampler_that_cuts_for_other_ranks_is_refused():
    num_replicas, rank = 2, 1
    sampler = DistributedSampler(Numbers(8), num_replicas=num_replicas, rank=rank)
    loader = DataLoader(Numbers(8), batch_size=2, sampler=sampler)
    with pytest.raises(ValueError, match=f"cuts the data for rank {rank} of {num_replicas}, but this is rank 0 of 1"):
        DeviceLoader(loader)
    assert len(list(DeviceLoader(loader, already_sharded=True))) > 0
