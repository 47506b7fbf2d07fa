"""A loader that reads nothing ahead: its loop reads, in its own thread, and everything else is as ever."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from epochs import Numbers, take
from failing import Failing
from streams import Stream
from torch.utils.data import DataLoader

from unisono import DeviceLoader, ParallelLoader
from unisono.errors import ClosedError
from unisono.world import solo_world, thread_worlds


def unthreaded(loader, **options) -> DeviceLoader:
    return DeviceLoader(loader, prefetch=0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"tail": "drop"}, {"tail": "pad"}, {"split": "global"}])
def test_the_batches_the_epochs_and_the_states_are_those_of_a_loader_that_reads_ahead(num_workers, options):
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


@pytest.mark.parametrize(
    "source", [[1, 2, 3], DataLoader(Stream(7), batch_size=3), DataLoader(Numbers(4), batch_size=None)]
)
def test_any_source_is_read(source):
    assert list(map(str, unthreaded(source))) == list(map(str, DeviceLoader(source)))


def test_the_loops_own_thread_reads_what_is_asked_for_and_no_other_is_started():
    read, before = [], threading.active_count()

    class Noting(Numbers):
        def __getitem__(self, index: int) -> int:
            read.append(index)
            return threading.get_ident()

    for number, (thread,) in enumerate(unthreaded(DataLoader(Noting(9)))):
        assert int(thread) == threading.get_ident()
        assert threading.active_count() == before
        assert read == list(range(number + 1))


def test_an_error_comes_in_its_turn_and_again():
    iterator = iter(unthreaded(DataLoader(Failing(9, 5, lambda: KeyError("five")), batch_size=2)))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(KeyError, match="five") as caught:
            next(iterator)
        assert "in the sample with index 5" in caught.value.__notes__


def test_an_end_stays_one_and_a_closed_iterator_says_so():
    iterator = iter(unthreaded([1, 2]))
    assert list(iterator) == [1, 2]
    assert list(iterator) == []
    iterator.close()
    with pytest.raises(ClosedError):
        next(iterator)


def test_a_loop_that_is_left_leaves_nothing():
    dataset = Numbers(40)
    gone = weakref.ref(dataset)
    for _ in unthreaded(DataLoader(dataset, num_workers=1)):
        break
    del dataset
    gc.collect()
    assert gone() is None


def test_ranks_take_their_share():
    source = DataLoader(Numbers(10), batch_size=2)
    worlds = thread_worlds([torch.device("cpu", rank) for rank in range(2)])
    found = [[batch.tolist() for batch in unthreaded(source, world=world)] for world in worlds]
    assert found == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


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
        unthreaded(DataLoader(Stream(7)), world=world)
