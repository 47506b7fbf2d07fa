"""A stream continues where its loop was left: nothing lost or repeated, with any numbers of ranks and workers."""

from __future__ import annotations

import io
import logging
import random
import re
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import SOLO, THREADS_2, THREADS_3
from stand_ins import stand_ins
from streams import (
    COUNT,
    SIZE,
    ByEpoch,
    CutsItself,
    Got,
    Sharded,
    Stream,
    all_of,
    loader_of,
    loop,
    passes,
    refused,
    through_json,
)
from torch.utils.data import get_worker_info

from unisono import DeviceLoader, current_world, rank
from unisono.errors import StateError
from unisono.loading.lockstep import Layer, Position, StreamPosition
from unisono.loading.part_reader import PartReader


@given(data=st.data(), count=st.integers(0, 40), size=st.integers(1, 4))
def test_what_was_left_is_dealt_anew_with_any_numbers_again_and_again(data, count, size):
    left = list(range(count))
    taken = StreamPosition().cut_for(1, 1)
    for _ in range(data.draw(st.integers(1, 4))):
        ranks, workers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        row = ranks * workers
        parts = [left[part::row] for part in range(row)]
        # A layer of its own for each turn, although the numbers may be those of the turn before.
        taken = taken._replace(layers=(*taken.layers, Layer(ranks, workers, (Position(),) * row)))
        numbers, reads = [], []
        for part in range(row):
            reader = PartReader(Stream(count), list, 0, size, False, None, part // workers, "stride", 0, taken)
            made = list(reader.made(0, part % workers))
            assert [sample for batch, _, _ in made for sample in batch] == parts[part]
            delivered = made[: data.draw(st.integers(0, len(made)))]
            numbers.append(sum(samples for _, samples, _ in delivered))
            reads += [read for _, _, read in delivered[-1:]]
        taken = taken.after(reads)
        left = sorted(sample for part, number in zip(parts, numbers, strict=True) for sample in part[number:])


class Stateful(Stream):
    """Keeps its place in an attribute of its own."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.count:
            self.reads.append(self.place)
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Counted(Stateful):
    """Wants to hear how much was delivered, as mosaicml-streaming's datasets do: it is read again instead."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        raise AssertionError("called with numbers that nobody knows")


RESUMED = [Stream, CutsItself, Sharded, Stateful, Counted]


@pytest.mark.parametrize(
    ("dataset", "mode", "workers"),
    [*((each, THREADS_2, 2) for each in RESUMED), (CutsItself, SOLO, 3), (Stateful, SOLO, 0), (Stream, THREADS_2, 0)],
)
@stand_ins()
def test_the_rest_is_the_same_wherever_the_loop_was_left(mode, workers, dataset):
    (whole,) = zip(*passes(mode, dataset, None, workers=workers), strict=True)
    for steps in {1, 2, len(whole[0].batches) - 1}:

        def body(steps: int = steps) -> tuple[Got, Got]:
            first = loop(DeviceLoader(loader_of(dataset(), workers)), steps)
            resumed = DeviceLoader(loader_of(dataset(), workers))
            saved = io.BytesIO()
            torch.save(first.state, saved)
            assert torch.load(io.BytesIO(saved.getvalue()), weights_only=True) == first.state
            resumed.load_state_dict(through_json(first.state))
            return first, loop(resumed)

        for expected, (first, rest) in zip(whole, mode.run(body), strict=True):
            assert first.batches + rest.batches == expected.batches
            assert first.valid + rest.valid == expected.valid
            assert rest.state == expected.state


@stand_ins()
def test_shards_that_began_uncut_go_on_so():
    first = passes(SOLO, Sharded, 2, workers=2)
    rest = passes(THREADS_2, Sharded, None, None, state=first[0][0].state)
    assert sorted(all_of(first) + all_of(rest)) == list(range(COUNT))
    assert all_of(rest, 1) == list(range(COUNT))


@pytest.mark.parametrize(("dataset", "first"), [(Stateful, 9), (Stream, 0)])
def test_only_a_dataset_without_state_is_read_again_on_resume_and_says_so(caplog, dataset, first):
    resumed = dataset()
    loader = DeviceLoader(loader_of(resumed))
    loader.load_state_dict(loop(DeviceLoader(loader_of(dataset())), 3).state)
    with caplog.at_level(logging.INFO):
        loop(loader)
    words = "resumes the stream by reading and discarding what was delivered"
    assert (words in caplog.text) == (resumed.reads[0] == 0)
    assert resumed.reads == list(range(first, COUNT))


def test_the_state_tells_what_was_delivered_though_all_was_read(reads_ahead):
    dataset = Stream()
    loader = DeviceLoader(loader_of(dataset))
    iterator = iter(loader)
    next(iterator)
    while len(dataset.reads) < COUNT:  # the reader needs nobody to continue
        threading.Event().wait(0.001)
    state = loader.state_dict()
    assert (state["epoch"], state["offset"], state["layers"]) == (0, SIZE, [[1, 1, [[SIZE, ANY, 0, None]]]])
    list(iterator)
    after = loader.state_dict()
    assert (after["epoch"], after["offset"]) == (1, 0)


@pytest.mark.parametrize("persistent", [True, False])
@stand_ins()
def test_the_epochs_after_a_resumed_one_are_those_of_an_uninterrupted_run(persistent):
    options = {"persistent_workers": persistent, "workers": 2}
    for dataset in (CutsItself, ByEpoch):
        whole = passes(SOLO, dataset, None, None, None, **options)[0]
        loader = DeviceLoader(loader_of(dataset(), 2, persistent_workers=persistent))
        loop(loader)
        loader.load_state_dict(loop(DeviceLoader(loader_of(dataset(), 2)), 3).state)
        rest, second = loop(loader), loop(loader, 3)
        loader.load_state_dict(second.state)
        rest_of_second, third = loop(loader), loop(loader)
        assert rest.batches == whole[0].batches[3:]
        assert second.batches + rest_of_second.batches == whole[1].batches
        assert third.batches == whole[2].batches


def test_a_state_of_another_kind_is_refused():
    state = DeviceLoader([[1]] * 4).state_dict()
    with pytest.raises(StateError, match="it is not a stream's"):
        DeviceLoader(loader_of(Stream())).load_state_dict({**state, "offset": 2})


class Other(Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100, 100 + COUNT))


@pytest.mark.parametrize("other", [Other(), Stream(2 * SIZE), Stream(0)], ids=["other", "shorter", "empty"])
def test_a_state_over_another_stream_is_refused(other):
    loader = DeviceLoader(loader_of(other))
    loader.load_state_dict(loop(DeviceLoader(loader_of(Stream())), 3).state)
    with pytest.raises(StateError, match="over another stream: what was delivered is not what is read"):
        list(loader)


class Reordered(Stream):
    """Keeps its first sample, and shuffles the others by a generator of its own."""

    def __init__(self, seed: int, cuts_itself: bool) -> None:
        super().__init__()
        self.seed, self.cuts_itself, self.numbers = seed, cuts_itself, range(COUNT)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.cuts_itself else None
        first, *others = self.numbers[info.id :: info.num_workers] if info else self.numbers
        yield from (first, *random.Random(self.seed).sample(others, len(others)))


class ReorderedShards(Reordered):
    def shard(self, num_shards: int, index: int) -> ReorderedShards:
        part = type(self)(self.seed, self.cuts_itself)
        part.numbers = self.numbers[index::num_shards]
        return part


CUTS = {
    "by stride": (lambda seed: Reordered(seed, False), {"workers": 2}),
    "by itself": (lambda seed: Reordered(seed, True), {"workers": 2}),
    "by shards": (lambda seed: ReorderedShards(seed, False), {"workers": 2}),
    "by the caller": (lambda seed: Reordered(seed, True), {"workers": 2, "already_sharded": True}),
    "in the loop's process": (lambda seed: ReorderedShards(seed, False), {}),
}


@pytest.mark.parametrize("cut", CUTS)
@stand_ins()
def test_resuming_in_another_order_is_refused_whoever_cuts_the_stream(cut):
    mode, (make, options) = THREADS_2, CUTS[cut]
    (whole,) = zip(*passes(mode, lambda: make(1), None, **options), strict=True)
    first = passes(mode, lambda: make(1), 3, **options)
    rest = passes(mode, lambda: make(1), None, state=through_json(first[0][0].state), **options)
    for expected, (before,), (after,) in zip(whole, first, rest, strict=True):
        assert before.batches + after.batches == expected.batches
    errors = refused(mode, lambda: make(2), None, state=first[0][0].state, **options)
    assert [type(error) for error in errors] == [StateError] * mode.ranks
    assert all(re.match("the state was saved over another stream: what was delivered", str(each)) for each in errors)


class Labelled(Reordered):
    """Gives a sample's number, to which `noise` adds a fraction, and its label."""

    def __init__(self, seed: int, cuts_itself: bool, labels: int, noise: float = 0) -> None:
        super().__init__(seed, cuts_itself)
        self.labels, self.noise = labels, noise

    def __iter__(self) -> Iterator[tuple[float, int]]:
        for number in super().__iter__():
            yield float(number) + self.noise, number % self.labels


@pytest.mark.parametrize(("cuts_itself", "workers"), [(False, 0), (False, 2), (True, 2)])
@stand_ins()
def test_other_values_are_compared_only_where_labels_tell_no_samples_apart(cuts_itself, workers):
    def resume(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[Any]:
        first, rest = (DeviceLoader(loader_of(Labelled(*each), workers)) for each in (before, after))
        rest.load_state_dict(through_json(loop(first, 3).state))
        return loop(rest).batches

    with pytest.raises(StateError, match="over another stream"):
        resume((1, cuts_itself, 1), (2, cuts_itself, 1))
    assert resume((1, cuts_itself, COUNT // 3), (1, cuts_itself, COUNT // 3, 0.5))


@pytest.mark.parametrize("dataset", [Stream, CutsItself, Sharded, Stateful])
@pytest.mark.parametrize(
    "plan",
    [
        [(THREADS_2, 2, 2), (SOLO, 1, 3), (THREADS_3, 2, 1), (SOLO, 0, None)],
        [(SOLO, 0, 2), (THREADS_3, 1, 1), (THREADS_2, 0, 1), (THREADS_2, 2, None)],
    ],
)
@stand_ins()
def test_the_parts_of_a_stream_are_carried_on_by_any_numbers(dataset, plan):
    taken: list[int] = []
    state = None
    for mode, workers, most in plan:
        found = passes(mode, dataset, most, workers=workers, state=state, size=2)
        taken += all_of(found)
        states = [{**each[0].state, "layers": 0} for each in found]
        assert all(each == states[0] for each in states), "the states of all ranks tell the same"
        state = through_json(found[0][0].state)
    assert sorted(taken) == list(range(COUNT))


@stand_ins()
def test_the_epoch_after_a_resume_elsewhere_is_cut_for_the_current_ranks():
    state = passes(THREADS_2, Sharded, 2, workers=2)[0][0].state
    found = passes(THREADS_3, Sharded, None, None, workers=1, state=state)
    assert found[1][1].batches == [[1, 4], [7, 10], [13, 16]] or all_of(found, 1) == list(range(COUNT))
    assert [len(each[1].batches) for each in found] == [len(found[0][1].batches)] * 3


@stand_ins()
def test_uneven_parts_are_said_once_with_who_carries_them(caplog):
    state = passes(THREADS_3, CutsItself, 1, workers=1)[0][0].state
    with caplog.at_level(logging.WARNING):
        passes(THREADS_2, CutsItself, None, workers=1, state=state)
    said = [each.getMessage() for each in caplog.records if "this epoch was cut into" in each.getMessage()]
    assert len(said) == 1
    assert "cut into 3 parts: 1 rank(s) read 2 and the others 1" in said[0]


ONE_WORKER = "the stream was cut by the numbers of loader workers: one reads it until the epoch ends"


@pytest.mark.parametrize(("before", "after"), [(THREADS_2, SOLO), (SOLO, THREADS_2)], ids=str)
def test_parts_that_loader_workers_have_cut_go_on_without_and_so_by_one(before, after, caplog):
    first = passes(before, CutsItself, 1, workers=2)
    with caplog.at_level(logging.WARNING):
        rest = passes(after, CutsItself, None, None, state=first[0][0].state)
    assert sorted(all_of(first) + all_of(rest)) == all_of(rest, 1) == list(range(COUNT))
    assert [each.getMessage() for each in caplog.records].count(ONE_WORKER) == 1


REMADE = "cannot make another rank's part again: give it a method shard(num_shards, index)"


class OfItsPlace(Stream):
    """Knows its rank from the beginning, and nothing that would make another rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = rank(), current_world().world_size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.rank, self.count, self.world_size)


@stand_ins()
def test_a_part_that_cannot_be_made_again_is_refused_with_the_protocol():
    state = passes(THREADS_2, OfItsPlace, 1, workers=1)[0][0].state
    for mode in (SOLO, THREADS_3):  # of three ranks, one has no part to read
        errors = refused(mode, OfItsPlace, None, workers=1, state=state)
        assert [type(error) for error in errors] == [StateError] * mode.ranks
        assert all(REMADE in str(error) for error in errors)
