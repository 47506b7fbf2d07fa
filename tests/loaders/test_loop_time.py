"""The time of a loop: it computes between its batches, and is outside after its end."""

from __future__ import annotations

import gc

import pytest

from unisono import DeviceLoader
from unisono.timeline import COMPUTE, FETCH
from unisono.world import World, solo_world


def phase_of(world: World) -> str | None:
    """The phase in which the calling thread's loop is; it is outside of any afterwards."""
    return world.timeline.loop().switch(None)


def test_a_loop_computes_between_its_batches_and_is_outside_after_its_end():
    world = solo_world()
    for _ in DeviceLoader(range(3), world=world):
        track = world.timeline.loop()
        track.switch(before := track.switch(None))
        assert before == COMPUTE
    assert phase_of(world) is None
    assert (track.counts["samples"], track.counts["batches"]) == (3, 3)
    assert {span.phase for span in track.spans} == {FETCH, COMPUTE}


def test_a_loop_that_is_left_early_is_over():
    world = solo_world()
    for _ in DeviceLoader(range(3), world=world):
        break
    assert phase_of(world) is None
    with pytest.raises(ZeroDivisionError):
        for number in DeviceLoader(range(3), world=world):
            1 / number
    gc.collect()
    assert phase_of(world) is None
    iterator = iter(DeviceLoader(range(3), world=world))
    next(iterator)
    iterator.close()
    assert phase_of(world) is None


def test_a_loop_within_a_loop_gives_the_time_back_to_the_outer_one():
    world = solo_world()
    for _ in DeviceLoader(range(2), world=world):
        for _ in DeviceLoader(range(2), world=world):
            pass
        assert world.timeline.loop().switch(COMPUTE) == COMPUTE
        for _ in DeviceLoader(range(2), world=world):
            break
        assert world.timeline.loop().switch(COMPUTE) == COMPUTE
    assert phase_of(world) is None


@pytest.mark.parametrize(("first", "second"), [(2, 5), (5, 2), (3, 3)])
def test_two_loaders_side_by_side_are_one_loop(first, second):
    world = solo_world()
    pairs = zip(DeviceLoader(range(first), world=world), DeviceLoader(range(second), world=world), strict=False)
    assert len(list(pairs)) == min(first, second)
    del pairs
    assert phase_of(world) is None


def test_a_loop_that_is_dropped_during_the_next_one_does_not_end_that():
    world = solo_world()
    old = iter(DeviceLoader(range(3), world=world))
    next(old)
    for _ in DeviceLoader(range(3), world=world):
        old = None
        assert world.timeline.loop().switch(COMPUTE) == COMPUTE
