"""What a loop waited for is divided by its cause, and what it received is counted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from epochs import PATIENCE_S, CodedError, is_awaiting_batch
from flows import Moving, failing, flow
from hypothesis import given
from hypothesis import strategies as st

from unisono.backends.cpu import CpuBackend
from unisono.loaders.pipeline import Stamps
from unisono.loaders.sharding import Claim, Piece
from unisono.timeline import FETCH, Waits


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
        made.pipeline.start(iter([[Piece(b"12345", Claim(2, 4, 0, 1), None)]] * 4))
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
