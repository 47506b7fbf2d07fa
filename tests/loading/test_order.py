"""The order of an epoch: that of the user's sampler, as a function of seed and epoch, from any sample on."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from epochs import Numbers
from samplers import COUNT, Own, Sized, loader_of, orders, random_states
from streams import Stream
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unisono import DeviceLoader, IndexedSampler, current_world
from unisono.devices.randomness import seed_of
from unisono.loading.order import batches_of
from unisono.loading.registry import source_of

GENERATED: dict[str, Callable[[torch.Generator | None], Sampler]] = {
    "shuffle": lambda generator: RandomSampler(range(COUNT), generator=generator),
    "with replacement": lambda generator: RandomSampler(
        range(COUNT), replacement=True, num_samples=77, generator=generator
    ),
    "some": lambda generator: RandomSampler(range(COUNT), num_samples=7, generator=generator),
    "more than all": lambda generator: RandomSampler(range(COUNT), num_samples=77, generator=generator),
    "weighted": lambda generator: WeightedRandomSampler(
        [float(weight) for weight in range(COUNT)], 50, generator=generator
    ),
    "indexed": lambda generator: IndexedSampler(range(COUNT), generator),
    "subset": lambda generator: SubsetRandomSampler(range(3, COUNT, 3), generator=generator),
}
"""Samplers that draw from a generator."""


def one_by_one(draw: Callable[[], int]) -> Callable[[], Iterator[int]]:
    return lambda: (draw() for _ in range(COUNT))


GLOBAL: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randperm(COUNT).tolist(),
    "python": lambda: random.sample(range(COUNT), COUNT),
    "numpy": lambda: numpy.random.permutation(COUNT).tolist(),
    "torch, one by one": one_by_one(lambda: int(torch.randint(COUNT, ()))),
    "python, one by one": one_by_one(lambda: random.randrange(COUNT)),
    "numpy, one by one": one_by_one(lambda: int(numpy.random.randint(COUNT))),
}
"""Ways to draw from the process's generators."""


def shuffled(generator: torch.Generator | None = None) -> DataLoader:
    return DataLoader(Numbers(50), batch_size=4, shuffle=True, generator=generator)


@pytest.mark.parametrize("kind", GENERATED)
def test_a_sampler_gives_the_order_of_a_generator_with_the_same_seed(kind):
    for own in (None, torch.Generator().manual_seed(5)):
        sampler = GENERATED[kind](own)
        for epoch in range(2):
            generator = torch.Generator().manual_seed(seed_of(9, epoch))
            plain = list(GENERATED[kind](generator))
            assert list(itertools.chain(*batches_of(sampler, BatchSampler(sampler, 4, False), 9, epoch)[0])) == plain


@pytest.mark.parametrize("kind", GLOBAL)
def test_a_sampler_using_global_generators_depends_on_seed_and_epoch_only(kind):
    sampler = Own if "one by one" in kind else Sized
    first = orders(loader_of(sampler(GLOBAL[kind])), 3, seed=7)
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    assert orders(loader_of(sampler(GLOBAL[kind])), 3, seed=7) == first
    assert len({tuple(order) for order in first}) == 3
    assert {len(order) for order in first} == {COUNT}


@pytest.mark.parametrize("kind", [*GENERATED, *GLOBAL])
def test_the_process_generators_are_left_as_they_were(kind):
    sampler, num_workers = GENERATED[kind](None) if kind in GENERATED else Sized(GLOBAL[kind]), int(kind == "torch")
    before = random_states()
    orders(DataLoader(Numbers(COUNT), sampler=sampler, batch_size=4, num_workers=num_workers), 1)
    assert random_states() == before


def test_the_seed_is_that_of_the_loaders_generator_and_zero_without_one():
    by_generator = shuffled(torch.Generator().manual_seed(5))
    assert orders(by_generator, 2) == orders(shuffled(), 2, seed=5)
    assert orders(shuffled(), 2) == orders(shuffled(), 2, seed=0)
    own = DataLoader(Numbers(50), sampler=RandomSampler(range(50), generator=torch.Generator().manual_seed(5)))
    assert orders(own, 2) == orders(by_generator, 2)


class Subclass(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


def test_only_what_names_its_samples_by_index_is_cut_there():
    loaders = DataLoader(Numbers(3)), DataLoader(Numbers(3), batch_size=None), Subclass(Numbers(3)), [1, 2, 3]
    found = [type(source_of(loader, current_world(), 0, None)).__name__ for loader in loaders]
    assert found == ["IndexedSource", "ItemSource", "PlainSource", "PlainSource"]


@pytest.mark.parametrize("batch_size", [3, None])
def test_passes_begun_by_several_threads_at_once_are_each_complete(batch_size):
    loader = DataLoader(Numbers(20), batch_size=batch_size, shuffle=True)
    device_loader = DeviceLoader(loader)
    together = threading.Barrier(4)
    found: list[list[int]] = []

    def load() -> None:
        for _ in range(5):
            together.wait()
            batches = list(device_loader)
            found.append(torch.cat(batches).tolist() if batch_size else batches)

    threads = [threading.Thread(target=load) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many meetings as can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [sorted(order) for order in found] == [list(range(20))] * 20
    assert len({tuple(order) for order in found}) == 20


@pytest.mark.parametrize("name", ["shuffle", "weighted", "indexed", "stream"])
def test_a_default_device_elsewhere_is_none_of_the_orders_business(name):
    """Numbers on "meta" are none; on an accelerator two threads would work on one device."""

    dataset = Stream(COUNT) if name == "stream" else Numbers(100)
    sampler = None if name == "stream" else GENERATED[name](None)

    def found() -> list[int]:
        loader = DeviceLoader(DataLoader(dataset, batch_size=4, sampler=sampler), seed=3)
        return [number for batch in loader for number in batch.tolist()]

    expected = found()
    with torch.device("meta"):
        assert found() == expected
