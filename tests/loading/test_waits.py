"""What a loop waits for is told by cause, and its phases are those that it is in."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from epochs import PATIENCE_S, CodedError, is_awaiting_batch
from flows import Moving, failing, flow
from hypothesis import given
from hypothesis import strategies as st

from unisono import DeviceLoader
from unisono.devices.cpu import CpuBackend
from unisono.loading.pipeline import Stamps
from unisono.loading.sharding import Claim, Piece
from unisono.report.timeline import COMPUTE, FETCH, Waits
from unisono.world import World, solo_world


def slow_twin(stamps: Stamps, began: int, ended: int) -> Waits:
    """What each nanosecond was waited for."""
    causes = []
    for now in range(began, ended):
        if now < stamps.asked_at or stamps.loaded_at <= now < stamps.sent_at:
            causes.append("peers")
        else:
            causes.append("source" if now < stamps.loaded_at else "transfer")
    return Waits(*(causes.count(cause) for cause in Waits._fields))


@given(st.lists(st.integers(0, 30), min_size=3, max_size=3), st.integers(0, 30), st.integers(0, 30))
def test_a_wait_is_divided_by_cause_without_a_rest(stamps, began, length):
    found = Stamps(*sorted(stamps)).divide(began, began + length)
    assert found == slow_twin(Stamps(*sorted(stamps)), began, began + length)
    assert sum(found) == length


@pytest.mark.parametrize("backend", [Moving, CpuBackend])
@pytest.mark.parametrize("source", [lambda: iter(range(50)), lambda: failing(50)], ids=["an end", "an error"])
def test_what_was_waited_for_adds_up_to_the_time_of_fetching(backend, source):
    with flow(backend(), lanes=2) as made:
        for iterator in made.start(source()):
            with pytest.raises((CodedError, StopIteration)):
                while True:
                    next(iterator)
        track = made.worlds[0].timeline.loop()
        waits = [track.counts[f"wait_{cause}_ns"] for cause in Waits._fields]
        assert sum(waits) == track.totals[FETCH]


def test_time_until_a_batch_could_be_used_is_the_transfers():
    backend = Moving(held=[0])
    with flow(backend) as made:
        (iterator,) = made.start([0])
        backend.wait_until(lambda: backend.begun == [0])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: (next(iterator), made.worlds[0].timeline.loop().counts)[1])
            while not is_awaiting_batch(made.lane):
                threading.Event().wait(0.001)
            threading.Event().wait(0.02)
            backend.let(0)
            counts = waiting.result(PATIENCE_S)
    assert counts["wait_transfer_ns"] >= 20e6
    assert counts["wait_source_ns"] == counts["wait_peers_ns"] == 0


@pytest.mark.parametrize("backend", [Moving, CpuBackend])
def test_bytes_repeated_samples_and_the_depth_of_the_queue_are_counted(backend):
    with flow(backend(), prefetch=4) as made:
        made.pipeline.start(iter([[Piece(torch.zeros(5, dtype=torch.uint8), Claim(2, 4, 0, 1), None)]] * 4))
        while made.lane.sent < 4:
            threading.Event().wait(0.001)
        assert len(list(made.iterator(made.lane))) == 4
        counts = made.worlds[0].timeline.loop().counts
    assert {name: counts[name] for name in ("samples", "batches", "repeated", "bytes", "queued")} == {
        "samples": 8,
        "batches": 4,
        "repeated": 4,
        "bytes": 20,
        "queued": 4 + 3 + 2 + 1,
    }


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


def test_a_loop_that_is_dropped_during_the_next_one_does_not_end_that():
    world = solo_world()
    old = iter(DeviceLoader(range(3), world=world))
    next(old)
    for _ in DeviceLoader(range(3), world=world):
        old = None
        assert world.timeline.loop().switch(COMPUTE) == COMPUTE
