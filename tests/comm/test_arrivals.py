"""Who has come to which collective, as each kind of store can tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.arrivals import Arrivals, SharedArrivals, StoredArrivals, arrivals_in

SIZE = 3


@pytest.fixture(params=["shared memory", "a store"])
def seat(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Arrivals]:
    """Makes the arrivals of a rank; what one notes the others read."""
    store = dist.HashStore()
    if request.param == "a store":
        return lambda rank: StoredArrivals(store, rank, SIZE)
    return lambda rank: SharedArrivals(str(tmp_path / "arrived"), rank, SIZE)


def test_whoever_has_noted_nothing_is_missing(seat):
    assert seat(0).missing(1) == [0, 1, 2]


def test_a_rank_that_has_come_is_not_missing_nor_one_that_has_gone_on(seat):
    seats = [seat(rank) for rank in range(SIZE)]
    for each in seats:
        each.note(1)
    seats[0].note(2)
    seats[2].note(3)
    assert [each.missing(2) for each in seats] == [[1]] * SIZE
    assert seats[1].missing(1) == []


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=9), st.integers(0, 2**62))
def test_missing_are_exactly_those_whose_number_is_smaller(tmp_path_factory, numbers, number):
    path = str(tmp_path_factory.mktemp("rendezvous") / "arrived")
    seats = [SharedArrivals(path, rank, len(numbers)) for rank in range(len(numbers))]
    for each, entered in zip(seats, numbers, strict=True):
        each.note(entered)
    assert seats[0].missing(number) == [rank for rank, entered in enumerate(numbers) if entered < number]


def test_they_are_noted_beside_a_file_and_in_a_server_s_store_for_checked_calls_only(tmp_path: Path):
    file = dist.FileStore(str(tmp_path / "store"), 1)
    for is_checked in (False, True):
        assert type(arrivals_in(file, 0, 1, is_checked)) is SharedArrivals
    assert (tmp_path / "store.arrived").stat().st_size == 8
    assert type(arrivals_in(dist.HashStore(), 0, 1, True)) is StoredArrivals
    assert arrivals_in(dist.HashStore(), 0, 1, False) is None
    assert arrivals_in(None, 0, 1, True) is None
