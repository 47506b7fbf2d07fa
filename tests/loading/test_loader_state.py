"""What a loader's state is, and which states are refused."""

from __future__ import annotations

import io
import json
import re

import numpy
import pytest
import torch
from epochs import Numbers, counted, take
from faults import until
from resuming import SAMPLES, STATE, order, resumed, shuffled, take_items
from torch.utils.data import DataLoader

from unisono import DeviceLoader
from unisono.errors import StateError


def test_the_state_is_what_was_delivered_whatever_was_prefetched(reads_ahead):
    loader = shuffled()
    device_loader = DeviceLoader(loader)
    iterator = iter(device_loader)
    for rounds in range(1, 4):
        next(iterator)
        until(lambda: loader.dataset.asked == SAMPLES)
        assert device_loader.state_dict()["offset"] == 2 * rounds


def test_nothing_is_loaded_again():
    loader = shuffled(1000)
    device_loader = resumed([DeviceLoader(loader, seed=5)], {**STATE, "length": 1000, "offset": 990})[0]
    assert counted([take(device_loader)]) == order(1000, 5, 0)[990:]
    assert loader.dataset.asked == 10


def test_a_state_is_plain_data():
    for loader in (shuffled(), shuffled(batch_size=None), list(torch.arange(9).split(2))):
        device_loader = DeviceLoader(loader)
        iterator = iter(device_loader)
        next(iterator)
        state = device_loader.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == json.loads(json.dumps(state)) == state


def test_a_seed_of_another_kind_of_number_is_written_as_plain_one():
    state = DeviceLoader(shuffled(), seed=numpy.int64(5)).state_dict()
    assert json.loads(json.dumps(state)) == {**STATE, "offset": 0}


def test_before_the_first_batch_the_state_is_the_beginning_of_the_pass():
    loader = DeviceLoader(shuffled(), seed=5)
    beginning = {**STATE, "offset": 0}
    assert loader.state_dict() == beginning
    iterator = iter(loader)
    assert loader.state_dict() == beginning
    del iterator
    assert loader.state_dict() == beginning
    loader.load_state_dict(beginning)
    beginning["offset"] = loader.state_dict()["epoch"] = 17  # which changes no loader
    assert counted([take(loader)]) == order(SAMPLES, 5, 0)


def test_a_state_loaded_in_mid_pass_is_for_the_next_loop():
    loader = DeviceLoader(shuffled(), seed=5)
    iterator = iter(loader)
    first = next(iterator).tolist()
    loader.load_state_dict({**STATE, "epoch": 7})
    assert loader.epoch == 7
    assert loader.state_dict() == {**STATE, "epoch": 7}
    assert first + [each for batch in iterator for each in batch.tolist()] == order(SAMPLES, 5, 0)
    assert counted([take(loader)]) == order(SAMPLES, 5, 7)[6:]
    assert counted([take(loader)]) == order(SAMPLES, 5, 8)


def test_after_an_error_the_state_is_behind_what_was_delivered():
    class Failing(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                raise OSError("unreadable")
            return index

    loader = DeviceLoader(DataLoader(Failing(20), batch_size=2))
    with pytest.raises(OSError, match="unreadable"):
        take(loader)
    assert loader.state_dict()["offset"] == 8
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(OSError, match="unreadable"):
        take(loader)
    state = {"version": 1, "epoch": 0, "seed": 0, "length": 20, "order": "SequentialSampler", "offset": 8}
    assert loader.state_dict() == state


def test_epochs_advance_by_themselves_and_jump_when_told():
    loader = DeviceLoader(shuffled(), seed=5)
    assert loader.epoch == 0
    for epoch in (0, 1):
        assert counted([take(loader, 3)]) == order(SAMPLES, 5, epoch)[:6]
        assert loader.epoch == epoch
    loader.set_epoch(40)
    assert loader.epoch == 40
    assert counted([take(loader)]) == order(SAMPLES, 5, 40)
    assert loader.epoch == 41, "it has ended"
    assert counted([take(loader, 1)]) == order(SAMPLES, 5, 41)[:2]
    for wrong, error in ((-1, ValueError), (True, TypeError), (1.5, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="epoch="):
            loader.set_epoch(wrong)
    assert loader.epoch == 41


def test_an_outer_loop_has_its_own_state_and_counts_follow_the_active_loop():
    loader = DeviceLoader(DataLoader(Numbers(5), batch_size=3))
    seen = []
    for _ in (outer := iter(loader)):
        seen.append(loader.valid_samples)
        for _ in loader:
            state = outer.state_dict()
            assert (state["epoch"], state["offset"]) == (0, sum(seen))
            assert loader.state_dict()["epoch"] == len(seen)
        assert (loader.valid_samples, loader.weight) == (seen[-1], 1.0)
    assert seen == [3, 2]
    assert loader.valid_samples == 2, "after the loop it is still that of the last batch"


def test_a_state_in_another_samplers_order_is_refused():
    shuffled, plain = (DataLoader(Numbers(9), batch_size=2, shuffle=shuffle) for shuffle in (True, False))
    with pytest.raises(StateError, match="saved with order='RandomSampler', this loader has order='SequentialSampler'"):
        DeviceLoader(plain).load_state_dict(DeviceLoader(shuffled).state_dict())


def test_a_state_behind_the_end_of_a_plain_iterable_is_told_of():
    first = DeviceLoader(list(torch.arange(20).split(3)))
    take(first, 5)
    second = DeviceLoader(list(torch.arange(10).split(3)))
    second.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="the state's position is 5 samples beyond the end of this loader"):
        list(second)


@pytest.mark.parametrize(
    ("reason", "words", "change"),
    [
        ("version", "the state has version 2, this loader reads version 1", {"version": 2}),
        ("version", "the state has version 2", {"version": 2, "length": 4, "seed": 6}),
        ("length", f"saved with length=24, this loader has length={SAMPLES}", {"length": 24}),
        ("length", "saved with length=24,", {"length": 24, "seed": 6}),
        ("seed", "saved with seed=6, this loader has seed=5, .* pass seed=6", {"seed": 6}),
        ("state", "the state's epoch is -1; it must be an integer of at least 0", {"epoch": -1}),
        ("state", "the state's epoch is True", {"epoch": True}),
        ("state", "the state's offset is -2", {"offset": -2}),
        ("state", "the state's offset is 2.0", {"offset": 2.0}),
        ("state", f"the state's offset is 24, but an epoch has {SAMPLES} samples", {"offset": 24}),
    ],
)
def test_a_state_of_another_loader_is_refused_with_both_values(reason, words, change):
    loader = DeviceLoader(shuffled(), seed=5)
    with pytest.raises(StateError, match=words) as caught:
        loader.load_state_dict({**STATE, **change})
    assert (caught.value.reason, isinstance(caught.value, ValueError)) == (reason, True)
    assert counted([take(loader)]) == order(SAMPLES, 5, 0), "it is as before"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        *[(each, f"state={each!r:.200} is not what a loader's") for each in ({}, None, 5, [STATE], {"epoch": 1})],
        *[({**STATE, name: ...}, f"the state's {name} is None") for name in ("epoch", "offset")],
        *[({**STATE, name: ...}, f"the state was saved with {name}=None") for name in ("seed", "length")],
    ],
)
def test_what_is_no_state_or_lacks_something_is_refused(state, words):
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if value is not ...}
    with pytest.raises(StateError, match=re.escape(words)):
        DeviceLoader(shuffled(), seed=5).load_state_dict(state)


def test_a_state_without_its_batch_count_is_refused_if_batches_are_needed():
    loader = DeviceLoader(list(torch.arange(9).split(2)))
    with pytest.raises(StateError, match="lacks the number of batches: it was saved by another kind of loader"):
        loader.load_state_dict({"version": 1, "epoch": 0, "seed": 0, "length": None, "offset": 2})


def test_an_offset_beyond_the_items_is_refused_at_once():
    loader = DeviceLoader(shuffled(batch_size=None), seed=5)
    with pytest.raises(StateError, match=f"the state's offset is 24, but an epoch has {SAMPLES} samples"):
        loader.load_state_dict({**STATE, "offset": 24, "batches": 24})
    assert take_items(loader) == order(SAMPLES, 5, 0)
