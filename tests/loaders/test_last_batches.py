"""`DeviceIterator.is_last`: whether the batch that was delivered last ends the loop."""

from __future__ import annotations

import pytest
import torch
from epochs import CodedError
from loops import Stream
from modes import PROCESSES_2, SOLO, THREADS_3, scaling
from torch.utils.data import DataLoader

from unisono import DeviceLoader, current_world

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
@pytest.mark.parametrize("name", LOADERS)
def test_only_the_last_batch_is_the_last_and_nothing_is_lost_by_asking(mode, name):
    def body():
        make = LOADERS[name]
        return ask_at_each(make()), [len(batch) for batch in make()]

    for asked, sizes in mode.run(body):
        assert [size for size, _, _ in asked] == sizes
        assert [first for _, first, _ in asked] == [second for _, _, second in asked]
        assert [first for _, first, _ in asked] == [number == len(sizes) for number in range(1, len(sizes) + 1)]


def test_the_state_is_behind_what_the_loop_received_not_behind_what_was_asked_for():
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


def test_a_delivered_batch_asks_its_loop_whether_it_is_the_last_and_does_not_keep_it():
    loader = DeviceLoader([torch.arange(2)] * 2)
    iterator = iter(loader)
    [batch] = current_world().state.deliveries.find(next(iterator))
    assert (batch.is_last(), batch.loop.is_open) == (False, True)
    del iterator
    assert (batch.is_last(), batch.loop.is_open) == (False, False)
