"""Who gets which sample of a round: the arithmetic against plain oracles."""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import numpy
import pytest
import torch
from dealing import COUNTS, rule_of, size_of
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from unisono import DeviceLoader
from unisono.loading.sharding import Rule, Size, cut, deal, glimpse, measure, rounds


@st.composite
def short_rounds(draw: Any) -> tuple[list[int], int]:
    """The sizes of a round's batches, at most as many as there are ranks, and the number of ranks."""
    count = draw(COUNTS)
    return draw(st.lists(st.integers(1, 12), min_size=1, max_size=count)), count


@given(short_rounds())
def test_ranks_sharing_a_batch_split_it_evenly_and_earlier_ones_get_more(case):
    sizes, count = case
    for batch, shared in itertools.groupby(deal([*map(Size, sizes)], count), key=lambda part: part.batch):
        taken = [part.samples for part in shared]
        plain = [sizes[batch] // len(taken) + (place < sizes[batch] % len(taken)) for place in range(len(taken))]
        assert taken == plain


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


def test_rounds_read_no_further_than_the_round_they_give():
    read = []
    source = (read.append(number) or [number] for number in range(100))
    found = rounds(source, rule_of(3), size_of)
    next(found)
    assert read == [0, 1, 2]


def test_what_a_fixed_size_leaves_out_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "unisono"):
        list(rounds([[1, 2], [3, 4], [5]], rule_of(2, fixed_batch_size=True), size_of))
    assert "fixed_batch_size=True ends the epoch at sample 4: the next round has batches of [1] samples" in caplog.text
    assert "and not 2 of size 2" in caplog.text


def test_a_loaded_batch_is_padded_with_its_own_samples():
    batches = [torch.arange(4), torch.arange(4, 8), torch.arange(8, 11)]
    *_, last = rounds(batches, rule_of(2, tail="pad"), lambda batch, is_cut: measure(batch, 0, None, is_cut))
    pieces = [cut(last, rank, 0) for rank in range(2)]
    assert [piece.batch.tolist() for piece in pieces] == [[8, 9, 8, 9], [10, 10, 10, 10]]
    assert [(piece.claim.samples, piece.claim.repeated) for piece in pieces] == [(2, 2), (1, 3)]


@pytest.mark.parametrize(("name", "value"), [("split", "devices"), ("tail", "cut"), ("tail", None), ("split", 2)])
def test_an_unknown_split_or_tail_is_refused_with_the_choices(name, value):
    choices = {"split": "rank, global", "tail": "split, drop, pad"}[name]
    words = f"{name}={value!r} does not exist; choose one of {choices}"
    with pytest.raises(ValueError, match=re.escape(words)):
        Rule(**{name: value})
    if value is not None:
        with pytest.raises(ValueError, match=re.escape(words)):
            DeviceLoader([], **{name: value})


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
