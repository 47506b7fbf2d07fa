"""A loop continues where it was left: at any sample, on any number of devices, nothing lost or repeated."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import pytest
import torch
from epochs import counted, ranks_of, take
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import devices
from resuming import SAMPLES, STATE, common_state, order, resumed, shuffled

from unisono import DeviceLoader, ParallelLoader
from unisono.errors import BusyError
from unisono.loading import parallel_loader


def take_rounds(parallel: ParallelLoader, count: int, most: int | None = None) -> list[int]:
    """The samples that count of the first rounds of a pass."""
    iterators = [parallel.per_device_loader(device) for device in devices(count)]
    found: list[int] = []
    for _ in range(most) if most is not None else itertools.count():
        try:
            for iterator in iterators:
                batch = next(iterator)
                found.extend(batch[: iterator.valid_samples].tolist())
        except StopIteration:
            for iterator in iterators[1:]:
                assert next(iterator, None) is None
            break
    return found


WAYS = {
    "count": st.integers(1, 4),
    "size": st.integers(1, 5),
    "split": st.sampled_from(["rank", "global"]),
    "tail": st.sampled_from(["split", "pad"]),
}


@settings(max_examples=30)
@given(
    samples=st.integers(0, 40),
    epoch=st.integers(0, 3),
    rounds=st.integers(0, 12),
    before=st.fixed_dictionaries(WAYS),
    after=st.fixed_dictionaries(WAYS),
)
def test_a_pass_goes_on_at_the_sample_where_it_was_left(samples, epoch, rounds, before, after):
    def load(count: int, size: int, **options: Any) -> list[DeviceLoader]:
        return ranks_of(shuffled(samples, size), count, seed=5, **options)

    first = load(**before)
    for loader in first:
        loader.set_epoch(epoch)
    delivered = counted([take(loader, rounds) for loader in first])
    state = common_state(first)
    if rounds > len(first[0]):  # it was told the end
        assert delivered == order(samples, 5, epoch)
        epoch, delivered = epoch + 1, []
    assert (state["epoch"], state["offset"]) == (epoch, len(delivered))
    second = resumed(load(**after), state)
    assert [loader.epoch for loader in second] == [epoch] * after["count"]
    assert delivered + counted([take(loader) for loader in second]) == order(samples, 5, epoch)
    assert counted([take(loader) for loader in second]) == order(samples, 5, epoch + 1)
    sampler = "RandomSampler" if samples else "SequentialSampler"  # torch shuffles nothing where nothing is
    end = {"version": 1, "epoch": epoch + 2, "seed": 5, "length": samples, "order": sampler, "offset": 0}
    assert common_state(second) == end


@given(
    samples=st.integers(0, 40),
    rounds=st.integers(0, 8),
    size=st.integers(1, 5),
    again=st.integers(1, 9),
    count=st.integers(1, 3),
)
@settings(max_examples=20)
def test_a_tail_that_is_dropped_is_less_than_a_round_after_a_resume_too(samples, rounds, size, again, count):
    for options in ({"drop_last": True}, {}):
        first = ranks_of(shuffled(samples, size, **options), 2, seed=5, tail="drop")
        delivered = counted([take(loader, min(rounds, len(loader))) for loader in first])
        second = resumed(ranks_of(shuffled(samples, again, **options), count, seed=5, tail="drop"), common_state(first))
        found = delivered + counted([take(loader) for loader in second])
        assert found == order(samples, 5, 0)[: len(found)]
        assert samples - len(found) < again * count
        assert (len(found) - len(delivered)) % (again * count) == 0


@pytest.mark.parametrize("make", [shuffled, lambda: list(torch.arange(SAMPLES).split(2))], ids=["dataset", "iterable"])
@pytest.mark.parametrize("before", [0, 3], ids=["new", "resumed"])
def test_a_loop_whose_threads_fail_to_start_draws_nothing_and_can_retry(monkeypatch, make, before):
    whole = DeviceLoader(make(), seed=5)
    first = take(whole, before)
    state, rest = whole.state_dict(), take(resumed([DeviceLoader(make(), seed=5)], whole.state_dict())[0])
    assert len(first) == before

    [loader] = resumed([DeviceLoader(make(), seed=5)], state)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse_to_start)
        limited.setattr(parallel_loader, "is_as_in_a_new_thread", lambda: False)  # so the reader reads from the first
        attempt = iter(loader)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(attempt)
    with pytest.raises(RuntimeError, match="the loop has ended with"):
        next(attempt)
    assert loader.state_dict() == state
    assert counted([take(loader)]) == counted([rest])
    assert loader.epoch == 1


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_parallel_loader_goes_on_with_another_number_of_devices(before, after):
    with ParallelLoader(shuffled(), devices(before), seed=5) as first:
        delivered = take_rounds(first, before, 2)
        state = json.loads(json.dumps(first.state_dict()))
    with ParallelLoader(shuffled(), devices(after), seed=5) as second:
        second.load_state_dict(state)
        assert delivered + take_rounds(second, after) == order(SAMPLES, 5, 0)
        assert second.state_dict() == {**STATE, "epoch": 1, "offset": 0}
    with second.again() as third:
        assert take_rounds(third, after) == order(SAMPLES, 5, 1)


def test_a_parallel_loaders_state_follows_the_last_round_all_devices_have():
    with ParallelLoader(shuffled(), devices(2), seed=5) as parallel:
        one, other = (parallel.per_device_loader(device) for device in devices(2))
        offsets = [parallel.state_dict()["offset"]]
        for iterator in (one, one, one, other, other, one):
            next(iterator)
            offsets.append(parallel.state_dict()["offset"])
        assert offsets == [0, 0, 0, 0, 4, 8, 8]
        assert len(list(one)) == 2
        assert (parallel.state_dict()["epoch"], parallel.state_dict()["offset"]) == (0, 8)
        assert len(list(other)) == 4
        assert (parallel.state_dict()["epoch"], parallel.state_dict()["offset"]) == (1, 0)


def test_a_parallel_loader_that_has_begun_loads_no_state():
    with ParallelLoader(shuffled(), devices(1), seed=5) as parallel:
        assert parallel.epoch == 0
        iterator = parallel.per_device_loader("cpu:0")
        with pytest.raises(BusyError, match="load_state_dict comes before the pass"):
            parallel.load_state_dict(STATE)
        with pytest.raises(BusyError, match="set_epoch comes before the pass"):
            parallel.set_epoch(3)
        assert [each for batch in iterator for each in batch.tolist()] == order(SAMPLES, 5, 0)


def test_persistent_workers_go_on():
    loader = DeviceLoader(shuffled(num_workers=2, persistent_workers=True), seed=5)
    before = counted([take(loader, 3)])
    loader.load_state_dict(loader.state_dict())
    assert before + counted([take(loader)]) == order(SAMPLES, 5, 0)
    assert counted([take(loader)]) == order(SAMPLES, 5, 1)
