"""Loaders of other kinds continue: iterables, batch samplers, samplers that shard, loaders with their own state."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from epochs import Bucketed, Numbers, counted, ranks_of, take, worlds
from faults import until
from resuming import SAMPLES, common_state, order, resumed, shuffled, take_items
from torch.utils.data import DataLoader, DistributedSampler

from unisono import DeviceLoader, ParallelLoader
from unisono.errors import StateError


def distributed(count: int, samples: int = 24, batch_size: int = 2) -> list[DeviceLoader]:
    """Each rank's loader with torch's DistributedSampler, which cuts the data by ranks."""
    loaders = []
    for world in worlds(count):
        sampler = DistributedSampler(range(samples), num_replicas=count, rank=world.rank, seed=3)
        data_loader = DataLoader(Numbers(samples), batch_size=batch_size, sampler=sampler)
        loaders.append(DeviceLoader(data_loader, world=world))
    return loaders


def interleaved(each_ranks: list[list[Any]]) -> list[int]:
    """In the order of all ranks, where rank r has every so manyth sample from r on."""
    own = [[sample for each in deliveries for sample in each.counted] for deliveries in each_ranks]
    return [sample for row in zip(*own, strict=True) for sample in row]


def test_a_loader_that_cuts_itself_resumes_only_on_a_dividing_rank_count():
    whole = interleaved([take(loader) for loader in distributed(2)])
    assert sorted(whole) == list(range(24))
    for count in (1, 2, 4, 8, 3):
        first = distributed(2)
        delivered = interleaved([take(loader, 2) for loader in first])
        state = common_state(first)
        assert (state["offset"], len(delivered)) == (8, 8)
        if count == 3:
            with pytest.raises(StateError, match=r"offset 8 is no multiple of world_size=3, .* own sampler cuts"):
                resumed(distributed(count), state)
            continue
        second = resumed(distributed(count, batch_size=3), state)
        assert delivered + interleaved([take(loader) for loader in second]) == whole


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
            words = f"the loop reads and discards the first {done} samples of list: it has no state_dict"
            assert (words in caplog.text) == (done > 0)
            assert counted([take(loader) for loader in second]) == list(range(20))


def test_any_iterable_goes_on_with_batches_of_another_size():
    for before, after, rounds in ((3, 2, 0), (3, 2, 1), (2, 5, 3), (4, 7, 4)):
        first = ranks_of(list(torch.arange(20).split(before)), 1)
        delivered = counted([take(loader, rounds) for loader in first])
        second = resumed(ranks_of(list(torch.arange(20).split(after)), 1), common_state(first))
        assert delivered + counted([take(loader) for loader in second]) == list(range(20))


def test_the_first_batchs_size_outlives_a_resume():
    for options in ({"tail": "pad"}, {"fixed_batch_size": True}):
        batches = list(torch.arange(11).split(4))
        whole = [batch.tolist() for batch in DeviceLoader(batches, **options)]
        first = DeviceLoader(batches, **options)
        taken = [batch.batch for batch in take(first, 2)]
        second = DeviceLoader(batches, **options)
        second.load_state_dict(first.state_dict())
        assert taken + [batch.tolist() for batch in second] == whole


def test_a_loader_of_this_package_is_not_cut_again():
    for loader in (DeviceLoader([1]), ParallelLoader([1], ["cpu"]), iter(DeviceLoader([1]))):
        with pytest.raises(TypeError, match="which is sharded already; pass its DataLoader"):
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


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_a_loader_with_a_state_of_its_own_goes_on_by_it(rounds, reads_ahead):
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
    assert len(loader.starts) == 1
    assert loader.starts[0] < max(2 * rounds, 1), "the last batch at least is read again, and compared"
    assert counted([take(second)]) == whole[1]
    assert str(state) == str(kept)


class Heavy(Remembering):
    """Its state takes as long as many batches."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {**super().state_dict(), "all": torch.zeros(1 << 22)}


def test_a_heavy_state_is_not_copied_for_each_batch():
    loader = Heavy()
    batches = len([*DeviceLoader(loader)])
    assert loader.asked < batches


class Forgetful(Remembering):
    """Continues at the place of its state, in the order of another epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch += 7


def test_a_loader_that_continues_in_another_order_is_noticed(caplog):
    first, second = DeviceLoader(Remembering()), DeviceLoader(Forgetful())
    for _ in itertools.islice(first, 2):
        pass
    second.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING):
        take(second)
    assert "Forgetful does not continue from its state_dict as it did" in caplog.text


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
