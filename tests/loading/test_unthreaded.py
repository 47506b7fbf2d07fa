"""A loader that reads nothing ahead: its loop reads, in its own thread, and everything else is as ever."""

from __future__ import annotations

import contextvars
import threading
import time
import weakref

import pytest
import torch
from epochs import Numbers, take
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as MapDataset

from unisono import DeviceLoader, ParallelLoader
from unisono.loading import unthreaded as reading
from unisono.loading.pipeline import UNKNOWN
from unisono.world import solo_world, thread_worlds


def unthreaded(loader, **options) -> DeviceLoader:
    return DeviceLoader(loader, prefetch=0, **options)


class Threads(Numbers):
    """Sample i is the thread that loads it."""

    def __getitem__(self, index: int) -> int:
        return threading.get_ident()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"tail": "drop"}, {"tail": "pad"}, {"split": "global"}])
def test_unthreaded_batches_epochs_and_states_equal_those_read_ahead(num_workers, options):
    def passes(size: int):
        source = DataLoader(Numbers(11), batch_size=3, shuffle=True, num_workers=num_workers)
        loader = DeviceLoader(source, prefetch=size, **options)
        found = []
        for _ in range(2):
            iterator = iter(loader)
            found += [(batch.tolist(), iterator.valid_samples, iterator.state_dict()) for batch in iterator]
        first = take(loader, 2)
        resumed = DeviceLoader(source, prefetch=size, **options)
        resumed.load_state_dict(loader.state_dict())
        return found, first, take(resumed)

    assert passes(0) == passes(8)


def test_the_loops_own_thread_reads_and_no_other_is_started():
    before = set(threading.enumerate())  # of which some, of tests before, may be ending
    for (thread,) in unthreaded(DataLoader(Threads(5))):
        assert int(thread) == threading.get_ident()
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("cost", "own"), [(10**12, 8), (-1, 3)], ids=["cheap", "slow"])
def test_a_loop_reads_for_itself_while_batches_are_cheap(monkeypatch, cost, own):
    """With the limit on the cost far above, and below, that of any batch: the same batches and states in both."""
    monkeypatch.setattr(reading, "SWITCH_NS", cost)
    monkeypatch.setattr(reading, "LONG_NS", 10**15)
    iterator = iter(DeviceLoader(DataLoader(Threads(8))))
    with torch.no_grad():
        found = [(int(thread), iterator.state_dict()["offset"]) for (thread,) in iterator]
    assert [thread == threading.get_ident() for thread, _ in found] == [True] * own + [False] * (8 - own)
    assert [offset for _, offset in found] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([(6_000_000, UNKNOWN)], True),  # reading, and the step before it, in nanoseconds
        ([(6_000_000, 900_000)], False),  # as the last pass says: it may be that a large batch is freed
        ([(6_000_000, 1_200_000)], True),
        ([(2_000_000, UNKNOWN)], False),  # it may be so only because it is the first
        ([(2_000_000, UNKNOWN), (150_000, 500_000)], True),
        ([(2_000_000, UNKNOWN), *[(2_000_000, 50_000)] * 20], False),
        ([(900_000, UNKNOWN), (900_000, 500_000), (900_000, 500_000)], True),
        ([(900_000, UNKNOWN), *[(900_000, 50_000)] * 20], False),  # nothing to read beside
        ([(50_000, UNKNOWN), *[(50_000, 9_000_000)] * 20], False),
        ([(900_000, UNKNOWN), (900_000, 500_000), (50_000, 500_000), (900_000, 500_000)], False),
    ],
)
def test_the_reader_takes_over_when_batches_and_steps_outweigh_a_thread(costs, expected):
    loop = reading.Unthreaded(None, iter(()))
    assert [loop._is_slow(*each) for each in costs][-1] is expected


@pytest.mark.parametrize("waits", [0.0, 0.03], ids=["short", "long"])
def test_a_pass_judges_by_the_shortest_step_of_the_last(monkeypatch, waits):
    """The time of a step is that of the loop's body: not of the reading, nor of what the loader does for the batch."""
    monkeypatch.setattr(reading, "SWITCH_NS", 15_000_000)

    class Slow(Threads):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.02)
            return super().__getitem__(index)

    loader, readers = DeviceLoader(DataLoader(Slow(2))), []
    for _ in range(2):
        for (thread,) in loader:
            readers.append(int(thread))
            time.sleep(waits)
    assert [each == threading.get_ident() for each in readers] == [True, False, True, waits == 0.0]


@pytest.mark.parametrize("collate_fn", [None, torch.tensor])
def test_a_batch_that_the_loop_has_dropped_does_not_stay_in_memory(collate_fn):
    seen = []

    class Looking(Numbers):
        def __getitem__(self, index: int) -> int:
            seen.append([each() is not None for each in delivered])
            return index

    delivered = []
    iterator = iter(unthreaded(DataLoader(Looking(6), batch_size=2, collate_fn=collate_fn)))
    while len(delivered) < 3:
        delivered.append(weakref.ref(next(iterator)))
    assert not any(map(any, seen))
    assert len(seen) == 6


def test_what_surrounds_the_loop_is_not_seen_by_the_dataset():
    """Since the reader may take over at any batch."""
    name = contextvars.ContextVar("name", default="unset")

    class Modes(Numbers):
        def __getitem__(self, index: int) -> str:
            return f"{torch.zeros(1).device} {torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {name.get()}"

    name.set("set")
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta"), torch.enable_grad()):
        with mode:
            assert [*DeviceLoader(DataLoader(Modes(1)))] == [["cpu True False unset"]]


def test_nothing_is_read_before_it_is_asked_for():
    read = []

    class Noting(MapDataset):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    for number, _ in enumerate(unthreaded(DataLoader(Noting()))):
        assert read == list(range(number + 1))


def test_what_it_waited_for_is_the_source():
    world = solo_world()
    assert len(list(unthreaded(DataLoader(Numbers(50)), world=world))) == 50
    (track,) = (track for track in world.timeline.tracks() if track.counts["batches"])
    assert track.counts["wait_source_ns"] > 0
    assert (track.counts["wait_transfer_ns"], track.counts["wait_peers_ns"]) == (0, 0)


def test_several_devices_and_parts_of_a_stream_need_a_reader():
    with pytest.raises(ValueError, match="prefetch=0 makes the loop itself read, which several devices"):
        ParallelLoader([1], ["cpu:0", "cpu:1"], prefetch=0)
    world = thread_worlds([torch.device("cpu", rank) for rank in range(2)])[0]
    with pytest.raises(ValueError, match="ranks with parts of one stream"):
        unthreaded(DataLoader(Stream()), world=world)
