"""The queue between two threads: order, room, both ways of closing, and what a garbage collection may do inside."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from epochs import PATIENCE_S, CodedError, is_awaiting_item, is_awaiting_room
from faults import until

from unisono.comm.outcome import Outcome
from unisono.errors import ClosedError
from unisono.loading.channel import Channel, EndOfChannel


class Waiting:
    """A callback that says when a thread is about to wait, and answers False."""

    def __init__(self) -> None:
        self._left = threading.Semaphore(0)

    def __call__(self) -> bool:
        self._left.release()
        return False

    def seen(self) -> None:
        assert self._left.acquire(timeout=PATIENCE_S)


def in_threads(*calls: Callable[[], Any]) -> list[Future]:
    """Each call in a thread of its own, which has ended when its future is done."""
    with_threads = [ThreadPoolExecutor(1) for _ in calls]
    futures = [pool.submit(call) for pool, call in zip(with_threads, calls, strict=True)]
    for pool in with_threads:
        pool.shutdown(wait=False)
    return futures


def result(future: Future) -> Any:
    return future.result(PATIENCE_S)


def drain(channel: Channel) -> list[Any]:
    found = []
    with pytest.raises(EndOfChannel):
        while True:
            found.append(channel.receive())
    return found


def test_items_come_out_in_order_and_then_the_end_again_and_again():
    channel = Channel()
    items = [1, None, "", [], 0, False, EndOfChannel, Outcome()]
    for item in items:
        assert channel.send(item)
    channel.close(Outcome())
    assert list(map(id, drain(channel))) == list(map(id, items))
    for _ in range(3):
        assert drain(channel) == []


def test_after_the_items_each_receive_raises_its_own_copy_of_the_error():
    channel = Channel()
    error = CodedError(7)
    error.add_note("in the kitchen")
    channel.send("first")
    channel.close(Outcome.failure(error))
    assert channel.receive() == "first"
    raised = []
    for _ in range(2):
        with pytest.raises(CodedError) as caught:
            channel.receive()
        raised.append(caught.value)
    assert all(str(each) == "code 7" and each.code == 7 and each.__notes__ == ["in the kitchen"] for each in raised)
    assert len({id(error), *map(id, raised)}) == 3


def test_cancelling_wakes_a_waiting_sender_and_every_waiting_receiver():
    is_full = Waiting()
    full, empty = Channel(), Channel()
    full.send(1)
    (sending,) = in_threads(lambda: full.wait_for_room(is_full))
    receiving = in_threads(*[empty.receive] * 3)
    is_full.seen()
    until(lambda: is_awaiting_item(empty, threads=3))
    full.cancel()
    empty.cancel()
    assert result(sending) is False
    for each in receiving:
        with pytest.raises(ClosedError, match="the loader was closed"):
            result(each)


def test_what_is_cancelled_takes_and_gives_nothing_and_holds_nothing():
    class Thing: ...

    channel: Channel[Thing] = Channel()
    thing, error = Thing(), CodedError(1)
    gone = weakref.ref(thing), weakref.ref(error)
    channel.send(thing)
    channel.close(Outcome.failure(error))
    channel.cancel()
    del thing, error
    assert [each() for each in gone] == [None, None]
    assert channel.wait_for_room(lambda: True) is False
    assert channel.send(Thing()) is False
    late = CodedError(2)
    channel.close(Outcome.failure(late))
    gone_late = weakref.ref(late)
    del late
    assert gone_late() is None
    assert len(channel) == 0
    for _ in range(2):
        with pytest.raises(ClosedError):
            channel.receive()


def test_a_waiting_sender_asks_again_when_it_is_woken():
    lock, is_full, may = threading.Lock(), Waiting(), []
    channel = Channel(lock)
    (waiting,) = in_threads(lambda: channel.wait_for_room(lambda: is_full() or bool(may)))
    is_full.seen()
    may.append(True)
    with lock:
        assert is_awaiting_room(channel)
        channel.room_bell.ring()
    assert result(waiting) is True


@pytest.mark.parametrize("has_room", [False, True])
def test_a_garbage_collection_inside_of_waiting_for_room_may_cancel(has_room):
    channel = Channel()
    (waiting,) = in_threads(lambda: channel.wait_for_room(lambda: channel.cancel() or has_room))
    assert result(waiting) is False


def test_a_garbage_collection_inside_of_receiving_may_cancel():
    channel = Channel(on_receipt=lambda: channel.cancel())
    channel.send(1)
    assert channel.receive() == 1
    with pytest.raises(ClosedError):
        channel.receive()


@pytest.mark.parametrize("capacity", [1, 3])
def test_nothing_is_lost_between_two_threads_and_the_bound_holds(capacity):
    channel, count, longest = Channel(), 20_000, 0

    def send() -> None:
        nonlocal longest
        for item in range(count):
            channel.wait_for_room(lambda: len(channel) < capacity)
            channel.send(item)
            longest = max(longest, len(channel))
        channel.close(Outcome())

    (sending,) = in_threads(send)
    assert drain(channel) == list(range(count))
    result(sending)
    assert 1 <= longest <= capacity
