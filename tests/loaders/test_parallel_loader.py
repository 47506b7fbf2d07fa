"""Batches ready on the device: who gets which, what errors and early ends do, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import os
import pickle
import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import psutil
import pytest
import torch
import warm_scripts
from batches import CONTAINERS, Sample, same
from epochs import (
    PATIENCE_S,
    CodedError,
    Killed,
    Numbers,
    is_awaiting_batch,
    is_awaiting_room,
    join_own_threads,
    loader_workers,
    own_threads,
)
from faults import until
from hypothesis import given
from hypothesis import strategies as st
from modes import FAMILY, PROCESSES_2, devices, in_main_memory
from torch.utils.data import DataLoader, IterableDataset

from unisono import DeviceLoader, ParallelLoader
from unisono.backends import get_backend
from unisono.errors import ClosedError
from unisono.timeline import COMPUTE, FETCH
from unisono.tree import take
from unisono.world import World, solo_world, thread_worlds

MOST = 4 if FAMILY == "cpu" else get_backend(FAMILY).device_count()


def worlds(count: int) -> list[World]:
    return thread_worlds([*map(torch.device, devices(count))])


def rounds_of(loader: Any, count: int, **options: Any) -> list[list[tuple[Any, int]]]:
    """Each device's (batch, valid_samples), the devices drained one after another; in main memory."""
    fetched = (lambda batch: batch) if FAMILY == "cpu" else in_main_memory
    with ParallelLoader(loader, devices(count), **options) as parallel:
        iterators = [parallel.per_device_loader(device) for device in devices(count)]
        return [[(fetched(batch), iterator.valid_samples) for batch in iterator] for iterator in iterators]


def batches_of(loader: Any, count: int, **options: Any) -> list[list[Any]]:
    return [[batch for batch, _ in each] for each in rounds_of(loader, count, **options)]


class Paced:
    """An endless source that gives batch k only after `let(k)`, and says what it has given."""

    def __init__(self, free: int = 0) -> None:
        self.given: list[int] = []
        self._free = threading.Semaphore(free)
        self._given = threading.Semaphore(0)

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self._free.acquire()
            self.given.append(number)
            self._given.release()
            yield number

    def let(self, count: int = 1) -> None:
        self._free.release(count)

    def wait_given(self, count: int) -> None:
        while len(self.given) < count:
            assert self._given.acquire(timeout=PATIENCE_S)


class Stream(IterableDataset):
    def __init__(self, count: int, broken: int = -1) -> None:
        self.count, self.broken = count, broken

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.broken:
                raise CodedError(number)
            yield number


# Who gets which batch.


@pytest.mark.any_family
@pytest.mark.parametrize("count", [1, 2, 3])
def test_batch_i_goes_to_device_i_modulo_n_and_comes_out_plain(count):
    batches = [object() for _ in range(4 * count)]
    assert batches_of(batches, count) == [batches[place::count] for place in range(count)]


@pytest.mark.any_family
@given(
    sizes=st.lists(st.integers(1, 5), max_size=12),
    count=st.integers(1, MOST),
    dim=st.sampled_from([0, 1, -1]),
)
def test_the_tail_is_split_and_nothing_is_lost(sizes, count, dim):
    def batch(start: int, stop: int) -> torch.Tensor:
        row = torch.arange(start, stop)
        return row if dim == 0 else row.expand(3, -1)

    bounds = list(itertools.accumulate(sizes, initial=0))
    batches = [batch(*pair) for pair in itertools.pairwise(bounds)]
    delivered = rounds_of(batches, count, batch_dim=dim)
    assert {len(each) for each in delivered} == {-(-len(sizes) // count)}
    in_order = [take(*pair[:1], 0, pair[1], dim) for round_ in zip(*delivered, strict=True) for pair in round_]
    found = torch.cat(in_order, dim) if in_order else batch(0, 0)
    assert torch.equal(found, batch(0, sum(sizes)))


def test_a_device_for_which_no_sample_is_left_repeats_one_that_does_not_count():
    last = torch.tensor([7])
    delivered = [each[-1] for each in rounds_of([torch.tensor([1]), torch.tensor([2]), torch.tensor([3]), last], 3)]
    assert delivered == [(last, 1), (last, 0), (last, 0)]


@pytest.mark.any_family
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_batch_keeps_its_containers(name):
    make, look = CONTAINERS[name]
    batch = make()
    (found,) = batches_of([batch], 1)[0]
    assert type(found) is type(batch)
    assert same(look(found), look(batch))


@pytest.mark.parametrize("batch", [None, 0, "", [], (), {}, False, "text", 3.5, b"bytes"], ids=repr)
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_may_be_anything(batch, count):
    assert rounds_of([batch] * 4, count) == [[(batch, None)] * (4 // count)] * count
    assert rounds_of([batch] * 3, 2) == [[(batch, None)] * 2, [(batch, None), (batch, 0)]]


def test_what_holds_no_tensor_passes_through_untouched():
    array = numpy.arange(3)
    batch = {"array": array, "name": "a", "nothing": None, "number": 1, "object": object()}
    (found,) = batches_of([batch], 1)[0]
    assert found is batch


def test_a_tail_of_mixed_structure_is_split_where_it_has_samples():
    tail = Sample(
        torch.arange(4), "whole", {"array": numpy.arange(4), "names": list("abcd"), "scale": torch.tensor(2.0)}
    )
    first, second = (each[0] for each in batches_of([tail], 2))
    assert (first.image.tolist(), second.image.tolist()) == ([0, 1], [2, 3])
    assert (first.extra["array"].tolist(), second.extra["array"].tolist()) == ([0, 1], [2, 3])
    assert (first.extra["names"], second.extra["names"]) == (["a", "b"], ["c", "d"])
    assert first.label == second.label == "whole"
    assert torch.equal(first.extra["scale"], second.extra["scale"])


def test_a_tail_that_cannot_be_cut_with_certainty_is_taken_whole_by_one_and_only_repeated_by_the_others():
    boxes = (torch.arange(2), [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.ones(2, 4)}])
    assert [[samples for _, samples in lane] for lane in rounds_of([boxes], 3)] == [[2], [0], [0]]
    assert all(lane[0][0] is boxes for lane in rounds_of([boxes], 3))


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda: [1, 2, 3, 4], id="list"),
        pytest.param(lambda: (1, 2, 3, 4), id="tuple"),
        pytest.param(lambda: iter([1, 2, 3, 4]), id="iterator"),
        pytest.param(lambda: (number for number in [1, 2, 3, 4]), id="generator"),
        pytest.param(lambda: {1: "a", 2: "b", 3: "c", 4: "d"}.keys(), id="keys"),
        pytest.param(lambda: DataLoader(Numbers(5), batch_size=None, sampler=[1, 2, 3, 4]), id="no batches"),
        pytest.param(lambda: DataLoader(Stream(5), batch_size=None, collate_fn=lambda n: n or 4), id="stream"),
    ],
)
def test_any_iterable_is_a_loader(source):
    found = batches_of(source(), 2)
    assert sorted(itertools.chain(*found))[:4] == [1, 2, 3, 4]
    assert len(found[0]) == len(found[1])


@pytest.mark.parametrize(
    "loader", [[], iter([]), DataLoader([]), DataLoader(Stream(0))], ids=["list", "iterator", "map-style", "stream"]
)
@pytest.mark.parametrize("count", [1, 3])
def test_an_empty_loader_gives_every_device_nothing(loader, count):
    assert batches_of(loader, count) == [[]] * count


def test_the_length_is_the_number_of_rounds():
    for batches, count in itertools.product(range(7), range(1, 4)):
        parallel = ParallelLoader([0] * batches, devices(count))
        assert len(parallel) == len(parallel.per_device_loader("cpu:1" if count > 1 else "cpu")) == -(-batches // count)
        assert len(list(parallel.per_device_loader("cpu:0"))) == len(parallel)


def test_a_loader_without_length_has_none_but_is_iterated():
    parallel = ParallelLoader(iter(range(3)), ["cpu"])
    iterator = parallel.per_device_loader("cpu")
    for each in (parallel, iterator, DeviceLoader(iter([]))):
        with pytest.raises(TypeError, match="has no len"):
            len(each)
    assert list(iterator) == [0, 1, 2]


def test_a_fixed_batch_size_ends_before_the_first_round_that_differs(caplog):
    sizes = [4, 4, 4, 4, 3, 4, 4, 4]
    with caplog.at_level(logging.WARNING, "unisono"):
        found = batches_of([torch.zeros(size) for size in sizes], 2, fixed_batch_size=True)
    assert [[len(batch) for batch in each] for each in found] == [[4, 4], [4, 4]]
    assert "the next round has batches of [3, 4] samples, and not 2 of size 4" in caplog.text


def test_an_exhausted_iterator_stays_so():
    parallel = ParallelLoader([1, 2], ["cpu"])
    iterator = parallel.per_device_loader("cpu")
    assert list(iterator) == [1, 2]
    assert list(iterator) == list(parallel.per_device_loader("cpu")) == []


def test_two_iterators_of_one_device_share_its_batches():
    parallel = ParallelLoader(range(4), ["cpu"])
    first, second = parallel.per_device_loader("cpu"), parallel.per_device_loader("cpu:0")
    assert [next(first), next(second), next(first), next(second)] == [0, 1, 2, 3]


def test_an_iterator_keeps_its_loader_alive():
    assert list(ParallelLoader(range(50), ["cpu"]).per_device_loader("cpu")) == list(range(50))


def epoch_of(batches: list[list[torch.Tensor]]) -> list[int]:
    return torch.cat([batch for round_ in zip(*batches, strict=True) for batch in round_]).tolist()


def test_the_passes_of_one_parallel_loader_are_the_epochs_of_one_device_loader():
    def source() -> DataLoader:
        return DataLoader(Numbers(20), batch_size=2, shuffle=True)

    parallel = ParallelLoader(source(), devices(2))
    passes = [parallel, parallel.again(), parallel.again()]
    found = [epoch_of([list(each.per_device_loader(device)) for device in devices(2)]) for each in passes]
    loader = DeviceLoader(source())
    assert found == [epoch_of([list(loader)]) for _ in range(3)]
    assert len({tuple(order) for order in found}) == 3


# When it comes.


def test_the_first_batch_arrives_when_one_was_produced():
    source = Paced(free=1)
    with ParallelLoader(source, ["cpu"]) as parallel:
        assert next(parallel.per_device_loader("cpu")) == 0
        assert source.given == [0]
        source.let()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_source_that_waits_for_the_round_before_to_be_consumed_goes_on(count):
    source = Paced(free=count)
    with ParallelLoader(source, devices(count)) as parallel:
        iterators = [parallel.per_device_loader(device) for device in devices(count)]
        for round_number in range(20):
            found = [next(iterator) for iterator in iterators]
            assert found == list(range(round_number * count, (round_number + 1) * count))
            source.let(count)


@pytest.mark.parametrize(("loaded", "moved", "count"), [(1, 1, 1), (8, 4, 1), (3, 1, 2)])
def test_no_more_is_prefetched_than_allowed(loaded, moved, count):
    # Beside what waits in the queues, the reader and each transfer hold one round in their hands.
    bound = count * (loaded + moved + 2)
    consumed = 0
    overshoot: list[tuple[int, int]] = []

    class Watching(Paced):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                if number >= bound + consumed:
                    overshoot.append((number, consumed))
                yield number

    source = Watching(free=10_000)
    with ParallelLoader(source, devices(count), prefetch=loaded) as parallel:
        iterators = [parallel.per_device_loader(device) for device in devices(count)]
        source.wait_given(bound)
        for _ in range(50):
            consumed += count
            for iterator in iterators:
                next(iterator)
        source.wait_given(bound + consumed - count * (loaded + moved) // 2)
    assert not overshoot


@pytest.mark.any_family
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("prefetch", [8, 1])
def test_one_thread_may_drain_one_device_after_another(count, prefetch):
    found = batches_of(range(200 * count), count, prefetch=prefetch)
    assert found == [list(range(place, 200 * count, count)) for place in range(count)]


@pytest.mark.any_family
def test_a_replica_that_closes_its_iterator_does_not_starve_the_others():
    with ParallelLoader(range(400), devices(2), prefetch=1, world=solo_world(), loops=worlds(2)) as parallel:
        leaving, staying = [parallel.per_device_loader(device) for device in devices(2)]
        assert next(leaving) == 0
        with ThreadPoolExecutor(1) as stayer:
            stayed = stayer.submit(list, staying)
            # The reader waits for room in the lane of the one, and the other for the reader.
            full, empty = parallel._pipeline.lanes
            until(lambda: is_awaiting_room(full.entry) and is_awaiting_batch(empty))
            leaving.close()
            assert stayed.result(PATIENCE_S) == list(range(1, 400, 2))


@pytest.mark.any_family
def test_what_waits_for_a_dropped_iterator_is_there_for_the_next():
    with ParallelLoader(range(10), devices(2)) as parallel:
        first, second = devices(2)
        assert next(parallel.per_device_loader(first)) == 0
        assert list(parallel.per_device_loader(second)) == [1, 3, 5, 7, 9]
        assert list(parallel.per_device_loader(first)) == [2, 4, 6, 8]


def test_threads_that_ask_at_once_start_one_pass():
    for _ in range(50):
        together = threading.Barrier(2)

        def drain(device: str, parallel: ParallelLoader, together: threading.Barrier) -> list[int]:
            together.wait()
            return list(parallel.per_device_loader(device))

        parallel = ParallelLoader(range(6), devices(2))
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(drain, devices(2), [parallel] * 2, [together] * 2))
        assert found == [[0, 2, 4], [1, 3, 5]]


# Errors.


class Failing(Numbers):
    """Sample 21 cannot be loaded."""

    def __getitem__(self, index: int) -> int:
        if index == 21:
            raise CodedError(index)
        return index


def failing_collate(samples: list[int]) -> torch.Tensor:
    if 21 in samples:
        raise CodedError(21)
    return torch.tensor(samples)


def failing_generator() -> Iterator[int]:
    yield from range(10)
    raise CodedError(21)


class Immovable(torch.Tensor):
    """A tensor elsewhere, which cannot be fetched."""

    error: BaseException = CodedError(21)

    @staticmethod
    def make() -> Immovable:
        return torch.empty(2, device="meta").as_subclass(Immovable)

    def cpu(self) -> torch.Tensor:
        raise self.error


BROKEN = {
    "dataset": lambda: DataLoader(Failing(40), batch_size=2),
    "dataset in a loader worker": lambda: DataLoader(Failing(40), batch_size=2, num_workers=2),
    "stream in a loader worker": lambda: DataLoader(Stream(40, broken=21), batch_size=2, num_workers=1),
    "collate_fn": lambda: DataLoader(Numbers(40), batch_size=2, collate_fn=failing_collate),
    "collate_fn in a loader worker": lambda: DataLoader(
        Numbers(40), batch_size=2, collate_fn=failing_collate, num_workers=1
    ),
    "generator": failing_generator,
    "transfer": lambda: [*range(10), *[Immovable.make()] * 2],
}


@contextlib.contextmanager
def raises_coded() -> Iterator[list[Any]]:
    """Catches the error without holding on to its traceback, and gives what it says."""
    told: list[Any] = []
    try:
        yield told
    except CodedError as error:
        told.extend([type(error), "code 21" in str(error), "\n".join(error.__notes__)])
    else:
        pytest.fail("no CodedError was raised")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "where", ["transfer", *(pytest.param(each, marks=pytest.mark.any_family) for each in BROKEN if each != "transfer")]
)
def test_an_error_reaches_every_device_in_its_own_type_after_the_rounds_before_it(where, count):
    reading = f"in the loader's reader, round {10 // count}"
    place = f"while a batch was moved to {FAMILY}:" if where == "transfer" else reading
    with ParallelLoader(BROKEN[where](), devices(count)) as parallel:
        for iterator in [parallel.per_device_loader(device) for device in devices(count)]:
            delivered = 0
            with raises_coded() as told:
                for _ in iterator:
                    delivered += 1
            assert delivered == 10 // count
            assert told[:2] == [CodedError, True]
            assert place in told[2]
            for _ in range(2):
                with raises_coded() as again:
                    next(iterator)
                assert again == told


def test_an_error_shows_the_place_in_the_users_code():
    with ParallelLoader(failing_generator(), ["cpu"]) as parallel, pytest.raises(CodedError) as caught:
        list(parallel.per_device_loader("cpu"))
    assert "failing_generator" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("count", [1, 2])
def test_a_loader_worker_that_is_killed_is_told_of(count):
    with ParallelLoader(DataLoader(Killed(40), batch_size=2, num_workers=1), devices(count)) as parallel:
        for iterator in [parallel.per_device_loader(device) for device in devices(count)]:
            with pytest.raises(RuntimeError, match="DataLoader worker"):
                list(iterator)


class Stopping(Numbers):
    """Sample 21 raises what a loop takes for its end."""

    def __getitem__(self, index: int) -> int:
        if index == 21:
            raise StopIteration
        return index


@pytest.mark.parametrize(
    "dataset", [Failing(40), Stopping(40), Stream(40, broken=21)], ids=lambda it: type(it).__name__
)
def test_the_workers_of_a_loader_that_failed_are_gone_without_the_garbage_collector(dataset):
    gc.disable()
    try:
        with contextlib.suppress(CodedError, RuntimeError):
            list(DeviceLoader(DataLoader(dataset, batch_size=2, num_workers=2)))
        join_own_threads()
        psutil.wait_procs(workers := loader_workers(), timeout=PATIENCE_S)
        assert not any(worker.is_running() for worker in workers)
    finally:
        gc.enable()


def test_an_error_that_was_handled_holds_the_dataset_no_longer():
    dataset = Failing(40)
    gone = weakref.ref(dataset)
    gc.disable()
    try:
        with contextlib.suppress(CodedError):  # a context manager made of a generator keeps the error in Python 3.13
            list(DeviceLoader(DataLoader(dataset, batch_size=2)))
            pytest.fail("no CodedError was raised")
        del dataset
        join_own_threads()
        assert gone() is None
    finally:
        gc.enable()


def test_a_stop_iteration_while_moving_is_an_error_and_no_end(monkeypatch):
    monkeypatch.setattr(Immovable, "error", StopIteration())
    with pytest.raises(RuntimeError, match="could not be moved to its device: it raised StopIteration"):
        list(DeviceLoader([1, Immovable.make()]))


def test_a_source_that_was_closed_is_an_error_and_no_end():
    inner = ParallelLoader(itertools.count(), ["cpu"])

    def source() -> Iterator[int]:
        for number in inner.per_device_loader("cpu"):
            yield number
            if number == 3:
                inner.close()

    found = []
    with pytest.raises(ClosedError):
        for batch in DeviceLoader(source()):
            found.append(batch)  # noqa: PERF402 - what came before the error is kept
    assert found == [0, 1, 2, 3]


def test_a_loader_that_cannot_be_iterated_says_so_each_time():
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("the disk is gone")

    parallel = ParallelLoader(Broken(), devices(2))
    for device in devices(2):
        with pytest.raises(OSError, match="the disk is gone"):
            parallel.per_device_loader(device)


def test_a_batch_that_contains_itself_is_refused():
    batch: list[Any] = []
    batch.append(batch)
    with pytest.raises(ValueError, match="contains itself"):
        list(DeviceLoader([batch]))


# Ends, early and late.


@pytest.mark.any_family
def test_a_closed_loader_wakes_who_waits_and_refuses_who_comes():
    source = Paced()
    parallel = ParallelLoader(source, devices(2))
    iterators = [parallel.per_device_loader(device) for device in devices(2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(next, iterator) for iterator in iterators]
        until(lambda: all(map(is_awaiting_batch, parallel._pipeline.lanes)))
        source.let(2)  # the reader comes back from the source, and can end
        parallel.close()
        for each in waiting:
            with pytest.raises(ClosedError, match="the loader was closed"):
                each.result(PATIENCE_S)
    assert not own_threads()
    parallel.close()
    with pytest.raises(ClosedError):
        next(iterators[0])
    with pytest.raises(ClosedError, match="after its one pass"):
        parallel.per_device_loader(devices(1)[0])


def test_a_loader_that_is_closed_while_its_pass_begins_ends():
    beginning, may_begin = threading.Event(), threading.Event()

    class Slow:
        def __iter__(self) -> Iterator[int]:
            beginning.set()
            assert may_begin.wait(PATIENCE_S)
            return itertools.count()

    parallel = ParallelLoader(Slow(), ["cpu"])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(parallel.per_device_loader, "cpu")
        assert beginning.wait(PATIENCE_S)
        parallel.close()
        may_begin.set()
        with pytest.raises(ClosedError):
            next(asked.result(PATIENCE_S))
    join_own_threads()


def test_leaving_the_block_closes():
    with ParallelLoader(itertools.count(), ["cpu"]) as parallel:
        iterator = parallel.per_device_loader("cpu")
        assert next(iterator) == 0
    assert not own_threads()
    with pytest.raises(ClosedError):
        next(iterator)


@pytest.mark.any_family
@pytest.mark.parametrize("left", [0, 1])
def test_a_closed_iterator_takes_no_more_and_the_other_goes_on(left):
    with ParallelLoader(range(100), devices(2)) as parallel:
        iterators = [parallel.per_device_loader(device) for device in devices(2)]
        closed, other = iterators[left], iterators[1 - left]
        next(closed)
        closed.close()
        closed.close()
        with pytest.raises(ClosedError):
            next(closed)
        assert list(other) == list(range(1 - left, 100, 2))


@pytest.mark.any_family
def test_leaving_the_loop_three_hundred_times_leaves_nothing():
    alive: list[weakref.ref[torch.Tensor]] = []

    def source() -> Iterator[torch.Tensor]:
        while True:
            tensor = torch.zeros(4)
            alive.append(weakref.ref(tensor))
            yield tensor

    gc.collect()
    gc.disable()
    try:
        files = os.listdir("/proc/self/fd")
        for _ in range(300):
            for _batch in ParallelLoader(source(), ["cpu"]).per_device_loader("cpu"):
                break
        del _batch
        join_own_threads()
        assert len(alive) >= 300
        assert sum(each() is not None for each in alive) == 0
        assert len(os.listdir("/proc/self/fd")) == len(files)
    finally:
        gc.enable()


def test_a_loop_that_an_error_leaves_leaves_nothing():
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            for batch in DeviceLoader(itertools.count()):
                batch / 0
    gc.collect()
    join_own_threads()


def test_a_loader_in_a_circle_of_garbage_ends_its_threads():
    parallel = ParallelLoader(itertools.count(), devices(2))
    circle: list[Any] = [parallel.per_device_loader("cpu:0"), parallel.per_device_loader("cpu:1")]
    next(circle[0])
    circle.append(circle)
    assert [thread.name for thread in own_threads()] == ["unisono-reader"]
    del parallel, circle
    gc.collect()
    join_own_threads()


def test_a_loader_that_is_never_asked_starts_nothing():
    parallel = ParallelLoader(itertools.count(), ["cpu"])
    assert not own_threads()
    parallel.close()


ENDS_IN_MID_EPOCH = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from unisono import ParallelLoader

def busy():
    while True:
        yield torch.ones(1000) @ torch.ones(1000)

sources = {
    "generator": busy,
    "workers": lambda: DataLoader(TensorDataset(torch.ones(1000, 10)), num_workers=1),
}
iterator = ParallelLoader(sources[sys.argv[1]](), ["cpu"]).per_device_loader("cpu")
for number, batch in enumerate(iterator):
    if number == 20:
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize(("source", "times"), [("generator", 3), ("workers", 1)])
def test_a_script_that_ends_in_mid_epoch_ends_cleanly(tmp_path, source, times):
    (tmp_path / "ends.py").write_text(ENDS_IN_MID_EPOCH)
    for _ in range(times):
        assert warm_scripts.complete(tmp_path / "ends.py", source, takes_apart=True) == (0, "", "")


# Loop after loop.


@pytest.mark.any_family
def test_a_device_loader_is_looped_over_again_with_a_new_order_each_time():
    loader = DeviceLoader(DataLoader(Numbers(30), batch_size=4, shuffle=True))
    epochs = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(loader) == 8


def test_two_loops_over_one_device_loader_are_independent():
    loader = DeviceLoader(DataLoader(Numbers(6), batch_size=1))
    pairs = [(one.item(), other.item()) for one in loader for other in loader]
    assert pairs == list(itertools.product(range(6), range(6)))


def test_a_device_loader_tells_the_valid_samples_of_the_running_loop():
    batches = [torch.zeros(size) for size in (3, 1)]
    loader = DeviceLoader(batches)
    assert loader.valid_samples == 0
    assert [loader.valid_samples for _ in loader] == [3, 1]
    split = DeviceLoader(DataLoader(Numbers(3), batch_size=2), world=worlds(4)[3])
    assert [split.valid_samples for _ in split] == [0]


@pytest.mark.any_family
def test_a_device_loader_takes_the_device_of_its_world():
    loader = DeviceLoader([torch.ones(1)], world=worlds(2)[1])
    assert iter(loader)._lane.device == torch.device(FAMILY, 1)


# Several ranks.


@pytest.mark.any_family
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["map-style", "stream", "list"])
def test_in_a_world_of_several_ranks_each_takes_its_share_of_any_loader(kind, count):
    loader = {
        "map-style": DataLoader(Numbers(23), batch_size=2),
        "stream": DataLoader(Stream(23), batch_size=2),
        "list": list(torch.arange(23).split(2)),
    }[kind]

    def load(world: World) -> list[list[int]]:
        device_loader = DeviceLoader(loader, world=world)
        found = [batch[: device_loader.valid_samples].tolist() for batch in device_loader]
        assert kind == "stream" or len(device_loader) == len(found)
        return found

    with ThreadPoolExecutor(count) as ranks:
        each_ranks = list(ranks.map(load, worlds(count)))
    in_order = list(itertools.chain(*itertools.chain(*zip(*each_ranks, strict=True))))
    assert (sorted(in_order) if kind == "stream" else in_order) == list(range(23))


def test_worker_processes_take_every_sample_once():
    def load() -> list[list[int]]:
        found = []
        for loader in (
            DataLoader(Numbers(23), batch_size=2, shuffle=True),
            (torch.arange(k, k + 2) for k in range(0, 22, 2)),
        ):
            device_loader = DeviceLoader(loader)
            found.append(
                [number for batch in device_loader for number in batch[: device_loader.valid_samples].tolist()]
            )
        return found

    (first_map, first_list), (second_map, second_list) = PROCESSES_2.run(load)
    assert sorted(first_map + second_map) == list(range(23))
    assert sorted(first_list + second_list) == list(range(22))
    assert min(map(len, (first_map, second_map, first_list, second_list))) >= 10


def test_several_devices_in_a_world_of_several_ranks_are_refused():
    with pytest.raises(
        ValueError, match=r"devices=\['cpu:0', 'cpu:1'\] in a world of 3 ranks: each rank has one device"
    ):
        ParallelLoader([], devices(2), world=worlds(3)[0])


# Bad arguments.


def refused(error: type[Exception], words: str, **arguments: Any) -> Any:
    identity = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return pytest.param(error, words, arguments, id=identity)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        refused(TypeError, "loader=5 is of type int; pass a DataLoader, or an iterable", loader=5),
        refused(TypeError, "loader='text' is of type str; pass a DataLoader", loader="text"),
        refused(TypeError, "is of type dict; pass a DataLoader", loader={"x": [1]}),
        refused(TypeError, "is of type Tensor; pass a DataLoader", loader=torch.ones(2)),
        refused(TypeError, "loader=None is of type NoneType", loader=None),
        refused(ValueError, "devices=[] is empty; pass at least one device", devices=[]),
        refused(ValueError, "devices=['cpu:0', 'cpu:0'] repeats cpu:0", devices=["cpu", "cpu:0"]),
        refused(ValueError, "repeats cpu:1", devices=["cpu:1", 0, torch.device("cpu", 1)]),
        refused(ValueError, "device 'foo' does not exist; there are cpu:0", devices=["foo"]),
        refused(ValueError, "cuda", devices=["cuda:99"]),
        refused(ValueError, "device 'meta' does not exist", devices=["meta"]),
        refused(ValueError, "-1 does not exist", devices=[-1]),
        refused(TypeError, "devices='cpu' is of type str; pass a list of devices", devices="cpu"),
        refused(TypeError, "devices=0 is of type int", devices=0),
        refused(TypeError, "devices=None is of type NoneType", devices=None),
        refused(TypeError, "devices={'cpu'} is of type set", devices={"cpu"}),
        refused(TypeError, "device=True is of type bool", devices=[True]),
        refused(TypeError, "device=1.5 is of type float", devices=[1.5]),
        refused(ValueError, "prefetch=-1 is too small; pass an integer of at least 0", prefetch=-1),
        refused(TypeError, "prefetch=True is of type bool", prefetch=True),
        refused(TypeError, "prefetch='4' is of type str", prefetch="4"),
        refused(TypeError, "seed='a' is of type str; pass an integer, or None for the loader's own", seed="a"),
        refused(TypeError, "seed=1.5 is of type float", seed=1.5),
        refused(TypeError, "seed=True is of type bool", seed=True),
        refused(ValueError, "split='ranks' is unknown; choose one of 'rank', 'global'", split="ranks"),
        refused(ValueError, "tail='keep' is unknown; choose one of 'split', 'drop', 'pad', 'error'", tail="keep"),
        refused(TypeError, "batch_dim=None is of type NoneType; pass a dimension", batch_dim=None),
        refused(TypeError, "batch_dim=False is of type bool", batch_dim=False),
    ],
)
def test_a_wrong_argument_is_refused_by_name_value_and_rule(error, words, arguments):
    whole = {"loader": [], "devices": ["cpu"]} | arguments
    with pytest.raises(error, match=re.escape(words)):
        ParallelLoader(**whole)
    assert not own_threads()


def test_a_device_loader_refuses_before_the_first_loop():
    with pytest.raises(ValueError, match="prefetch=-1"):
        DeviceLoader([], prefetch=-1)
    with pytest.raises(ValueError, match="device 'foo' does not exist"):
        DeviceLoader([], "foo")


def test_a_device_of_another_loader_is_refused():
    parallel = ParallelLoader([], devices(2))
    with pytest.raises(ValueError, match="device cpu:2 is not one of this loader's devices: cpu:0, cpu:1"):
        parallel.per_device_loader("cpu:2")


def test_a_device_is_named_in_any_way():
    parallel = ParallelLoader(range(2), [torch.device("cpu"), "cpu:1"])
    assert [list(parallel.per_device_loader(device)) for device in (0, torch.device("cpu:1"))] == [[0], [1]]


# Time.


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


def test_a_loader_over_several_devices_says_how_to_loop_over_it():
    with ParallelLoader([], ["cpu"]) as loader, pytest.raises(TypeError, match=r"per_device_loader\(device\)"):
        iter(loader)


@pytest.mark.parametrize("make", [DeviceLoader, lambda batches: ParallelLoader(batches, ["cpu"])])
@pytest.mark.parametrize("carry", [copy.deepcopy, pickle.dumps])
def test_copies_of_loaders_are_refused_with_the_way_out(make, carry):
    with pytest.raises(TypeError, match="cannot be copied or pickled: create one where it is needed"):
        carry(make([]))
