"""Samplers and batch samplers of one's own are followed, whatever they yield."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from epochs import Bucketed, Numbers, chunks, counted, dealt, ranks_of, take
from samplers import COUNT, Own, Sized, loader_of, orders, random_states
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from unisono import DeviceLoader
from unisono.devices.randomness import seed_of


class Drawing:
    """A batch sampler of one's own with a generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT, generator=self.generator).tolist()
        return iter([order[:10], order[10:]])


@pytest.mark.parametrize("own", [None, torch.Generator().manual_seed(3)], ids=["without a generator", "with one"])
def test_a_custom_sampler_draws_from_the_epochs_generator_not_its_own(own):
    state = own.get_state() if own else None
    loader = DataLoader(Numbers(COUNT), batch_sampler=Drawing(own))
    found = orders(loader, 2, seed=4)
    plain = [torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed_of(4, epoch))) for epoch in range(2)]
    assert found == [order.tolist() for order in plain]
    assert own is None or torch.equal(own.get_state(), state)


class Paired(BatchSampler):
    """A batch sampler over another sampler: each batch twice."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield from (batch, batch)

    def __len__(self) -> int:
        return 2 * super().__len__()


def test_the_sampler_within_a_batch_sampler_of_ones_own_is_seeded():
    loader = DataLoader(Numbers(COUNT), batch_sampler=Paired(RandomSampler(range(COUNT)), 5, False))
    plain = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(seed_of(2, 0)))
    assert orders(loader, 1, seed=2) == [[each for batch in chunks(list(plain), 5) for each in batch * 2]]


@pytest.mark.parametrize(
    "kind",
    [list, tuple, torch.tensor, numpy.array, iter, lambda group: dict.fromkeys(group).keys()],
    ids=["list", "tuple", "tensor", "array", "iterator", "keys"],
)
def test_a_batch_sampler_of_ones_own_is_followed_whatever_its_batches_are(kind):
    groups = [[5, 1, 4], [0], [2, 3], [9, 8, 7, 6], [11, 10, 12]]
    loader = DataLoader(Numbers(13), batch_sampler=Bucketed([kind(group) for group in groups]))
    assert dealt(loader, 1).global_batches == groups


@pytest.mark.parametrize(("sampler", "is_random"), [(Own, True), (Sized, False)])
def test_an_endless_sampler_makes_the_same_endless_epoch_on_every_rank(sampler, is_random):
    def endless() -> Iterator[int]:
        order = torch.randperm(COUNT).tolist() if is_random else list(range(COUNT))
        return itertools.cycle(order)

    loader = DataLoader(Numbers(COUNT), sampler=sampler(endless), batch_size=7)
    each_ranks = []
    for rank in ranks_of(loader, 2):
        torch.manual_seed(len(each_ranks))
        each_ranks.append(take(rank, 10))
    found = counted(each_ranks)
    assert found == (found[:COUNT] * 5)[:140]
    assert sorted(found[:COUNT]) == list(range(COUNT))


def test_a_sampler_that_gives_more_than_its_length_or_less_is_followed():
    assert orders(loader_of(Sized(lambda: range(5))), 1) == [[*range(5)]]
    longer = [*range(COUNT), *range(COUNT)]
    assert orders(loader_of(Sized(lambda: longer)), 1) == [longer]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_raises_leaves_generators_and_epoch_unchanged(num_workers):
    def broken() -> Iterator[int]:
        torch.rand(3)
        yield 0
        raise OSError("no order today")

    dataset = Numbers(COUNT)
    loader = DataLoader(dataset, sampler=Own(broken), num_workers=num_workers, persistent_workers=num_workers > 0)
    device_loader = DeviceLoader(loader)
    before = random_states()
    for _ in range(2):
        with pytest.raises(OSError, match="no order today"):
            next(iter(device_loader))
    assert random_states() == before
    assert device_loader.epoch == 0
    assert not dataset.asked


class Unsized(Dataset):
    """A dataset that does not know its length; with a sampler of one's own it need not."""

    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_without_length_is_read_by_a_sampler_of_ones_own():
    loader = DeviceLoader(DataLoader(Unsized(), sampler=Own(lambda: range(7)), batch_size=3))
    assert [each.batch for each in take(loader)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert loader.state_dict()["length"] is None
    with pytest.raises(TypeError, match="has no len"):
        len(loader)
    sized = DataLoader(Unsized(), batch_sampler=Bucketed([[3, 4], [5]]))
    assert [each.batch for each in take(DeviceLoader(sized))] == [[3, 4], [5]]
    assert len(DeviceLoader(sized)) == 2


def test_each_index_of_a_loader_without_batches_may_be_a_batch():
    sampler = BatchSampler(RandomSampler(range(10)), 3, drop_last=False)

    class Bulk(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index)

    each_ranks = [take(rank) for rank in ranks_of(DataLoader(Bulk(10), sampler=sampler, batch_size=None), 2, seed=1)]
    plain = RandomSampler(range(10), generator=torch.Generator().manual_seed(seed_of(1, 0)))
    assert counted(each_ranks) == list(plain)
