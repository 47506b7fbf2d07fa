"""Channel: a bounded queue with two ends, each of which can be closed, and which tell each other.

*Threads:* one sender and one receiver. Channels that are made with the same lock can be looked at together.

Invariants:
1. Items come out in the order in which they went in, and all of them before the end or the error that follows.
2. Closing either end wakes the other at once. Nothing polls.
3. Any object is an item, None too: the end is told by an exception, not by a mark.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from unisono.errors import ClosedError
from unisono.outcome import Outcome, copy_error

T = TypeVar("T")


class EndOfChannel(Exception):  # noqa: N818 - an end, not an error
    """The sender has closed the channel and everything was received."""


class Channel(Generic[T]):
    """A queue of at most `capacity` items.

    Args:
        capacity: the bound, from 1 on.
        lock: shared with other channels that are looked at together.
        may_overflow: asked under the lock when the channel is full; True lets one more item in.
    """

    def __init__(
        self,
        capacity: int,
        lock: threading.Lock | None = None,
        may_overflow: Callable[[], bool] = lambda: False,
    ) -> None:
        self._capacity = capacity
        self._may_overflow = may_overflow
        self._items: deque[T] = deque()
        self._lock = lock or threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._has_item = threading.Condition(self._lock)
        self._end: Outcome[None] | None = None
        self._is_cancelled = False

    def __len__(self) -> int:
        return len(self._items)

    def send(self, item: T) -> bool:
        """Put an item in, waiting for room; False, and the item is dropped, when the receiver wants no more."""
        with self._lock:
            while len(self._items) >= self._capacity and not self._is_cancelled and not self._may_overflow():
                self._has_room.wait()
            if self._is_cancelled:
                return False
            self._items.append(item)
            self._has_item.notify()
            return True

    def close(self, end: Outcome[None]) -> None:
        """The sender's last word: the end, or the error that follows what was sent. The first word counts."""
        with self._lock:
            self._end = self._end or end
            self._has_item.notify_all()

    def receive(self, on_wait: Callable[[], None] | None = None) -> T:
        """Take the next item out, waiting for one; `on_wait` is called under the lock before the wait.

        Raises:
            EndOfChannel: there is no more.
            ClosedError: the receiving end was closed.
            BaseException: the error that the sender closed with, at each further call.
        """
        with self._lock:
            if on_wait is not None and not self._items and self._end is None:
                on_wait()
            while not self._items and self._end is None and not self._is_cancelled:
                self._has_item.wait()
            if self._is_cancelled:
                raise ClosedError("the loader was closed, so no batch can be received from it any more")
            if self._items:
                item = self._items.popleft()
                self._has_room.notify()
                return item
            assert self._end is not None
            if self._end.error is None:
                raise EndOfChannel
            raise copy_error(self._end.error)

    def cancel(self) -> None:
        """The receiver wants no more: what waits here is dropped, and what is sent from now on falls away."""
        with self._lock:
            self._is_cancelled = True
            self._items.clear()
            self._has_room.notify_all()
            self._has_item.notify_all()

    def wake_sender(self) -> None:
        """Let a sender that waits for room ask again whether it may overflow. Called under the lock."""
        self._has_room.notify_all()
