"""Ranks in step whose parts end unevenly: who is given what, how often they meet, and how they end together.

The lanes here are lists, so that a test says what is ready; the ranks are threads of one world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from epochs import PATIENCE_S, CodedError
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import BrokenWorldError, CollectiveMismatchError
from unisono.loading.channel import EndOfChannel
from unisono.loading.lockstep import Lockstep, Position, Read, StreamPosition, StreamProgress
from unisono.loading.pipeline import Delivery, Stamps
from unisono.loading.sharding import Claim, Rule
from unisono.world import World, thread_worlds


class Comm:
    """A communicator that counts how often its rank meets the others, and calls `on_meeting` as it comes."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.meetings = 0
        self.on_meeting: Callable[[], Any] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather_object(self, value: Any) -> list[Any]:
        self.meetings += 1
        self.on_meeting()
        return self._comm.all_gather_object(value)


class Shelf:
    """A lane whose batches are there from the start; `most` of them are ready at a time, and `error` comes last."""

    def __init__(
        self, world: World, deliveries: Sequence[Delivery], most: int = 99, error: Exception | None = None
    ) -> None:
        self.world, self.backend, self.device = world, world.backend, world.device
        self.received = 0
        self.is_cancelled = False
        self.before: Callable[[], Any] = lambda: None
        self._deliveries, self._most, self._error = list(deliveries), most, error

    @property
    def sent(self) -> int:
        return min(len(self._deliveries), -(-self.received // self._most) * self._most)

    def receive(self) -> Delivery:
        self.before()
        if self.received == len(self._deliveries):
            raise self._error or EndOfChannel
        self.received += 1
        return self._deliveries[self.received - 1]

    def cancel(self) -> None:
        self.is_cancelled = True


def start_of(ranks: int) -> StreamProgress:
    return StreamProgress(StreamPosition().cut_for(ranks, 1))


def deliveries_of(rank: int, batches: Sequence[Any], mark: int = 7, by: Any = "worker") -> list[Delivery]:
    """What the lane of a rank with one loader worker gives: each batch with what it has read."""
    taken = itertools.accumulate(map(len, batches))
    return [
        Delivery(batch, None, Claim(len(batch), len(batch)), Read(rank, Position(number, mark), by), Stamps())
        for number, batch in zip(taken, batches, strict=True)
    ]


def numbered(sizes: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
    """Batches of such sizes for each rank, of numbers that come once."""
    numbers = itertools.count()
    return [[torch.tensor([next(numbers) for _ in range(size)]) for size in each] for each in sizes]


class Ranks:
    """The ranks of one world, each with a lockstep over a shelf."""

    def __init__(self, batches: Sequence[Sequence[Any]], ahead: int = 4, most: Sequence[int] = (), **rule: Any) -> None:
        count = len(batches)
        worlds = thread_worlds([torch.device("cpu", rank) for rank in range(count)])
        self.worlds = [dataclasses.replace(world, comm=Comm(world.comm)) for world in worlds]
        self.shelves = [
            Shelf(world, deliveries_of(rank, batches[rank]), most[rank] if most else 99)
            for rank, world in enumerate(self.worlds)
        ]
        self.locksteps = [
            Lockstep(shelf, shelf.world, Rule(**rule), 0, ahead, start_of(count)) for shelf in self.shelves
        ]

    @property
    def meetings(self) -> list[int]:
        return [world.comm.meetings for world in self.worlds]

    def run(self, body: Callable[[int, Lockstep], Any]) -> list[Any]:
        """`body(rank, lockstep)` on each rank's thread: what it returned, or raised."""

        def one(rank: int) -> Any:
            try:
                return body(rank, self.locksteps[rank])
            except Exception as error:
                return error
            finally:
                self.worlds[rank].comm.leave()

        with ThreadPoolExecutor(len(self.locksteps)) as threads:
            return [each.result(PATIENCE_S) for each in [threads.submit(one, rank) for rank in range(len(self.worlds))]]

    def drain(self) -> list[list[Delivery]]:
        return self.run(lambda rank, lockstep: drained(lockstep)[0])

    def ends(self) -> list[tuple[int, Exception]]:
        """For each rank, after how many batches it ended, and with what."""
        return [(len(found), end) for found, end in self.run(lambda rank, lockstep: drained(lockstep))]


def drained(lockstep: Lockstep) -> tuple[list[Delivery], Exception]:
    found = []
    while True:
        try:
            found.append(lockstep.receive())
        except Exception as end:
            return found, end


some_sizes = st.lists(st.lists(st.integers(1, 4), max_size=5), min_size=1, max_size=3)


@given(sizes=some_sizes, ahead=st.integers(1, 4), most=st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_all_ranks_take_the_same_steps_and_every_sample_once(sizes, ahead, most):
    batches = numbered(sizes)
    ranks = Ranks(batches, ahead, most)
    found = ranks.drain()
    steps = max(map(len, batches))
    assert [len(each) for each in found] == [steps] * len(batches)
    for rank, each in enumerate(found):
        counted = [delivery.batch[: delivery.claim.samples].tolist() for delivery in each]
        assert counted == [batch.tolist() for batch in batches[rank]] + [[]] * (steps - len(batches[rank]))
        assert all(delivery.claim.repeated == (not delivery.claim.samples) for delivery in each)
    for place, together in enumerate(zip(*found, strict=True)):
        assert {each.claim.total for each in together} == {sum(each.claim.samples for each in together)}
        assert len({each.claim.mark for each in together}) == 1
        given_so_far = [sum(each[: place + 1]) for each in sizes]
        for each in together:
            parts = [[number, 7 if number else 0, 0, None] for number in given_so_far]
            position = {"offset": sum(given_so_far), "layers": [[len(sizes), 1, parts]]}
            assert each.position.items() >= position.items(), "all ranks know what all parts have given"
    assert len(set(ranks.meetings)) == 1


@pytest.mark.parametrize(("ahead", "most", "meetings"), [(4, 99, 3), (1, 99, 12), (4, 1, 12), (12, 99, 1), (5, 4, 3)])
def test_the_ranks_meet_once_for_all_that_is_ready(ahead, most, meetings):
    ranks = Ranks(numbered([[2] * 12, [2] * 12]), ahead, [99, most])
    ranks.drain()
    assert ranks.meetings == [meetings + 1] * 2, "and once to tell the end"


def test_nobody_waits_for_a_batch_that_is_not_needed_at_once():
    ranks = Ranks(numbered([[1] * 3, [1] * 3]), most=[1, 99])
    ranks.shelves[0].before = lambda: pytest.fail("a second batch was waited for") if ranks.shelves[0].received else 0
    assert all(delivery.claim.samples == 1 for delivery in ranks.run(lambda rank, lockstep: lockstep.receive()))


def test_a_wait_for_another_rank_counts_as_one_for_peers():
    ranks = Ranks(numbered([[1], [1]]))
    has_come = threading.Event()
    ranks.worlds[0].comm.on_meeting = has_come.set
    ranks.shelves[1].before = lambda: has_come.wait(PATIENCE_S)
    delivery, _ = ranks.run(lambda rank, lockstep: lockstep.receive())
    began = delivery.stamps.ready_at - 10
    waits = delivery.stamps.divide(began, delivery.stamps.ready_at + 1000)
    assert (waits.source, waits.transfer, waits.peers) == (0, 10, 1000)


# Ends.


@pytest.mark.parametrize(("tail", "size"), [("split", 1), ("pad", 3)])
def test_a_rank_that_has_no_sample_at_all_is_lent_one(tail, size):
    ranks = Ranks([[], *numbered([[3, 3]]), []], tail=tail)
    for each in ranks.drain()[::2]:
        assert [delivery.batch.tolist() for delivery in each] == [[0] * size] * 2
        assert [delivery.claim._replace(mark=0) for delivery in each] == [Claim(0, 3, 0, size)] * 2


def test_a_batch_that_cannot_be_cut_is_repeated_whole():
    odd = {"a": torch.zeros(2), "b": torch.zeros(3)}
    found = Ranks([[odd, odd], [odd]]).drain()[1]
    assert found[1].batch is odd
    assert found[1].claim.samples == 0


def test_what_the_loop_writes_into_a_batch_is_not_repeated():
    def body(rank: int, lockstep: Lockstep) -> list[float]:
        seen = []
        with contextlib.suppress(EndOfChannel):
            while True:
                batch = lockstep.receive().batch
                seen.append(batch[0].item())
                batch.fill_(-1)
        return seen

    assert Ranks([[torch.tensor([5.0])], numbered([[1, 1, 1]])[0]]).run(body)[0] == [5.0, 5.0, 5.0]


# Failures.


@pytest.mark.parametrize("ahead", [1, 4])
def test_an_error_on_one_rank_ends_all_behind_the_complete_rounds(ahead):
    ranks = Ranks(numbered([[1] * 5, [1] * 2, [1] * 5]), ahead)
    ranks.shelves[1]._error = CodedError(3)
    (before, first), (own_before, own), (after, third) = ranks.ends()
    assert (before, own_before, after) == (2, 2, 2)
    assert type(own) is CodedError
    assert own.code == 3
    for peer in (first, third):
        assert type(peer) is BrokenWorldError
        assert str(peer) == "the loader of rank 1 failed with CodedError: code 3"


@pytest.mark.parametrize("failure", [None, CodedError(1)])
def test_an_ended_loop_ends_in_the_same_way_again_and_meets_nobody(failure):
    ranks = Ranks(numbered([[1], [1, 1]]))
    ranks.shelves[1]._error = failure
    for (_, end), (more, again) in ranks.run(lambda rank, lockstep: (drained(lockstep), drained(lockstep))):
        assert (type(end), str(end), more) == (type(again), str(again), [])
        assert end is not again
    assert ranks.meetings == [3, 3]


def test_an_ended_loop_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        for has_failed in (False, True):
            ranks = Ranks(numbered([[1], [1, 1]]))
            ranks.shelves[1]._error = CodedError(1) if has_failed else None
            ranks.run(lambda rank, lockstep: len(drained(lockstep)[0]))
            ranks.shelves[1]._error = None  # it has seen all
            gone = [weakref.ref(each) for each in ranks.locksteps]
            ranks.locksteps.clear()
            assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_ranks_that_stand_at_different_batches_are_told():
    ranks = Ranks(numbered([[2] * 3, [2] * 3]), ahead=1)

    def body(rank: int, lockstep: Lockstep) -> Any:
        lockstep.receive()
        if rank == 1:  # it leaves its loop early, and begins the next one
            world = ranks.worlds[rank]
            lockstep = Lockstep(Shelf(world, deliveries_of(1, [[1]])), world, Rule(), 0, 1, start_of(2))
        return lockstep.receive()

    for error in ranks.run(body):
        assert type(error) is CollectiveMismatchError
        assert "after 4 samples of the stream with 1 loader worker(s), rank 1 after 0 with 1;" in str(error)


def test_ranks_that_cut_in_different_ways_are_refused():
    ranks = Ranks(numbered([[1], [1]]))
    ranks.shelves[1]._deliveries = deliveries_of(1, [[1]], by="dataset")
    for _, error in ranks.ends():
        assert type(error) is RuntimeError
        assert "cut in different ways, by the dataset and by the worker," in str(error)
    ranks = Ranks(numbered([[1], [1]]))
    for rank, shelf in enumerate(ranks.shelves):  # streams of the ranks' own may differ
        shelf._deliveries = deliveries_of(rank, [[1]], by="dataset", mark=rank + 1)
    assert [steps for steps, _ in ranks.ends()] == [1, 1]
