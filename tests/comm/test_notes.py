"""What ranks of one machine note of what they do, in memory that they share."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.shared_memory import futex
from unisono.comm.shared_memory.mapping import Mapping, map_together
from unisono.comm.shared_memory.notes import Notes

pytestmark = pytest.mark.skipif(not futex.SUPPORTED, reason="ranks share no memory here")


def notes_of(size: int) -> list[Notes]:
    """The notes of ranks that are all in this process, and so need no lock to be alive."""
    mapping = map_together(dist.HashStore(), 0, 1, 4096 * size, timedelta(seconds=10))
    assert mapping is not None

    def seat(rank: int) -> Mapping:
        other = object.__new__(Mapping)
        other.memory, other.rank, other.size = mapping.memory, rank, size
        return other

    return [Notes(seat(rank)) for rank in range(size)]


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4), min_size=2, max_size=3))
def test_the_first_line_that_differs_is_found_by_whoever_reads_both_and_nothing_else(actions):
    notes = notes_of(len(actions))
    for number in range(4):
        for each, its in zip(notes, actions, strict=True):
            if number < len(its):
                each.add(its[number])
    for each, own in zip(notes, actions, strict=True):
        found = each.find_difference()
        differs = any(one != other for its in actions for one, other in zip(own, its, strict=False))
        assert bool(found) == differs
        if differs:
            assert len(set(found.values())) > 1


def test_long_texts_that_differ_behind_the_cut_are_told_apart_and_harm_no_other_note():
    first, second = notes_of(2)
    while not first.is_full:
        for each in (first, second):
            each.add("called " + "x" * 5000 + "1")
        assert first.find_difference() == {}
    first.add("called " + "x" * 5000 + "1")
    second.add("called " + "x" * 5000 + "2")
    found = first.find_difference()
    assert found[0] != found[1]
    assert found[0].startswith("called xxx")
