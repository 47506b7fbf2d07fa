"""The order of an epoch: that of the user's sampler, as a function of seed and epoch, from any sample on."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_sharer
from typing import Any

import numpy
import pytest
import torch
from epochs import Bucketed, Numbers, chunks, counted, dealt, ranks_of, take
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unisono import DeviceLoader
from unisono.loaders import order as order_module
from unisono.loaders.indexed import IndexedSource, is_indexed
from unisono.loaders.order import Batches
from unisono.loaders.sharding import Rule
from unisono.randomness import seed_of
from unisono.world import World, thread_worlds

COUNT = 30
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
    "subset": lambda generator: SubsetRandomSampler(range(3, COUNT, 3), generator=generator),
}
"""Samplers that draw from a generator."""


class Own(Sampler):
    """A sampler of one's own: gives what `draw()` returns."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


class Sized(Own):
    def __len__(self) -> int:
        return COUNT


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


def orders(loader: DataLoader, epochs: int, seed: int | None = None, most: int | None = None) -> list[list[int]]:
    """The samples of a few epochs, each up to a number."""
    source = IndexedSource(loader, seed)
    found = []
    for _ in range(epochs):
        pieces = source.begin(Rule(), lambda samples: None).pieces
        found.append(list(itertools.islice((each for (piece,) in pieces for each in piece.batch.tolist()), most)))
    return found


def loader_of(sampler: Any, batch_size: int = 4) -> DataLoader:
    return DataLoader(Numbers(COUNT), sampler=sampler, batch_size=batch_size)


def shuffled(generator: torch.Generator | None = None) -> DataLoader:
    return DataLoader(Numbers(50), batch_size=4, shuffle=True, generator=generator)


def random_states() -> list[Any]:
    _, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest]


# A function of seed and epoch.


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.parametrize("own", [None, 5], ids=["without a generator", "with one"])
def test_a_sampler_gives_the_order_that_it_gives_itself_by_a_generator_seeded_so(kind, own):
    sampler = GENERATED[kind](torch.Generator().manual_seed(own) if own else None)
    for epoch in range(3):
        generator = torch.Generator().manual_seed(seed_of(9, epoch))
        plain = list(GENERATED[kind](generator))
        assert list(itertools.chain(*Batches(sampler, BatchSampler(sampler, 4, False), 9, epoch))) == plain


@pytest.mark.parametrize("kind", GENERATED)
def test_a_new_epoch_is_a_new_order_and_a_new_loader_draws_the_same_again(kind):
    first = orders(loader_of(GENERATED[kind](None)), 3, seed=7)
    torch.manual_seed(random.getrandbits(32))
    assert orders(loader_of(GENERATED[kind](None)), 3, seed=7) == first
    others = orders(loader_of(GENERATED[kind](None)), 3, seed=8)
    assert len({tuple(order) for order in first + others}) == 6


@pytest.mark.parametrize("kind", GLOBAL)
@pytest.mark.parametrize("sampler", [Own, Sized])
def test_a_sampler_that_draws_from_the_process_is_a_function_of_seed_and_epoch_too(kind, sampler):
    first = orders(loader_of(sampler(GLOBAL[kind])), 3, seed=7)
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    assert orders(loader_of(sampler(GLOBAL[kind])), 3, seed=7) == first
    assert len({tuple(order) for order in first}) == 3
    assert {len(order) for order in first} == {COUNT}


@pytest.mark.parametrize("kind", [*GENERATED, *GLOBAL])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_process_generators_are_left_as_they_were(kind, num_workers):
    sampler = GENERATED[kind](None) if kind in GENERATED else Sized(GLOBAL[kind])
    before = random_states()
    orders(DataLoader(Numbers(COUNT), sampler=sampler, batch_size=4, num_workers=num_workers), 1)
    assert random_states() == before


def test_the_seed_is_that_of_the_loaders_generator_and_zero_without_one():
    by_generator = shuffled(torch.Generator().manual_seed(5))
    assert orders(by_generator, 2) == orders(shuffled(), 2, seed=5)
    assert orders(shuffled(), 2) == orders(shuffled(), 2, seed=0)
    own = DataLoader(Numbers(50), sampler=RandomSampler(range(50), generator=torch.Generator().manual_seed(5)))
    assert orders(own, 2) == orders(by_generator, 2)


def test_the_users_loader_is_not_touched():
    loader = shuffled(torch.Generator().manual_seed(5))
    before, state = dict(vars(loader)), loader.generator.get_state()
    plain = [batch.tolist() for batch in shuffled(torch.Generator().manual_seed(5))]
    orders(loader, 2)
    assert vars(loader) == before
    assert torch.equal(loader.generator.get_state(), state)
    assert [batch.tolist() for batch in loader] == plain


def test_an_order_without_shuffling_stays():
    assert orders(DataLoader(Numbers(9), batch_size=2), 2) == [list(range(9))] * 2
    assert orders(DataLoader(Numbers(9), batch_size=2, sampler=[3, 1, 4, 1, 5]), 2) == [[3, 1, 4, 1, 5]] * 2


def test_a_weighted_sampler_keeps_its_weights():
    weights = [0.0, 1.0, 3.0]
    (drawn,) = orders(DataLoader(Numbers(3), sampler=WeightedRandomSampler(weights, 4000), batch_size=64), 1)
    counts = Counter(drawn)
    assert counts[0] == 0
    assert len(drawn) == 4000
    assert 2.5 < counts[2] / counts[1] < 3.5  # 3 to 1; five standard deviations are about 0.4


# Samplers of one's own.


class Epochal(Own):
    """Gives the epoch that it was told, thrice."""

    def __init__(self) -> None:
        super().__init__(lambda: [self.epoch] * 3)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_sampler_with_set_epoch_is_told_each_epoch():
    assert orders(loader_of(Epochal()), 3) == [[0] * 3, [1] * 3, [2] * 3]
    within = BatchSampler(Epochal(), 2, drop_last=False)
    assert orders(DataLoader(Numbers(9), batch_sampler=within), 2) == [[0] * 3, [1] * 3]


class Drawing:
    """A batch sampler of one's own with a generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT, generator=self.generator).tolist()
        return iter([order[:10], order[10:]])


@pytest.mark.parametrize("own", [None, torch.Generator().manual_seed(3)], ids=["without a generator", "with one"])
def test_the_generator_of_a_sampler_of_ones_own_is_that_of_the_epoch_and_its_own_stays(own):
    state = own.get_state() if own else None
    loader = DataLoader(Numbers(COUNT), batch_sampler=Drawing(own))
    found = orders(loader, 2, seed=4)
    plain = [torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed_of(4, epoch))) for epoch in range(2)]
    assert found == [order.tolist() for order in plain]
    assert own is None or torch.equal(own.get_state(), state)


@dataclasses.dataclass(frozen=True)
class Frozen:
    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT, generator=self.generator).tolist())

    def __len__(self) -> int:
        return COUNT


class Locked(Frozen):
    @property
    def generator(self) -> None:
        """There is none, and it cannot be set."""


def test_a_sampler_whose_generator_cannot_be_set_is_seeded_all_the_same():
    plain = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed_of(4, 0))).tolist()
    for sampler in (Frozen(), object.__new__(Locked)):
        assert orders(loader_of(sampler), 1, seed=4) == [plain]


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
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_of_ones_own_is_followed_whatever_its_batches_are(kind, num_workers):
    groups = [[5, 1, 4], [0], [2, 3], [9, 8, 7, 6], [11, 10, 12]]
    loader = DataLoader(Numbers(13), batch_sampler=Bucketed([kind(group) for group in groups]), num_workers=num_workers)
    assert dealt(loader, 1).global_batches == groups
    resource_sharer.stop()  # it sent the tensors, and keeps a socket open for more


def test_batches_of_ones_own_go_to_the_ranks_in_turn():
    groups = [[5, 1, 4], [0], [2, 3], [9, 8, 7, 6], [11, 10, 12]]
    found = dealt(DataLoader(Numbers(13), batch_sampler=Bucketed(groups)), 2)
    assert [[each.counted for each in deliveries] for deliveries in found.rounds] == [
        [[5, 1, 4], [0]],
        [[2, 3], [9, 8, 7, 6]],
        [[11, 10], [12]],
    ]


@pytest.mark.parametrize("sampler", [Own, Sized], ids=["without length", "with length"])
@pytest.mark.parametrize("is_random", [False, True])
def test_an_endless_sampler_makes_an_endless_epoch_and_the_same_on_every_rank(sampler, is_random):
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


class Long(Own):
    """Tells a length beyond all bounds, as samplers without an end do."""

    def __len__(self) -> int:
        return 1 << 60


@pytest.mark.parametrize("sampler", [Own, Long])
def test_no_more_is_drawn_of_a_sampler_without_an_end_than_is_needed_to_seed_it(sampler, monkeypatch):
    monkeypatch.setattr(order_module, "_AT_ONCE", 100)
    drawn = []

    def endless() -> Iterator[Any]:
        for number in itertools.count():
            drawn.append(number)
            yield number % COUNT

    batches = Batches(endless_sampler := sampler(endless), BatchSampler(endless_sampler, 4, False), 0, 0, length=COUNT)
    most = COUNT if sampler is Own else 100
    assert len(drawn) == most + 1
    first = list(itertools.islice(batches, 50))
    assert list(itertools.chain(*first)) == [number % COUNT for number in range(200)]


def test_no_more_samples_than_the_dataset_has_are_drawn_at_once_of_a_batch_sampler_without_length():
    drawn = []

    def endless() -> Iterator[list[int]]:
        for number in itertools.count():
            drawn.append(number)
            yield [number] * 10

    batches = Batches(None, Own(endless), 0, 0, length=COUNT)
    assert len(drawn) == COUNT // 10 + 1
    assert list(itertools.islice(batches, 5)) == [[number] * 10 for number in range(5)]


def test_a_sampler_that_gives_more_than_its_length_or_less_is_followed():
    assert orders(loader_of(Sized(lambda: range(5))), 1) == [[*range(5)]]
    longer = [*range(COUNT), *range(COUNT)]
    assert orders(loader_of(Sized(lambda: longer)), 1) == [longer]


def test_what_drop_last_leaves_out_is_known_at_the_end_where_no_length_is():
    batches = Batches(sampler := Own(lambda: range(11)), BatchSampler(sampler, 4, True), 0, 0)
    assert list(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches.left_out == 3
    found = dealt(DataLoader(Numbers(11), sampler=Own(lambda: range(11)), batch_size=4, drop_last=True), 2, tail="drop")
    assert (found.global_batches, found.left_out) == ([list(range(8))], [2, 1])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_raises_leaves_the_generators_and_the_epoch_as_they_were(num_workers):
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


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_sampler_that_raises_late_does_so_behind_what_came_before(num_workers):
    def late() -> Iterator[int]:
        yield from itertools.chain(range(COUNT), range(COUNT))
        raise OSError("no more today")

    loader = DeviceLoader(DataLoader(Numbers(COUNT), sampler=Own(late), batch_size=5, num_workers=num_workers))
    found = []
    with pytest.raises(OSError, match="no more today"):
        for batch in loader:
            found.extend(batch.tolist())
    assert found == [*range(COUNT)] * 2


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


def test_a_loader_without_batches_keeps_seed_and_epoch_on_every_rank():
    def load(loader: DeviceLoader, rank: int) -> list[list[int]]:
        torch.manual_seed(rank)
        found = []
        for _ in range(2):
            iterator = iter(loader)
            found.append([sample for sample in iterator if iterator.valid_samples != 0])
        return found

    loader = DataLoader(Numbers(11), batch_size=None, shuffle=True)
    each_ranks = [load(each, rank) for rank, each in enumerate(ranks_of(loader, 2, seed=4))]
    first, second = ([each[epoch] for each in each_ranks] for epoch in range(2))
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(11))
    assert first != second


# From any sample on.


@given(
    samples=st.integers(0, 50),
    size=st.integers(1, 7),
    offset=st.integers(0, 60),
    drop_last=st.booleans(),
    is_sized=st.booleans(),
)
def test_a_late_beginning_is_the_rest_of_the_order_in_whole_batches(samples, size, offset, drop_last, is_sized):
    order = list(range(samples))
    sampler: Any = SequentialSampler(order) if is_sized else Own(lambda: order)
    batches = Batches(sampler, BatchSampler(sampler, size, drop_last), 0, 0, offset)
    expected = chunks(order[offset:], size)
    left_out = len(expected.pop()) if drop_last and expected and len(expected[-1]) < size else 0
    assert list(batches) == expected
    assert batches.left_out == left_out
    assert batches.nominal == size
    assert batches.samples == (sum(map(len, expected)) if is_sized or not samples else None)


@given(sizes=st.lists(st.integers(0, 5), max_size=12), offset=st.integers(0, 40))
def test_a_late_beginning_cuts_a_batch_of_ones_own(sizes, offset):
    bounds = list(itertools.accumulate(sizes, initial=0))
    own = [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]
    batches = Batches(None, Bucketed(own), 0, 0, offset)
    expected = [[each for each in batch if each >= offset] for batch in own]
    assert list(batches) == [batch for batch in expected if batch]
    assert (batches.nominal, batches.samples) == (None, None)


def test_a_late_beginning_draws_the_order_and_loads_nothing_twice():
    dataset = Numbers(1000)
    source = IndexedSource(DataLoader(dataset, shuffle=True, batch_size=4), seed=1)
    source.seek(0, {"offset": 996}, Rule())
    ((last,),) = source.begin(Rule(), lambda samples: None).pieces
    assert dataset.asked == 4
    plain = RandomSampler(range(1000), generator=torch.Generator().manual_seed(seed_of(1, 0)))
    assert last.batch.tolist() == list(plain)[996:]


# Who is cut at its indices.


class Subclass(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_only_what_names_its_samples_by_index_is_cut_there():
    assert is_indexed(DataLoader(Numbers(3)))
    assert is_indexed(DataLoader(Numbers(3), batch_size=None))
    assert not is_indexed(Subclass(Numbers(3)))
    assert not is_indexed(DataLoader(Stream()))
    assert not is_indexed([1, 2, 3])


def test_what_is_kept_of_a_loader_goes_with_it():
    loader = DataLoader(Numbers(4))
    list(DeviceLoader(loader))
    gone = threading.Event()
    weakref.finalize(loader, gone.set)
    del loader
    gc.collect()
    assert gone.is_set()


@pytest.mark.parametrize("batch_size", [3, None])
def test_passes_begun_by_several_threads_at_once_are_each_complete(batch_size):
    loader = DataLoader(Numbers(20), batch_size=batch_size, shuffle=True)
    device_loader = DeviceLoader(loader)
    together = threading.Barrier(4)
    found: list[list[int]] = []

    def load() -> None:
        for _ in range(10):
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
    assert [sorted(order) for order in found] == [list(range(20))] * 40
    assert len({tuple(order) for order in found}) == 40


def test_ranks_on_threads_that_draw_at_once_draw_the_same():
    class Drawn(Sampler):
        def __len__(self) -> int:
            return 500

        def __iter__(self):
            return iter([random.randrange(500) for _ in range(500)])

    loader = DataLoader(Numbers(500), batch_size=10, sampler=Drawn())
    state = random.getstate()

    def draw(world: World) -> list[int]:
        return [sample for batch in DeviceLoader(loader, world=world) for sample in batch.tolist()]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(draw, thread_worlds([torch.device("cpu", rank) for rank in range(4)])))
    rounds = itertools.zip_longest(*(chunks(each, 10) for each in found), fillvalue=[])
    order = [sample for each in rounds for part in each for sample in part]
    alone = DeviceLoader(DataLoader(Numbers(500), 10, sampler=Drawn()))
    assert Counter(order) == Counter(sample for batch in alone for sample in batch.tolist())
    assert random.getstate() == state


@pytest.mark.parametrize("name", [*GENERATED, "stream"])
def test_a_default_device_elsewhere_is_none_of_the_orders_business(name):
    """Numbers on "meta" are none; on an accelerator two threads would work on one device."""

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(COUNT))

    dataset = Stream() if name == "stream" else Numbers(100)
    sampler = None if name == "stream" else GENERATED[name](None)

    def found() -> list[int]:
        loader = DeviceLoader(DataLoader(dataset, batch_size=4, sampler=sampler), seed=3)
        return [number for batch in loader for number in batch.tolist()]

    expected = found()
    with torch.device("meta"):
        assert found() == expected
