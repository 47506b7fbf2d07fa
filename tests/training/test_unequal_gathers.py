"""What a rank gathers unlike the others is an error on all ranks: no hang, no abort, no memory that nobody wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, THREADS_3, each_of, scaling

import unisono

pytestmark = pytest.mark.any_family

peers = each_of(scaling(THREADS_3, PROCESSES_2))


# What the last rank gathers, while the others gather float32[2, 3]; and how it is named.
UNEQUAL: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "more rows": (lambda: torch.ones(5, 3), "float32[5, 3]"),
    "other columns of as many elements": (lambda: torch.ones(3, 2), "float32[3, 2]"),
    "no rows": (lambda: torch.ones(0, 3), "float32[0, 3]"),
    "no dimension": (lambda: torch.tensor(1.0), "float32[]"),
    "a wider type": (lambda: torch.ones(2, 3, dtype=torch.float64), "float64[2, 3]"),
    "a type of the same width": (lambda: torch.ones(2, 3, dtype=torch.int32), "int32[2, 3]"),
}


def is_last() -> bool:
    return unisono.rank() == unisono.world_size() - 1


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_tensors_are_named_on_all_ranks(peers, name):
    make, call = UNEQUAL[name]
    for text in peers.told(lambda: unisono.all_gather(make() if is_last() else torch.ones(2, 3))):
        assert "CollectiveMismatchError" in text
        assert "called all_gather(float32[2, 3])" in text
        assert f"rank {peers.ranks - 1} called all_gather({call})" in text
        assert "all_gather_samples" in text


@pytest.mark.parametrize("value", [None, [1.0]], ids=str)
def test_a_non_tensor_on_one_rank_is_its_error_and_the_others_learn_of_it(peers, value):
    def gather() -> Any:
        return unisono.all_gather(value if is_last() else torch.ones(2, 3))

    with pytest.raises(TypeError, match=f"all_gather takes a tensor, got a {type(value).__name__}"):
        peers.run(gather)

    *others, last = peers.told(gather)
    assert last.startswith("TypeError: all_gather takes a tensor")
    for rank, text in enumerate(others):
        assert text.startswith(f"BrokenWorldError: rank {rank} cannot complete all_gather(float32[2, 3]): ")
        assert f"rank {peers.ranks - 1} has left this world" in text


def test_equal_empty_tensors_and_numbers_are_gathered(peers):
    shapes = [(), (0,), (0, 3), (4, 0)]
    for found in peers.run(lambda: [unisono.all_gather(torch.ones(shape)) for shape in shapes]):
        number, *empty = found
        assert number.tolist() == [1.0] * peers.ranks
        assert [tuple(each.shape) for each in empty] == [(0,), (0, 3), (4 * peers.ranks, 0)]


def test_a_gather_of_samples_with_other_columns_on_one_rank_is_named(peers):
    def gather() -> Any:
        return unisono.all_gather_samples(torch.ones(2, 4 if is_last() else 3), 2)

    for text in peers.told(gather):
        assert "CollectiveMismatchError" in text
        call = r"all_gather_samples\(\) in gather \(.*, which calls all_gather\(float32\[2, 4\]\)"
        assert re.search(rf"rank {peers.ranks - 1} called {call}", text)


def one_of_many(columns: int) -> dict[str, torch.Tensor]:
    """Longer in words than a message shows."""
    return {f"column {each}": torch.ones(2) for each in range(columns)}


# What the last rank gathers, while the others gather tensors of the same shapes.
MISPLACED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "another order": (lambda: one_of_many(2), lambda: dict(reversed(one_of_many(2).items()))),
    "another name at the end of many": (lambda: one_of_many(40), lambda: {**one_of_many(39), "column": torch.ones(2)}),
    "a list for a tuple": (lambda: (torch.ones(2), torch.ones(2)), lambda: [torch.ones(2), torch.ones(2)]),
}


GATHERS: dict[str, Callable[[Any], Any]] = {
    "all_gather_samples": lambda values: unisono.all_gather_samples(values, 2),
    "functional": lambda values: unisono.functional.all_gather_samples(values),
}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((call, "another order") for call in GATHERS),
        *(("all_gather_samples", name) for name in MISPLACED if name != "another order"),
    ],
)
def test_equal_tensors_in_another_structure_are_told_on_all_ranks(peers, call, name):
    make, make_other = MISPLACED[name]

    for text in peers.told(lambda: GATHERS[call]((make_other if is_last() else make)())):
        assert "CollectiveMismatchError" in text


def test_another_dimension_of_one_rank_is_told(peers):
    def gather() -> Any:
        return unisono.all_gather_samples(torch.ones(2, 2), 2, dim=int(is_last()))

    for text in peers.told(gather):
        assert "CollectiveMismatchError" in text
        assert "along 0" in text
        assert "along 1" in text

    def pad() -> Any:
        return unisono.Accelerator().pad_across_processes(torch.ones(2, 2 + is_last()), dim=int(is_last()))

    for text in peers.told(pad):
        assert "CollectiveMismatchError" in text
