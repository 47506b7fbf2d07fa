"""A loop continues where it was left: at any sample, on any number of devices, nothing lost or repeated."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from epochs import Bucketed, Numbers, counted, ranks_of, take
from faults import until
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import PROCESSES_2
from resuming import (
    SAMPLES,
    STATE,
    common_state,
    order,
    resumed,
    shuffled,
    take_items,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from unisono import DataParallel, DeviceLoader, ParallelLoader
from unisono.errors import BusyError, ClosedError, StateError


def devices(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


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


@settings(max_examples=50)
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
@settings(max_examples=40)
def test_a_tail_that_is_dropped_is_less_than_a_round_after_a_resume_too(samples, rounds, size, again, count):
    for options in ({"drop_last": True}, {}):
        first = ranks_of(shuffled(samples, size, **options), 2, seed=5, tail="drop")
        delivered = counted([take(loader, min(rounds, len(loader))) for loader in first])
        second = resumed(ranks_of(shuffled(samples, again, **options), count, seed=5, tail="drop"), common_state(first))
        found = delivered + counted([take(loader) for loader in second])
        assert found == order(samples, 5, 0)[: len(found)]
        assert samples - len(found) < again * count
        assert (len(found) - len(delivered)) % (again * count) == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_may_be_left_and_resumed_again_and_again(num_workers):
    state = None
    found: list[int] = []
    for step in itertools.count():
        loaders = ranks_of(shuffled(num_workers=num_workers), 1 + step % 3, seed=5)
        if state is not None:
            resumed(loaders, state)
        if loaders[0].epoch == 1:
            break
        found += counted([take(loader, 1) if len(found) < SAMPLES else take(loader) for loader in loaders])
        state = common_state(loaders)
    assert found == order(SAMPLES, 5, 0)
    assert step == 6 + 1  # 2, 4, 6, 2, 4 and the last 5 samples, and the end


@pytest.mark.parametrize("make", [shuffled, lambda: list(torch.arange(SAMPLES).split(2))], ids=["dataset", "iterable"])
@pytest.mark.parametrize("before", [0, 3], ids=["new", "resumed"])
def test_a_loop_whose_threads_could_not_be_started_has_drawn_nothing_and_is_tried_again(monkeypatch, make, before):
    whole = DeviceLoader(make(), seed=5)
    first = take(whole, before)
    state, rest = whole.state_dict(), take(resumed([DeviceLoader(make(), seed=5)], whole.state_dict())[0])
    assert len(first) == before

    [loader] = resumed([DeviceLoader(make(), seed=5)], state)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse_to_start)
        attempt = iter(loader)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(attempt)
    with pytest.raises(ClosedError):
        next(attempt)
    assert loader.state_dict() == state
    assert counted([take(loader)]) == counted([rest])
    assert loader.epoch == 1


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 2), (2, 3), (3, 1)])
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


def test_a_parallel_loader_stands_behind_the_last_round_of_which_every_device_has_its_batch():
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
        with pytest.raises(BusyError, match="load_state_dict comes before a pass"):
            parallel.load_state_dict(STATE)
        with pytest.raises(BusyError, match="set_epoch comes before a pass"):
            parallel.set_epoch(3)
        assert [each for batch in iterator for each in batch.tolist()] == order(SAMPLES, 5, 0)


def test_replicas_go_on_from_a_state():
    def loop(model: Any, loader: Any, *_: Any) -> list[list[int]]:
        return [batch[: loader.valid_samples].tolist() for batch in loader]

    def run(parallel: ParallelLoader) -> list[int]:
        each_replicas = DataParallel(nn.Identity(), devices(2))(loop, parallel)
        return [each for round_ in zip(*each_replicas, strict=True) for samples in round_ for each in samples]

    with ParallelLoader(shuffled(), devices(2), seed=5) as parallel:
        parallel.load_state_dict(STATE)
        assert run(parallel) == order(SAMPLES, 5, 0)[6:]
        assert parallel.state_dict() == {**STATE, "epoch": 1, "offset": 0}
        assert run(parallel) == order(SAMPLES, 5, 1)


def test_worker_processes_go_on_where_others_stood():
    def load() -> Any:
        loader = DeviceLoader(shuffled(), seed=5)
        loader.load_state_dict(STATE)
        found = take(loader, 2)
        return found, loader.state_dict()

    (first, state), (second, same) = PROCESSES_2.run(load)
    assert state == same == {**STATE, "offset": 14}
    found = order(SAMPLES, 5, 0)[:6] + counted([first, second])
    (alone,) = resumed(ranks_of(shuffled(batch_size=7), 1, seed=5), state)
    assert found + counted([take(alone)]) == order(SAMPLES, 5, 0)


def distributed(count: int, samples: int = 24, batch_size: int = 2) -> list[DeviceLoader]:
    """Each rank's loader with torch's DistributedSampler, which cuts the data by ranks."""
    loaders = []
    for world in [loader._never_begun._world for loader in ranks_of([], count)]:
        sampler = DistributedSampler(range(samples), num_replicas=count, rank=world.rank, seed=3)
        data_loader = DataLoader(Numbers(samples), batch_size=batch_size, sampler=sampler)
        loaders.append(DeviceLoader(data_loader, world=world))
    return loaders


def interleaved(each_ranks: list[list[Any]]) -> list[int]:
    """In the order of all ranks, where rank r has every so manyth sample from r on."""
    own = [[sample for each in deliveries for sample in each.counted] for deliveries in each_ranks]
    return [sample for row in zip(*own, strict=True) for sample in row]


def test_a_loader_that_cuts_itself_goes_on_with_a_number_of_ranks_that_divides():
    whole = interleaved([take(loader) for loader in distributed(2)])
    assert sorted(whole) == list(range(24))
    for count in (1, 2, 4, 8):
        first = distributed(2)
        delivered = interleaved([take(loader, 2) for loader in first])
        state = common_state(first)
        assert (state["offset"], len(delivered)) == (8, 8)
        second = resumed(distributed(count, batch_size=3), state)
        assert delivered + interleaved([take(loader) for loader in second]) == whole


def test_a_loader_that_cuts_itself_refuses_a_number_of_ranks_that_does_not_divide():
    first = distributed(2)
    for loader in first:
        take(loader, 2)
    for loader in distributed(3):
        with pytest.raises(StateError, match=r"offset 8 is no multiple of world_size=3, .* own sampler cuts"):
            loader.load_state_dict(common_state(first))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_ones_own_go_on(num_workers):
    groups = [[5, 1, 4], [0], [2, 3], [9, 8, 7, 6], [11, 10, 12]]
    whole = list(itertools.chain(*groups))

    def load(count: int) -> list[DeviceLoader]:
        return ranks_of(DataLoader(Numbers(13), batch_sampler=Bucketed(groups), num_workers=num_workers), count)

    for before, after in ((2, 3),) if num_workers else ((1, 2), (2, 1), (2, 3)):
        for rounds in (1, 2) if num_workers else range(4):
            first = load(before)
            delivered = counted([take(loader, rounds) for loader in first])
            second = resumed(load(after), common_state(first))
            assert delivered + counted([take(loader) for loader in second]) == whole


@pytest.mark.parametrize("split", ["rank", "global"])
def test_any_iterable_goes_on_by_reading_what_was_delivered_before(caplog, split):
    batches = list(torch.arange(20).split(3))
    for before, after in ((1, 2), (2, 1), (2, 3)):
        for rounds in range(3):
            first = ranks_of(batches, before, split=split)
            delivered = counted([take(loader, rounds) for loader in first])
            state = common_state(first)
            caplog.clear()
            with caplog.at_level(logging.INFO, "unisono"):
                second = resumed(ranks_of(batches, after, split=split), state)
                assert delivered + counted([take(loader) for loader in second]) == list(range(20))
            done = state["offset"]
            words = f"resumes after {done} samples of list, which has no state_dict: they are read and discarded"
            assert (words in caplog.text) == (done > 0)
            assert counted([take(loader) for loader in second]) == list(range(20))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 5), (4, 7)])
def test_any_iterable_goes_on_with_batches_of_another_size(before, after):
    numbers = torch.arange(20)
    for rounds in range(5):
        first = DeviceLoader(list(numbers.split(before)))
        delivered = [sample for batch in take(first, rounds) for sample in batch.batch]
        second = DeviceLoader(list(numbers.split(after)))
        second.load_state_dict(first.state_dict())
        assert delivered + [sample for batch in second for sample in batch.tolist()] == numbers.tolist()


def test_the_first_batchs_size_outlives_a_resume():
    for options in ({"tail": "pad"}, {"fixed_batch_size": True}):
        batches = list(torch.arange(11).split(4))
        whole = [batch.tolist() for batch in DeviceLoader(batches, **options)]
        first = DeviceLoader(batches, **options)
        taken = [batch.batch for batch in take(first, 2)]
        second = DeviceLoader(batches, **options)
        second.load_state_dict(first.state_dict())
        assert taken + [batch.tolist() for batch in second] == whole


def test_two_loaders_over_one_go_on_as_an_uninterrupted_run_does():
    def made() -> tuple[DeviceLoader, DeviceLoader]:
        source = DataLoader(Numbers(9), batch_size=4, shuffle=True)
        return DeviceLoader(source), DeviceLoader(source)

    def epochs(train: DeviceLoader, evaluation: DeviceLoader) -> list[list[int]]:
        return [batch.tolist() for loader in (train, train, evaluation) for batch in loader]

    loaders = made()
    epochs(*loaders)
    next(iter(loaders[0]))
    states = [loader.state_dict() for loader in loaders]
    assert [(state["epoch"], state["offset"]) for state in states] == [(2, 4), (1, 0)]
    resumed_loaders = made()
    for loader, state in zip(resumed_loaders, states, strict=True):
        loader.load_state_dict(state)
    whole = made()
    for loader, epoch in zip(whole, (2, 1), strict=True):
        loader.set_epoch(epoch)
    assert epochs(*resumed_loaders) == epochs(*whole)[1:], "after the first batch of four"


def test_a_loader_of_this_package_is_not_cut_again():
    for loader in (DeviceLoader([1]), ParallelLoader([1], ["cpu"]), iter(DeviceLoader([1]))):
        with pytest.raises(TypeError, match="which is sharded and moved already; pass its DataLoader"):
            DeviceLoader(loader)


class Remembering:
    """Batches of two, in an order by epoch, with a state of its own."""

    def __init__(self) -> None:
        self.epoch = -1
        self.at = 0
        self.starts: list[int] = []
        self.given = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.starts.append(self.at)
        numbers = [(self.epoch + 1) * 100 + number for number in range(SAMPLES)]
        for start in range(self.at, SAMPLES, 2):
            self.at = min(start + 2, SAMPLES)
            self.given += 1
            yield torch.tensor(numbers[start : start + 2])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "nested": {"tensor": torch.tensor(self.at)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["nested"]["tensor"]) == state["at"]
        self.at = state.pop("at")  # what it does to its copy is its own affair


@pytest.mark.parametrize("rounds", [0, 1, 3, 5])
def test_a_loader_with_a_state_of_its_own_goes_on_by_it(rounds):
    whole = [[(epoch + 1) * 100 + number for number in range(SAMPLES)] for epoch in range(2)]
    first = DeviceLoader(ahead := Remembering())
    iterator = iter(first)
    delivered = [each for batch in itertools.islice(iterator, rounds) for each in batch.tolist()]
    until(lambda: not rounds or ahead.given > rounds)  # what reads ahead, once a batch was drawn
    state = first.state_dict()
    del iterator
    kept = copy.deepcopy(state)
    loader = Remembering()
    (second,) = resumed([DeviceLoader(loader)], state)
    assert delivered + counted([take(second)]) == whole[0]
    assert loader.starts == [2 * rounds], "nothing was read again"
    assert counted([take(second)]) == whole[1]
    assert str(state) == str(kept)


@pytest.mark.parametrize("count", [1, 2])
def test_a_loader_without_batches_goes_on(count):
    first = ranks_of(shuffled(batch_size=None), count, seed=5)
    delivered = [take_items(loader, 4) for loader in first]
    state = common_state(first)
    loader = shuffled(batch_size=None)
    second = resumed(ranks_of(loader, 2, seed=5), state)
    rest = [take_items(each) for each in second]
    assert [*interleave(delivered), *interleave(rest)] == order(SAMPLES, 5, 0)
    assert loader.dataset.asked == 2 * (SAMPLES - 4 * count)
    assert [*interleave([take_items(each) for each in second])] == order(SAMPLES, 5, 1)


def interleave(each_ranks: list[list[int]]) -> Iterator[int]:
    missing = object()
    rows = itertools.zip_longest(*each_ranks, fillvalue=missing)
    return (item for row in rows for item in row if item is not missing)


def test_persistent_workers_go_on():
    loader = DeviceLoader(shuffled(num_workers=2, persistent_workers=True), seed=5)
    before = counted([take(loader, 3)])
    loader.load_state_dict(loader.state_dict())
    assert before + counted([take(loader)]) == order(SAMPLES, 5, 0)
    assert counted([take(loader)]) == order(SAMPLES, 5, 1)
