"""Errors, early ends and last batches of a loader reach every loop, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import warm_scripts
from epochs import PATIENCE_S, CodedError, is_awaiting_batch, is_awaiting_room, join_own_threads, own_threads
from failing import caught
from faults import until
from loops import Paced, Stream, worlds
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_3, devices, scaling
from torch.utils.data import DataLoader

from unisono import DeviceLoader, ParallelLoader
from unisono.errors import ClosedError
from unisono.world import solo_world


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
    "stream in a loader worker": lambda: DataLoader(Stream(40, broken=21), batch_size=2, num_workers=1),
    "generator": failing_generator,
    "transfer": lambda: [*range(10), *[Immovable.make()] * 2],
}


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("transfer", 1),
        ("transfer", 2),
        pytest.param("generator", 2, marks=pytest.mark.any_family),
        pytest.param("stream in a loader worker", 1, marks=pytest.mark.any_family),
    ],
)
def test_an_error_reaches_every_device_in_its_type_after_earlier_rounds(where, count):
    reading = f"in round {10 // count} of the loader"
    place = f"while a batch was moved to {FAMILY}:" if where == "transfer" else reading
    with ParallelLoader(BROKEN[where](), devices(count)) as parallel:
        for iterator in [parallel.per_device_loader(device) for device in devices(count)]:
            for again in range(3):
                delivered, error = caught(iterator)
                kind = RuntimeError if again else CodedError
                assert (delivered, type(error)) == (0 if again else 10 // count, kind)
                assert "code 21" in str(error)
                assert again or place in "\n".join(error.__notes__)


def test_a_stop_iteration_while_moving_is_an_error_and_no_end(monkeypatch):
    monkeypatch.setattr(Immovable, "error", StopIteration())
    with pytest.raises(RuntimeError, match="could not be moved to its device: it raised StopIteration"):
        list(DeviceLoader([1, Immovable.make()]))


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
    join_own_threads()
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


@pytest.mark.any_family
def test_a_closed_iterator_takes_no_more_and_the_other_goes_on():
    with ParallelLoader(range(100), devices(2)) as parallel:
        closed, other = [parallel.per_device_loader(device) for device in devices(2)]
        next(closed)
        closed.close()
        closed.close()
        with pytest.raises(ClosedError):
            next(closed)
        assert list(other) == list(range(1, 100, 2))


@pytest.mark.any_family
def test_leaving_the_loop_a_hundred_times_leaves_nothing():
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
        for _ in range(100):
            for _batch in ParallelLoader(source(), ["cpu"]).per_device_loader("cpu"):
                break
        del _batch
        join_own_threads()
        assert len(alive) >= 100
        assert sum(each() is not None for each in alive) == 0
        assert len(os.listdir("/proc/self/fd")) <= len(files)  # those of tests before may be closed meanwhile
    finally:
        gc.enable()


def test_a_loader_in_a_circle_of_garbage_ends_its_threads():
    join_own_threads()  # of tests before
    parallel = ParallelLoader(itertools.count(), devices(2))
    assert not own_threads(), "it was not asked yet"
    circle: list[Any] = [parallel.per_device_loader("cpu:0"), parallel.per_device_loader("cpu:1")]
    next(circle[0])
    circle.append(circle)
    assert [thread.name for thread in own_threads()] == ["unisono-reader"]
    del parallel, circle
    gc.collect()
    join_own_threads()


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
@pytest.mark.parametrize("source", ["generator", "workers"])
def test_a_script_that_ends_in_mid_epoch_ends_cleanly(tmp_path, source):
    (tmp_path / "ends.py").write_text(ENDS_IN_MID_EPOCH)
    assert warm_scripts.complete(tmp_path / "ends.py", source, takes_apart=True) == (0, "", "")


NUMBERS = torch.arange(13)


def ask_at_each(loader):
    iterator = iter(loader)
    assert iterator.is_last(), "before the loop"
    found = [(len(batch), iterator.is_last(), iterator.is_last()) for batch in iterator]
    assert iterator.is_last(), "and after it"
    return found


LOADERS = {
    "map-style": lambda: DeviceLoader(DataLoader(NUMBERS, batch_size=2)),
    "no prefetching": lambda: DeviceLoader(DataLoader(NUMBERS, batch_size=2), prefetch=0),
    "stream": lambda: DeviceLoader(DataLoader(Stream(13), batch_size=2)),
    "list": lambda: DeviceLoader([NUMBERS[:2]] * 7),
    "drop": lambda: DeviceLoader(DataLoader(NUMBERS, batch_size=2, drop_last=True)),
    "pad": lambda: DeviceLoader(DataLoader(NUMBERS, batch_size=2), tail="pad"),
}


@pytest.mark.any_family
@pytest.mark.parametrize("mode", scaling(SOLO, THREADS_3, PROCESSES_2), ids=str)
def test_only_the_last_batch_is_the_last_and_nothing_is_lost_by_asking(mode):
    def body():
        return [(name, ask_at_each(make()), [len(batch) for batch in make()]) for name, make in LOADERS.items()]

    for name, asked, sizes in itertools.chain(*mode.run(body)):
        assert [size for size, _, _ in asked] == sizes, name
        assert [first for _, first, _ in asked] == [second for _, _, second in asked], name
        assert [first for _, first, _ in asked] == [number == len(sizes) for number in range(1, len(sizes) + 1)], name


def test_the_state_is_after_what_was_received_not_what_was_asked_for():
    loader = DeviceLoader(DataLoader(torch.arange(8), batch_size=2))
    iterator = iter(loader)
    next(iterator)
    state = iterator.state_dict()
    assert not iterator.is_last()
    assert iterator.state_dict() == state
    resumed = DeviceLoader(DataLoader(torch.arange(8), batch_size=2))
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[2, 3], [4, 5], [6, 7]]


def test_an_error_of_the_source_comes_where_the_loop_comes_to_it():
    iterator = iter(DeviceLoader(DataLoader(Stream(6, broken=4), batch_size=2)))
    assert [next(iterator).tolist(), iterator.is_last()] == [[0, 1], False]
    assert [next(iterator).tolist(), iterator.is_last()] == [[2, 3], False]
    with pytest.raises(CodedError):
        next(iterator)
