"""Who gets which sample: the arithmetic against plain oracles."""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any, get_args

import numpy
import pytest
import torch
from epochs import Bucketed, Numbers, chunks, dealt, ranks_of, take
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from unisono import DeviceLoader, ParallelLoader
from unisono.loaders import sharding
from unisono.loaders.indexed import IndexedSource
from unisono.loaders.sharding import Rule, Size, Tail, cut, deal, glimpse, measure, policy_of, rounds

COUNTS = st.integers(1, 9)


EVERY = {
    "samples": st.integers(0, 70),
    "count": st.integers(1, 8),
    "size": st.integers(1, 12),
    "split": st.sampled_from(["rank", "global"]),
}
"""An epoch, and how it is dealt: any of them."""


def rule_of(count: int, **options: Any) -> Rule:
    return Rule(count, tuple(range(count)), **options)


def size_of(batch: Any, is_cut: bool = True) -> Size:
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
    found = [
        (part.batch, sample)
        for part in deal([*map(Size, sizes)], count)
        if part.samples
        for sample in range(part.start, part.stop)
    ]
    assert found == whole


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
    assert all((part.start, part.stop, part.repeated) == (0, 1, 1) for part in fillers)
    if len(sizes) == 1:
        assert len(fillers) == max(0, count - sizes[0])  # no more than must be


@given(short_rounds(), st.integers(1, 12))
def test_padding_fills_every_part_by_going_round_it(case, full):
    sizes, count = case
    parts = deal([*map(Size, sizes)], count, full)
    plain = deal([*map(Size, sizes)], count)
    for part, without in zip(parts, plain, strict=True):
        own = list(range(without.start, without.stop))
        filled = list(itertools.islice(itertools.cycle(own), max(full, len(own))))
        assert part.order() == filled
        assert (part.samples, part.total) == (without.samples, without.total)
        assert part.repeated == len(filled) - part.samples


@given(st.lists(st.integers(1, 3), max_size=20), COUNTS)
def test_fixed_rounds_end_before_the_first_that_differs(sizes, count):
    whole = [sizes[start : start + count] for start in range(0, len(sizes), count)]
    kept = list(itertools.takewhile(lambda group: group == [sizes[0]] * count, whole))
    found = rounds([[None] * size for size in sizes], rule_of(count, fixed_batch_size=True), size_of)
    assert [[len(batch) for batch in each.batches] for each in found] == kept


@given(batches=st.integers(0, 40), count=COUNTS, split=EVERY["split"], tail=st.sampled_from(["split", "drop", "pad"]))
def test_a_rule_tells_the_number_of_rounds_before(batches, count, split, tail):
    rule = rule_of(count, split=split, tail=tail)
    assert rule.rounds_of(batches) == len(list(rounds([[0]] * batches, rule, size_of)))
    fixed = rule_of(count, split=split, tail=tail, fixed_batch_size=True)
    assert fixed.rounds_of(batches) == len(list(rounds([[0]] * batches, fixed, size_of)))


def test_rounds_read_no_further_than_the_round_they_give():
    read = []
    source = (read.append(number) or [number] for number in range(100))
    found = rounds(source, rule_of(3), size_of)
    next(found)
    assert read == [0, 1, 2]


def test_what_a_fixed_size_leaves_out_is_logged(caplog):
    told = []
    with caplog.at_level(logging.WARNING, "unisono"):
        list(rounds([[1, 2], [3, 4], [5]], rule_of(2, fixed_batch_size=True), size_of, left_out=told.append))
    assert "fixed_batch_size=True ends the epoch at sample 4: the next round has batches of [1] samples" in caplog.text
    assert "and not 2 of size 2" in caplog.text
    assert told == [[1, 0]]


def test_a_batch_that_does_not_tell_its_size_is_one_sample_that_all_who_share_it_get_whole():
    for tail in ("split", "pad"):
        (found,) = rounds(["text"], rule_of(3, tail=tail), lambda batch, is_cut: measure(batch, 0, None, is_cut))
        pieces = [cut(found, rank, 0) for rank in range(3)]
        assert [(piece.batch, piece.claim.samples, piece.claim.total) for piece in pieces] == [
            ("text", 1, 1),
            ("text", 0, 1),
            ("text", 0, 1),
        ]


def test_a_loaded_batch_is_padded_with_its_own_samples():
    batches = [torch.arange(4), torch.arange(4, 8), torch.arange(8, 11)]
    *_, last = rounds(batches, rule_of(2, tail="pad"), lambda batch, is_cut: measure(batch, 0, None, is_cut))
    pieces = [cut(last, rank, 0) for rank in range(2)]
    assert [piece.batch.tolist() for piece in pieces] == [[8, 9, 8, 9], [10, 10, 10, 10]]
    assert [(piece.claim.samples, piece.claim.repeated) for piece in pieces] == [(2, 2), (1, 3)]


@pytest.mark.parametrize(("kept", "count"), [((2,), 2), ((-1,), 2), ((0,), 0)])
def test_a_place_out_of_range_is_refused(kept, count):
    with pytest.raises(ValueError, match=re.escape(f"Rule(count={count}, kept={kept}): the places must be in")):
        Rule(count, kept)


@pytest.mark.parametrize(("name", "value"), [("split", "devices"), ("tail", "cut"), ("tail", None), ("split", 2)])
def test_an_unknown_split_or_tail_is_refused_with_the_choices(name, value):
    choices = {"split": "'rank', 'global'", "tail": "'split', 'drop', 'pad', 'error'"}[name]
    words = f"{name}={value!r} is unknown; choose one of {choices}"
    with pytest.raises(ValueError, match=re.escape(words)):
        Rule(**{name: value})
    if value is not None:
        with pytest.raises(ValueError, match=re.escape(words)):
            DeviceLoader([], **{name: value})


def documented_tables() -> list[list[list[list[int]]]]:
    """Both tables: the rows of each, with the samples of rank 0, of rank 1 and of the global batch."""
    lines = sharding.__doc__.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:2] == ["round", "rank"])
    rows = list(itertools.takewhile(bool, lines[start + 1 :]))
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows]
    numbers = [[[int(number) for number in cell.split()] for cell in row[1:7]] for row in cells]
    return [[row[:3] for row in numbers], [row[3:] for row in numbers]]


@pytest.mark.parametrize(("table", "split", "size"), [(0, "rank", 2), (1, "global", 4)])
def test_the_tables_in_the_module_text_are_true(table, split, size):
    found = dealt(DataLoader(Numbers(10), batch_size=size), 2, split=split)
    rows = [
        [*(each.counted for each in deliveries), whole]
        for deliveries, whole in zip(found.rounds, found.global_batches, strict=True)
    ]
    assert rows == documented_tables()[table]
    assert len(rows) == 3


def order_of(samples: int, size: int, drop_last: bool) -> list[int]:
    """The plain order of an epoch of the numbers, as far as it makes batches."""
    return list(range(samples - samples % size if drop_last else samples))


@given(**EVERY, tail=st.sampled_from(["split", "pad", "drop"]), drop_last=st.booleans())
def test_an_epoch_is_cut_into_global_batches_and_what_is_left_out_is_told(samples, count, size, split, tail, drop_last):
    loader = DataLoader(Numbers(samples), batch_size=size, drop_last=drop_last)
    found = dealt(loader, count, split=split, tail=tail)
    whole = size if split == "global" else size * count
    expected = chunks(order_of(samples, size, drop_last), whole)
    if tail == "drop":
        expected = [chunk for chunk in expected if len(chunk) == whole]
    assert found.global_batches == expected
    assert sum(found.left_out) == samples - len(list(itertools.chain(*expected)))


@given(**EVERY, shuffle=st.booleans(), tail=st.sampled_from(["split", "pad"]))
def test_every_sample_counts_exactly_once(samples, count, size, split, shuffle, tail):
    loader = DataLoader(Numbers(samples), batch_size=size, shuffle=shuffle and samples > 0)
    found = dealt(loader, count, seed=1, split=split, tail=tail)
    assert sorted(itertools.chain(*found.global_batches)) == list(range(samples))
    for deliveries in found.rounds:
        for each in deliveries:
            assert each.batch, "every rank has something to compute"
            assert set(each.batch[each.valid :]) <= set(itertools.chain(*(other.counted for other in deliveries)))


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


@given(**EVERY)
def test_padded_batches_have_one_size(samples, count, size, split):
    found = dealt(DataLoader(Numbers(samples), batch_size=size), count, split=split, tail="pad")
    sizes = {len(each.batch) for deliveries in found.rounds for each in deliveries}
    full = -(-size // count) if split == "global" else size
    assert sizes <= {full}
    for pieces in found.pieces:
        assert all(piece.claim.repeated == full - piece.claim.samples for piece in pieces)


@given(**EVERY, drop_last=st.booleans())
def test_a_tail_that_is_an_error_is_one_before_anything_is_loaded(samples, count, size, split, drop_last):
    dataset = Numbers(samples)
    source = IndexedSource(DataLoader(dataset, batch_size=size, drop_last=drop_last), None)
    rule = rule_of(count, split=split, tail="error")
    left = len(order_of(samples, size, drop_last))
    whole = size if split == "global" else size * count
    if left % whole == 0:
        assert len(list(source.begin(rule, lambda samples: None).pieces)) == left // whole
        return
    batches = 1 if split == "global" else count
    with pytest.raises(
        ValueError, match=f"tail='error': {left} samples do not divide into rounds of {batches} batches"
    ):
        source.begin(rule, lambda samples: None)
    assert not dataset.asked
    assert source.next_position() == (0, {"offset": 0}), "the epoch was not spent"


def test_the_message_of_a_tail_names_values_rule_and_way_out():
    loader = DeviceLoader(
        DataLoader(Numbers(10), batch_size=3), tail="error", world=ranks_of([], 2)[0]._never_begun._world
    )
    words = (
        "tail='error': 10 samples do not divide into rounds of 2 batches of 3, one for each of 2 ranks: 4 samples are "
        "left in the last; pass a batch size that divides, or tail='split' (the default), 'drop' or 'pad'"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        next(iter(loader))


def test_a_tail_is_an_error_when_it_comes_where_no_length_is_known():
    loader = DataLoader(Numbers(9), batch_sampler=Bucketed([[0, 1], [2], [3, 4, 5], [6, 7], [8]]))
    first = ranks_of(loader, 2, tail="error")[0]
    found = []
    with pytest.raises(ValueError, match=r"9 samples do not divide into rounds of 2 batches, .*: 1 samples are left"):
        for batch in first:
            found.append(batch.tolist())  # noqa: PERF401 - what came before the error is kept
    assert found == [[0, 1], [3, 4, 5]]


@given(**EVERY, tail=st.sampled_from(["split", "pad", "drop"]), drop_last=st.booleans(), is_fixed=st.booleans())
def test_the_length_is_the_number_of_rounds(samples, count, size, split, tail, drop_last, is_fixed):
    loader = DataLoader(Numbers(samples), batch_size=size, drop_last=drop_last)
    rule = {"split": split, "tail": tail, "fixed_batch_size": is_fixed}
    found = dealt(loader, count, **rule)
    assert {len(pieces) for pieces in found.pieces} == {IndexedSource(loader, None).num_rounds(rule_of(count, **rule))}
    assert sum(found.left_out) == samples - sum(map(len, found.global_batches))


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
    assert sum(found.left_out) == sum(sizes) - sum(map(len, groups))


def chunks_of(sizes: list[int]) -> list[list[int]]:
    bounds = itertools.accumulate(sizes, initial=0)
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


@given(samples=st.integers(1, 40), size=st.integers(1, 5), count=st.integers(1, 4), shuffle=st.booleans())
def test_cutting_at_the_indices_and_cutting_loaded_batches_give_each_rank_the_same(samples, size, count, shuffle):
    loader = DataLoader(Numbers(samples), batch_size=size, shuffle=shuffle)
    loaded = [pieces.batch for pieces in dealt(loader, 1, seed=0).pieces[0]]
    found = dealt(loader, count, seed=0)
    for each, deliveries in zip(rounds(loaded, rule_of(count), size_of), found.rounds, strict=True):
        for rank, delivery in enumerate(deliveries):
            piece = cut(each, rank, 0)
            assert (piece.batch.tolist(), piece.claim.samples) == delivery


@given(samples=st.integers(0, 40), size=st.integers(1, 5), count=st.integers(2, 4), split=EVERY["split"])
def test_the_claims_of_a_round_make_its_whole_and_bear_one_mark(samples, size, count, split):
    found = dealt(DataLoader(Numbers(samples), batch_size=size), count, split=split)
    marks = []
    for pieces in zip(*found.pieces, strict=True):
        assert sum(piece.claim.samples for piece in pieces) == pieces[0].claim.total
        assert len({(piece.claim.total, piece.claim.mark, piece.position["offset"]) for piece in pieces}) == 1
        marks.append(pieces[0].claim.mark)
    assert len(set(marks)) == len(marks)


def test_drop_last_drops_the_tail_instead_of_splitting_it():
    loader = DataLoader(Numbers(14), batch_size=2, drop_last=True)
    explicit = DataLoader(Numbers(14), batch_sampler=BatchSampler(SequentialSampler(range(14)), 2, drop_last=True))
    for each in (loader, explicit):
        assert [take(rank) for rank in ranks_of(each, 4)] == [[([2 * rank, 2 * rank + 1], 2)] for rank in range(4)]
    batches = ParallelLoader(loader, [f"cpu:{index}" for index in range(4)])
    assert [len(list(batches.per_device_loader(f"cpu:{index}"))) for index in range(4)] == [1] * 4 == [len(batches)] * 4


def test_a_tail_is_split_all_the_same_where_that_is_asked_for():
    loaders = ranks_of(DataLoader(Numbers(14), batch_size=2, drop_last=True), 4, tail="split")
    assert [take(rank)[1:] for rank in loaders] == [[([8], 1)], [([9], 1)], [([10, 11], 2)], [([12, 13], 2)]]


def test_the_devices_of_one_process_are_dealt_the_same_as_as_many_ranks():
    for options in ({}, {"split": "global"}, {"tail": "pad"}, {"tail": "drop"}):
        ranks = [take(rank) for rank in ranks_of(DataLoader(Numbers(23), batch_size=3), 3, **options)]
        parallel = ParallelLoader(DataLoader(Numbers(23), batch_size=3), [f"cpu:{k}" for k in range(3)], **options)
        for rank, deliveries in enumerate(ranks):
            iterator = parallel.per_device_loader(f"cpu:{rank}")
            assert [(batch.tolist(), iterator.valid_samples) for batch in iterator] == deliveries


def test_a_fixed_batch_size_ends_on_every_rank_before_the_same_round():
    found = dealt(DataLoader(Numbers(23), batch_size=2), 3, fixed_batch_size=True)
    assert found.global_batches == [list(range(6)), list(range(6, 12)), list(range(12, 18))]


@pytest.mark.parametrize("samples", [12, 13])
def test_a_loader_that_a_distributed_sampler_cuts_is_not_cut_again(samples):
    for rank, plain in enumerate(ranks_of([], 2)):
        world = plain._never_begun._world
        sampler = DistributedSampler(Numbers(samples), num_replicas=2, rank=rank, shuffle=False)
        loader = DeviceLoader(DataLoader(Numbers(samples), batch_size=3, sampler=sampler), world=world)
        own = [number % samples for number in range(rank, samples + samples % 2, 2)]
        assert [each.batch for each in take(loader)] == chunks(own, 3)
        assert len(loader) == len(chunks(own, 3))


def test_a_loader_that_cuts_itself_ends_at_the_first_other_size_when_sizes_are_fixed():
    world = ranks_of([], 2)[1]._never_begun._world
    sampler = DistributedSampler(Numbers(14), num_replicas=2, rank=1, shuffle=False)
    loader = DeviceLoader(DataLoader(Numbers(14), batch_size=3, sampler=sampler), fixed_batch_size=True, world=world)
    assert [len(batch) for batch in loader] == [3, 3]


def test_a_loader_that_is_said_to_be_cut_gives_all_of_it():
    loaders = ranks_of(DataLoader(Numbers(5), batch_size=2), 2, already_sharded=True)
    assert [take(loader) for loader in loaders] == [[([0, 1], 2), ([2, 3], 2), ([4], 1)]] * 2


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("split", ["rank", "global"])
def test_more_ranks_than_samples_are_all_kept_in_step(samples, split):
    found = [take(rank) for rank in ranks_of(DataLoader(Numbers(samples), batch_size=10), 8, split=split)]
    assert {len(deliveries) for deliveries in found} == {1 if samples else 0}
    assert sum(each.valid for deliveries in found for each in deliveries) == samples


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


@pytest.mark.parametrize(("num_replicas", "rank"), [(4, 0), (2, 1)])
def test_a_sampler_that_cuts_for_other_ranks_is_refused(num_replicas, rank):
    sampler = DistributedSampler(Numbers(8), num_replicas=num_replicas, rank=rank)
    loader = DataLoader(Numbers(8), batch_size=2, sampler=sampler)
    with pytest.raises(ValueError, match=f"cuts the data for rank {rank} of {num_replicas}, but this is rank 0 of 1"):
        DeviceLoader(loader)
    assert len(list(DeviceLoader(loader, already_sharded=True))) > 0


def test_each_name_of_a_policy_has_one_and_a_forgotten_one_fails():
    policies = {tail: policy_of(tail) for tail in get_args(Tail)}
    assert len(set(policies.values())) == len(policies)
    assert all(sum(policy) <= 1 for policy in policies.values())
    with pytest.raises(AssertionError, match="wrapped"):
        policy_of("wrapped")


def test_a_split_without_a_rule_fails():
    rule = Rule(2)
    object.__setattr__(rule, "split", "by moonlight")
    with pytest.raises(AssertionError, match="by moonlight"):
        rule.batches  # noqa: B018 - it is asked for
