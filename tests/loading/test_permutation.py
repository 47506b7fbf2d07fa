"""An order that is computed place by place is a permutation, looks shuffled, and costs the same wherever it is read."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sized
from itertools import islice, pairwise, permutations

import pytest
from epochs import ranks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from unisono import DeviceLoader, IndexedSampler
from unisono.loading.permutation import Permutation

MANY = 10**10
KEYS = st.integers(0, 2**63 - 1)


class Endless(Dataset):
    """Sample i is the number i, of ten thousand millions."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> int:
        return index


def chi_square(counts: Counter, cells: Sized) -> float:
    """How far the counts are from equal ones, in standard deviations of the chi-square distribution."""
    expected, freedom = counts.total() / len(cells), len(cells) - 1
    found = sum((counts[cell] - expected) ** 2 / expected for cell in cells)
    return (found - freedom) / (2 * freedom) ** 0.5


@settings(max_examples=30)
@given(st.integers(0, 700), KEYS, st.integers(1, 100))
def test_every_index_comes_once_and_parts_agree_with_the_whole(length, key, part):
    whole = Permutation(length, key)
    order = list(whole)
    assert sorted(order) == list(range(length))
    assert [index for begin in range(0, length, part) for index in whole[begin : begin + part]] == order
    assert [whole[place] for place in range(0, length, part)] == order[::part] == list(whole[::part])


@given(st.integers(1, 2**62), KEYS, st.data())
def test_indices_of_any_length_are_below_it_and_differ(length, key, data):
    places = data.draw(st.lists(st.integers(0, length - 1), max_size=20, unique=True))
    whole = Permutation(length, key)
    indices = {whole[place] for place in places}
    assert all(0 <= index < length for index in indices)
    assert len(indices) == len(places)


def test_all_orders_of_few_are_equally_frequent():
    counts = Counter(tuple(Permutation(4, key)) for key in range(240))
    assert chi_square(counts, list(permutations(range(4)))) < 4


@pytest.mark.parametrize("length", [50, 129, 1000, MANY])
def test_pairs_of_neighbours_fall_into_all_cells_equally(length):
    """100 cells: the tenths of the range in which an index and the next one are."""

    def cells(order: Iterable[int]) -> Counter:
        tenths = (index * 10 // length for index in order)
        return Counter(pairwise(tenths))

    keys = range(20_000 // min(length, 1000))
    counts = sum((cells(islice(Permutation(length, key), 1000)) for key in keys), Counter())
    # Of two different indices fewer are in one tenth: in this many pairs, a short order shows it.
    seen = Counter({cell: count for cell, count in counts.items() if cell[0] != cell[1]})
    assert chi_square(seen, list(permutations(range(10), 2))) < 4
    assert counts.keys() == {(first, second) for first in range(10) for second in range(10)}


def test_an_epoch_of_ten_billion_resumes_on_other_ranks_in_constant_memory():
    def load(loader: DeviceLoader, state: dict, batches: int) -> list[list[int]]:
        loader.load_state_dict(state)
        return [batch.tolist() for batch in islice(loader, batches)]

    data = DataLoader(Endless(), 4, sampler=IndexedSampler(Endless()))
    tracemalloc.start()
    (alone,) = ranks_of(data, 1, prefetch=0)
    state = {**alone.state_dict(), "epoch": 2, "offset": MANY // 2 + 1}
    expected = load(alone, state, 12)
    parts = [load(loader, {**state, "offset": MANY // 2 + 13}, 3) for loader in ranks_of(data, 3, prefetch=0)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [batch for step in zip(*parts, strict=True) for batch in step] == expected[3:]
    assert len({index for batch in expected for index in batch}) == 48
    assert peak < 5e6
