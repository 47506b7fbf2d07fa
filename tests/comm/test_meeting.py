"""The meeting of threads, with its races forced to happen where a gate can force them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from faults import Rank
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.meeting import Meeting
from unisono.comm.operations import Call
from unisono.comm.threads import ThreadCommunicator
from unisono.errors import BrokenWorldError

LONG = timedelta(seconds=30)  # nobody waits so long unless a wake-up was lost
CALL = Call("sum")


def exchange(meeting: Meeting, rank: int, value: Any = 0, call: Call = CALL) -> Any:
    return meeting.exchange(rank, call, value, sum)


# Exchanging.


def test_a_fast_rank_in_the_next_round_leaves_a_slow_ranks_values_alone():
    meeting, is_ahead, rounds = Meeting(2, LONG), threading.Event(), range(1, 50)

    def fast() -> list[int]:
        first = exchange(meeting, 0)
        is_ahead.set()
        return [first, *(exchange(meeting, 0, turn) for turn in rounds)]

    def slow() -> list[int]:
        first = exchange(meeting, 1)
        is_ahead.wait()
        return [first, *(exchange(meeting, 1, turn) for turn in rounds)]

    ranks = [Rank(fast), Rank(slow)]
    assert [rank.result() for rank in ranks] == [[0, *(2 * turn for turn in rounds)]] * 2


# Breaking.


@pytest.mark.parametrize("fails", [True, False], ids=["abort", "departure"])
def test_nothing_stops_a_complete_round_or_waits_for_it_to_combine(fails):
    meeting, combining, go_on = Meeting(2, LONG), threading.Event(), threading.Event()

    def combine(values: list[int]) -> int:
        combining.set()
        assert go_on.wait(10)
        return sum(values)

    ranks = [Rank(lambda rank=rank: meeting.exchange(rank, CALL, 1, combine)) for rank in range(2)]
    combining.wait()
    meeting.abort(LookupError("too late"), 1) if fails else meeting.leave(1)  # would wait here for ever
    go_on.set()
    assert [rank.result() for rank in ranks] == [2, 2]  # all had come: nothing could stop that round
    with pytest.raises(BrokenWorldError, match="too late" if fails else "rank 1 has left this world"):
        exchange(meeting, 0)


def test_each_rank_gets_its_own_combination_error_and_the_world_breaks():
    meeting = Meeting(3, LONG)

    def fail(values: list[int]) -> int:
        raise LookupError("no such digit")

    ranks = [Rank(lambda rank=rank: meeting.exchange(rank, CALL, 1, fail)) for rank in range(3)]
    errors = [rank.ended().error for rank in ranks]
    assert {type(error) for error in errors} == {LookupError}
    assert {str(error) for error in errors} == {"no such digit"}
    assert len({id(error) for error in errors}) == 3  # raising writes to the object
    with pytest.raises(BrokenWorldError, match=r"rank 1 cannot complete sum\(\): LookupError: no such digit") as broken:
        exchange(meeting, 1)
    assert type(broken.value.__cause__) is LookupError


def test_several_departures_are_told_together():
    meeting = Meeting(4, LONG)
    for rank in (3, 2, 2):
        meeting.leave(rank)
    with pytest.raises(BrokenWorldError, match="ranks 2, 3 have left this world: let all ranks"):
        exchange(meeting, 0)


def test_a_slow_combination_is_no_time_out():
    meeting, never = Meeting(2, timedelta(seconds=1)), threading.Event()

    def combine(values: list[int]) -> int:
        never.wait(1.2)  # longer than a rank waits for the others to come
        return sum(values)

    ranks = [Rank(lambda rank=rank: meeting.exchange(rank, CALL, 1, combine)) for rank in range(2)]
    assert [rank.result() for rank in ranks] == [2, 2]


@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 5), st.booleans())
def test_whoever_ends_and_whenever_nobody_is_left_waiting(size, who, when, fails):
    """Rank `who` ends after `when` rounds, with an error or without; the others would continue to round 5."""
    meeting = Meeting(size, LONG)
    who %= size

    def part(rank: int) -> int:
        comm = ThreadCommunicator(meeting, rank)
        for turn in range(5):
            if rank == who and turn == when:
                if fails:
                    comm.abort(LookupError("mine"))
                else:
                    comm.leave()
                return turn
            comm.all_reduce(torch.ones(1))
        comm.leave()
        return 5

    ranks = [Rank(lambda rank=rank: part(rank)) for rank in range(size)]
    assert ranks[who].result() == min(when, 5)
    for rank in set(range(size)) - {who}:
        if when >= 5:
            assert ranks[rank].result() == 5
        else:
            error = ranks[rank].ended().error
            assert type(error) is BrokenWorldError
            assert type(error.__cause__) is (LookupError if fails else type(None))


# The seats.


@pytest.mark.parametrize("name", ["all_gather", "broadcast", "reduce_scatter", "all_reduce"])
def test_a_fast_rank_writing_its_tensor_does_not_change_a_slow_ones_result(name):
    fast, slow = ThreadCommunicator.group(2)
    has_written, exchange = threading.Event(), slow.meet

    def slow_exchange(call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        result = exchange(call, value, combine)
        assert has_written.wait(10)
        return result

    slow.meet = slow_exchange
    tensor = torch.ones(2)

    def run_ahead() -> None:
        getattr(fast, name)(tensor)
        tensor.fill_(100)
        has_written.set()

    ranks = [Rank(run_ahead), Rank(lambda: getattr(slow, name)(torch.ones(2)))]
    result = ranks[1].result()
    ranks[0].result()
    parts = result if name == "all_gather" else [result]
    assert [part.tolist() for part in parts] == {
        "all_gather": [[1, 1], [1, 1]],
        "broadcast": [[1, 1]],
        "reduce_scatter": [[2]],
        "all_reduce": [[2, 2]],
    }[name]
