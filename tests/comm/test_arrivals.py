"""Who has come to which collective, and what it does there, as each kind of store can tell."""

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


def test_whoever_has_noted_nothing_is_missing_and_has_done_nothing(seat):
    assert seat(0).missing(1) == [0, 1, 2]
    assert seat(0).last_action(1) == ""


def test_a_rank_that_has_come_is_not_missing_nor_one_that_has_gone_on(seat):
    seats = [seat(rank) for rank in range(SIZE)]
    for each in seats:
        each.note(1, "called barrier()")
    seats[0].note(2, "called barrier()")
    seats[2].note(3, "called sum()")
    assert [each.missing(2) for each in seats] == [[1]] * SIZE
    assert seats[1].missing(1) == []
    assert [seats[1].last_action(rank) for rank in range(SIZE)] == [
        "called barrier()",
        "called barrier()",
        "called sum()",
    ]


def shared(directory: Path, size: int) -> list[SharedArrivals]:
    return [SharedArrivals(str(directory / "arrived"), rank, size) for rank in range(size)]


@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=9), st.integers(0, 2**62))
def test_missing_are_exactly_those_whose_number_is_smaller(tmp_path_factory, numbers, number):
    seats = shared(tmp_path_factory.mktemp("rendezvous"), len(numbers))
    for each, entered in zip(seats, numbers, strict=True):
        each.note(entered, "called barrier()")
    assert seats[0].missing(number) == [rank for rank, entered in enumerate(numbers) if entered < number]


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=5, max_size=5), min_size=2, max_size=4),
    st.permutations([rank for rank in range(4) for _ in range(5)]),
)
def test_whoever_comes_later_reads_what_the_others_do_there_and_nobody_else_does(tmp_path_factory, actions, order):
    seats = shared(tmp_path_factory.mktemp("rendezvous"), len(actions))
    numbers = [0] * len(actions)
    for rank in (each for each in order if each < len(actions)):
        number = numbers[rank] = numbers[rank] + 1
        own = actions[rank][number - 1]
        expected = {
            peer: actions[peer][number - 1]
            for peer in range(len(actions))
            if peer != rank and numbers[peer] >= number and actions[peer][number - 1] != own
        }
        assert seats[rank].note(number, own) == expected


def test_who_is_so_far_ahead_that_its_note_is_gone_is_not_compared(tmp_path):
    ahead, behind = shared(tmp_path, 2)
    for number in range(1, 100):
        ahead.note(number, "called broadcast()")
    assert behind.note(1, "called barrier()") == {}
    assert behind.note(99, "called barrier()") == {0: "called broadcast()"}


def test_long_texts_that_differ_behind_the_cut_are_told_apart(tmp_path):
    first, second = shared(tmp_path, 2)
    for number, end in enumerate(("1", "2"), 1):
        first.note(number, "called " + "x" * 5000 + "1")
        assert bool(second.note(number, "called " + "x" * 5000 + end)) == (end != "1")


def test_a_long_text_is_cut_and_harms_no_other_note(tmp_path):
    first, second = shared(tmp_path, 2)
    first.note(1, "called " + "x" * 5000)
    first.note(2, "called barrier()")
    assert second.note(1, "called barrier()")[0].startswith("called xxx")
    assert second.note(2, "called barrier()") == {}


def test_they_are_noted_beside_a_file_and_in_a_server_s_store_for_checked_calls_only(tmp_path: Path):
    file = dist.FileStore(str(tmp_path / "store"), 1)
    for is_checked in (False, True):
        assert type(arrivals_in(file, 0, 1, is_checked)) is SharedArrivals
    assert (tmp_path / "store.arrived").exists()
    assert type(arrivals_in(dist.HashStore(), 0, 1, True)) is StoredArrivals
    assert arrivals_in(dist.HashStore(), 0, 1, False) is None
    assert arrivals_in(None, 0, 1, True) is None
