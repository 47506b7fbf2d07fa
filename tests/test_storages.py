"""A tensor is known by its memory: its views are, its copies are not, and nothing is kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.storages import StorageMap


@pytest.fixture
def known() -> StorageMap[str]:
    return StorageMap()


def test_views_are_known_and_copies_are_not(known):
    tensor = torch.arange(12.0).reshape(3, 4)
    known.note(tensor, "batch")
    for view in (tensor, tensor[1:], tensor.T, tensor.detach(), tensor.view(-1)[5], tensor.float(), tensor[:, ::2]):
        assert known.find(view) == "batch"
    for other in (tensor.clone(), tensor + 0, tensor.double(), torch.zeros(3)):
        assert known.find(other) is None


def test_nothing_is_kept_alive_and_what_is_gone_is_forgotten(known):
    for number in range(10_000):
        known.note(torch.zeros(3), str(number))
    gc.collect()
    assert len(known) < 200
    tensor = torch.zeros(3)
    known.note(tensor, "last")
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None


def test_notes_on_many_tensors_give_the_garbage_collector_nothing_to_do(known):
    tensors = [torch.zeros(2) for _ in range(1000)]
    assert all(tensor.untyped_storage().nbytes() for tensor in tensors)  # torch's own object for a storage stays
    before = len(gc.get_objects())
    for tensor in tensors:
        known.note(tensor, "batch")
    assert len(gc.get_objects()) - before < 100
    assert [known.find(each) for each in tensors] == ["batch"] * 1000


def test_a_new_memory_at_an_old_address_is_another_one(known):
    for _ in range(100):
        tensor = torch.zeros(7)
        assert known.find(tensor) is None
        known.note(tensor, "old")


def test_what_has_no_memory_is_not_known(known):
    for tensor in (torch.zeros(0, 3), torch.eye(3).to_sparse()):
        known.note(tensor, "nothing")
        assert known.find(tensor) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=8), st.integers(0, 39))
def test_the_last_note_on_a_byte_is_what_is_found(stretches, at):
    known: StorageMap[int] = StorageMap()
    whole = torch.zeros(40)
    for number, (start, length) in enumerate(stretches):
        known.note(whole[start : start + length], number)
    covering = [number for number, (start, length) in enumerate(stretches) if start <= at < min(start + length, 40)]
    assert known.find(whole[at]) == (covering[-1] if covering else None)


def test_a_part_whose_value_is_kept_stays_known_where_the_whole_is_noted():
    known: StorageMap[str] = StorageMap(lambda value: value == "kept")
    whole = torch.zeros(10)
    for part, value in ((whole[:4], "kept"), (whole[4:8], "gone")):
        assert known.note(part, value) is None
    assert known.note(whole, "whole") is None
    assert [known.find(each) for each in (whole[:4], whole[4:8], whole[1:3], whole)] == ["kept", *["whole"] * 3]
    assert known.note(whole, "whole again") == "whole"


def test_a_tensor_that_lies_in_one_is_not_taken_for_one_that_it_only_overlaps(known):
    whole = torch.zeros(10)
    known.note(whole[:8], "first")
    known.note(whole[6:], "second")
    assert [known.find(each) for each in (whole[2:8], whole[5:9], whole[6:8])] == ["first", "second", "second"]
