"""The stages behind a loader: order, bounds of a lane, ends and errors at their place."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from epochs import PATIENCE_S, CodedError
from flows import Moving, flow
from interrupts import interrupting

from unisono.devices.cpu import CpuBackend
from unisono.errors import ClosedError
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.pipeline import Lane, Pipeline
from unisono.report.timeline import Timeline


def test_two_iterators_of_one_device_share_its_batches():
    with flow(Moving()) as made:
        (first,) = made.start(range(200))
        second = made.iterator(made.lane)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(list, [first, second]))
    assert sorted(itertools.chain(*found)) == list(range(200))
    assert all(each == sorted(each) for each in found)


@pytest.mark.parametrize(("loaded", "moved"), [(1, 1), (4, 2), (9, 4)])
def test_each_lane_is_bounded(loaded, moved):
    backend = Moving()
    with flow(backend, prefetch=loaded) as made:
        (iterator,) = made.start(itertools.count())
        ahead = moved + loaded + 2  # the transfer may hold one that waits for its place, and so may the reader
        made.wait_given(ahead)
        made.wait_full()
        assert (made.given, sorted(backend.done)) == (ahead, list(range(moved)))
        for taken in range(30):
            assert next(iterator) == taken
            assert made.given <= taken + 1 + ahead
            assert len(backend.done) <= taken + 1 + moved


def test_a_lane_is_refilled_in_one_go_when_half_of_it_is_empty():
    with flow(CpuBackend(), prefetch=5) as made:
        (iterator,) = made.start(itertools.count())
        ahead = 5 + 2 + 1  # that wait, and one more is in the reader's hands
        made.wait_given(ahead + 1)
        made.wait_full()
        for _ in range(3):
            next(iterator)
            assert made.given == ahead + 1, "the reader sleeps"
        next(iterator)
        made.wait_given(ahead + 1 + 4)
        made.wait_full()
        assert made.given == ahead + 1 + 4


@pytest.mark.parametrize("backend", [Moving, CpuBackend])
@pytest.mark.parametrize("lanes", [2, 3])
def test_one_thread_may_drain_one_lane_after_another_whatever_the_bounds(backend, lanes):
    with flow(backend(), lanes=lanes, prefetch=1) as made:
        iterators = made.start(bytes([number]) * 10 for number in range(60))
        for place, iterator in enumerate(iterators):
            assert [batch[0] for batch in iterator] == list(range(place, 60, lanes))


@pytest.mark.parametrize("backend", [Moving, CpuBackend])
def test_a_lane_whose_batch_could_not_be_moved_does_not_hold_up_the_others(backend, monkeypatch):
    def to_device(self: Any, batch: int, device: torch.device) -> tuple[Any, Any]:
        if batch == 0:
            raise CodedError(batch)
        return batch, None

    monkeypatch.setattr(backend, "to_device", to_device)
    with flow(backend(), lanes=2, prefetch=1, may_overflow=False) as made:
        failed, other = made.start(range(200))
        assert list(other) == list(range(1, 200, 2))
        with pytest.raises(CodedError):
            next(failed)


@pytest.mark.parametrize("fault", ["activate", "wait_ready"])
def test_an_error_on_either_side_of_a_move_reaches_the_loop(fault):
    class Faulty(Moving):
        pass

    def fail(*_: Any) -> None:
        raise CodedError(1)

    setattr(Faulty, fault, fail)
    with flow(Faulty()) as made:
        (iterator,) = made.start(range(10))
        with pytest.raises(CodedError):
            next(iterator)


@pytest.mark.parametrize(("lanes", "is_bound"), [(1, True), (2, False)])
def test_a_dataset_runs_on_the_device_of_the_only_loop(lanes, is_bound):
    class Noting(Moving):
        def activate(self, device: torch.device) -> None:
            where[threading.current_thread().name] = device

    where: dict[str, torch.device] = {}
    with flow(Noting(), lanes=lanes) as made:
        assert [each for iterator in made.start(range(2)) for each in iterator] == [0, 1]
        devices = [lane.device for lane in made.pipeline.lanes]
    assert where.pop("unisono-reader", None) == (devices[0] if is_bound else None)
    assert [where[name] for name in sorted(where)] == devices


def test_closing_wakes_the_transfer_and_the_reader():
    backend = Moving()
    with flow(backend, prefetch=1) as made:
        (iterator,) = made.start(itertools.count())
        made.wait_full()
        made.pipeline.stop()
        assert made.pipeline.join(PATIENCE_S)
        with pytest.raises(ClosedError):
            next(iterator)


def test_a_batch_that_was_delivered_is_the_loops_alone():
    class Thing: ...

    class Background(CpuBackend):
        moves_in_background = True

    for backend in (Background(), CpuBackend()):
        with flow(backend) as made:
            gc.disable()
            try:
                (iterator,) = made.start(Thing() for _ in range(3))
                batch = next(iterator)
                gone = weakref.ref(batch)
                made.wait_given(3)
                assert made.pipeline.join(PATIENCE_S)
                del batch
                assert gone() is None
            finally:
                gc.enable()


def test_with_nothing_to_move_the_reader_hands_over_without_a_transfer():
    threads = set()

    class Here(CpuBackend):
        def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
            threads.add(threading.current_thread().name)
            return super().to_device(batch, device)

    with flow(Here(), lanes=2) as made:
        iterators = made.start(range(20))
        assert [thread.name for thread in made.pipeline.threads] == ["unisono-reader"]
        assert [list(each) for each in iterators] == [list(range(0, 20, 2)), list(range(1, 20, 2))]
    assert threads == {"unisono-reader"}


def test_an_interrupt_while_threads_start_leaves_no_thread_or_complaint():
    at, is_reached = 0, True
    while is_reached:
        pipeline = Pipeline(2)
        pipeline.lanes.append(Lane(pipeline, torch.device("cpu"), Moving(), Timeline()))
        begin = partial(pipeline.start, iter([]))
        is_reached = interrupting(at, ("threading.py", "comm/thread_start.py", "loading/pipeline.py"), begin)
        pipeline.stop()
        assert pipeline.join(PATIENCE_S)
        at += 1
    assert at > 10


def test_an_iterator_left_half_made_by_an_interrupt_is_dropped_silently(monkeypatch):
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    iterator = DeviceIterator.__new__(DeviceIterator)
    del iterator
    assert not raised
