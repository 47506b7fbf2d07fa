"""Which batch tensors come from, however they were drawn, and what is told where nothing can be known."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from unisono import DeviceLoader
from unisono.batches.deliveries import Batch, Deliveries, Loop
from unisono.batches.storages import StorageMap
from unisono.world import current_world


@pytest.fixture
def deliveries() -> Deliveries:
    return Deliveries()


def draw(deliveries: Deliveries, loop: Loop, samples: int = 2, total: int = 4) -> tuple[torch.Tensor, Batch]:
    tensor = torch.zeros(samples, 3)
    return tensor, deliveries.add(loop, [tensor], samples, total)


def meant(deliveries: Deliveries, values: torch.Tensor | tuple[object, ...]) -> list[Batch | None]:
    """The batches that may be meant; a pass uses the first."""
    rows = len(values) if isinstance(values, torch.Tensor) else None
    batches: list[Batch | None] = [*deliveries.find(values)] or deliveries.computed_from(rows)
    if batches[0] is not None:
        deliveries.use(batches[0])
    return batches


def test_a_batch_is_known_by_its_tensors_whenever_they_are_used(deliveries):
    loop = deliveries.begin()
    drawn = [draw(deliveries, loop) for _ in range(5)]
    deliveries.end(loop)
    for place in (3, 0, 4, 4, 1, 2, 0):
        tensor, batch = drawn[place]
        assert meant(deliveries, (tensor[1:], "text", None)) == [batch]


def test_tensors_of_two_loaders_are_of_two_batches(deliveries):
    (first, one), (second, other) = (draw(deliveries, deliveries.begin()) for _ in range(2))
    assert deliveries.find((first, second)) == [other, one]


def test_a_computed_tensor_with_matching_rows_belongs_to_the_last_batch(deliveries):
    loop = deliveries.begin()
    for _ in range(5):
        tensor, batch = draw(deliveries, loop)
        assert meant(deliveries, tensor + 1) == [batch]
        assert meant(deliveries, tensor - 1) == [batch], "another view of it"
        assert meant(deliveries, torch.randn(2, 3)) == [batch], "noise of its rows"
        assert meant(deliveries, torch.randn(3, 3)) == [None, loop.kinds[2, 4, 2]], "may be no loader's"


def test_only_the_latest_batch_asks_the_loader_whether_it_is_the_last(deliveries):
    asked = []

    def ends_here() -> bool:
        asked.append(True)
        return False

    loop = deliveries.begin(ends_here)
    _, one = draw(deliveries, loop)
    _, two = draw(deliveries, loop)
    assert (one.is_last(), asked) == (False, [])
    assert (two.is_last(), asked) == (False, [True])
    deliveries.end(loop)
    assert [each.is_last() for each in (one, two)] == [False, False], "it was left"
    deliveries.end(loop, is_exhausted=True)
    assert [each.is_last() for each in (one, two)] == [False, True]


def test_a_tensor_that_many_batches_share_makes_none_of_them_doubtful(deliveries):
    mask, loop = torch.ones(4), deliveries.begin()
    tensors = [torch.zeros(4, 3) for _ in range(3)]
    batches = [deliveries.add(loop, (tensor, mask), 4, 8) for tensor in tensors]
    for place in (2, 0, 1):
        assert meant(deliveries, (tensors[place], mask)) == [batches[place]]


def test_a_loop_collected_while_another_begins_is_not_mistaken_for_it(deliveries):
    class Left:
        """Of a cycle, as what holds an iterator's frame is: ended when the collector comes."""

        def __init__(self, loop):
            self.loop, self.own = loop, self

        def __del__(self):
            deliveries.end(self.loop)

    left = deliveries.begin()
    deliveries.add(left, [torch.ones(2)], 2, 2)
    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    Left(left)
    gc.set_threshold(1)  # at the next allocation, which is that of the loop that begins
    try:
        gc.enable()
        begun = deliveries.begin()
    finally:
        gc.set_threshold(*threshold)
    assert begun is not left
    assert not left.is_open
    assert begun.num_batches == 0
    assert deliveries.recent() == [left, begun]


# Storages: a tensor is known by its memory: its views are, its copies are not, and nothing is kept alive.


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


def test_a_loop_keeps_nothing_of_the_batches_before_the_last():
    held = current_world().state.deliveries._by_memory
    for batch in DeviceLoader([torch.zeros(4, 3) + number for number in range(5)], "cpu"):
        del batch
    before = len(held)
    loader = DeviceLoader(DataLoader(TensorDataset(torch.zeros(400, 3), torch.zeros(400)), 4), "cpu")
    for _ in loader:
        assert len(held) <= before + 6


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


def test_a_slice_within_one_tensor_beats_an_overlap_with_another(known):
    whole = torch.zeros(10)
    known.note(whole[:8], "first")
    known.note(whole[6:], "second")
    assert [known.find(each) for each in (whole[2:8], whole[5:9], whole[6:8])] == ["first", "second", "second"]
