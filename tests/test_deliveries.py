"""Which batch tensors come from, however they were drawn, and what is told where nothing can be known."""

from __future__ import annotations

import gc

import pytest
import torch

from unisono.deliveries import Batch, Deliveries, Loop


@pytest.fixture
def deliveries() -> Deliveries:
    return Deliveries()


def draw(deliveries: Deliveries, loop: Loop, samples: int = 2, total: int = 4) -> tuple[torch.Tensor, Batch]:
    tensor = torch.zeros(samples, 3)
    return tensor, deliveries.add(loop, {"inputs": [tensor]}, samples, total)


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


def test_what_was_computed_is_of_the_batch_that_was_delivered_last_if_it_has_its_rows(deliveries):
    loop = deliveries.begin()
    for _ in range(5):
        tensor, batch = draw(deliveries, loop)
        assert meant(deliveries, tensor + 1) == [batch]
        assert meant(deliveries, tensor - 1) == [batch], "another view of it"
        assert meant(deliveries, torch.randn(2, 3)) == [batch], "noise of its rows"
        assert meant(deliveries, torch.randn(3, 3)) == [None, loop.kinds[2, 4, 2]], "may be no loader's"


def test_the_last_batch_of_a_loop_is_told_by_the_loader_and_no_earlier_one_asks(deliveries):
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


def test_a_loop_that_the_garbage_collector_ends_while_another_begins_is_not_taken_for_it(deliveries):
    class Left:
        """Of a cycle, as what holds an iterator's frame is: ended when the collector comes."""

        def __init__(self, loop):
            self.loop, self.own = loop, self

        def __del__(self):
            deliveries.end(self.loop)

    left = deliveries.begin()
    deliveries.add(left, torch.ones(2), 2, 2)
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
