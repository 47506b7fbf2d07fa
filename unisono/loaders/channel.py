"""Channel: a queue with two ends, each of which can be closed, and which notify each other.

A channel has no bound of its own. Who sends asks for room first, by a condition over whatever the bound spans: one
channel, or all that a lane consists of.

*Threads:* one sender and one receiver at a time. Channels that are made with the same lock can be looked at together.

Invariants:
1. Items come out in the order in which they went in, and all of them before the end or the error that follows.
2. Closing either end wakes the other at once. Nothing polls.
3. Any object is an item, None too: an exception stands for the end, not a mark.
4. `cancel` takes no lock. A loader that is garbage is cancelled by the thread that collects it, which may be one of
   its own that holds the lock. So who waits listens for a bell, which can be rung from anywhere and keeps its rings,
   and not for a condition.
5. Nobody is woken who has not announced that he waits, so between two threads that keep up with each other an item
   costs no system call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from unisono.errors import ClosedError
from unisono.outcome import Outcome, copy_error

T = TypeVar("T")


class EndOfChannel(Exception):  # noqa: N818 - an end, not an error
    """The sender has closed the channel and everything was received."""


class Channel(Generic[T]):
    """A queue from one thread to another.

    Args:
        lock: shared with other channels that are looked at together.
        on_receipt: called under the lock with each item that is received, before a sender is woken.
        refill_at: a receipt wakes a sender only when no more than so many items are left, so that it fills the channel
            in one go and does not stand in its receiver's way at each item; None wakes it at each.
    """

    def __init__(
        self,
        lock: threading.Lock | None = None,
        on_receipt: Callable[[T], None] | None = None,
        refill_at: int | None = None,
    ) -> None:
        self._items: deque[T] = deque()
        self._lock = lock or threading.Lock()
        self._room_bell = _Bell()
        self._item_bell = _Bell()
        self._on_receipt = on_receipt
        self._refill_at = refill_at
        self._end: Outcome[None] | None = None
        self._is_cancelled = False

    def __len__(self) -> int:
        return len(self._items)

    def wait_for_room(self, has_room: Callable[[], bool]) -> bool:
        """Return True when `has_room()` does, or False when the receiver wants no more.

        It is asked under the lock: now, after a receipt (see `refill_at`), and when someone wakes the sender.
        """
        while not self._is_cancelled:
            with self._lock:
                if has_room():
                    return not self._is_cancelled
                self._room_bell.expect()
            self._room_bell.wait()
        return False

    def send(self, item: T) -> bool:
        """Put an item in, at once; False, and the item is dropped, when the receiver wants no more."""
        with self._lock:
            self._items.append(item)
            self._item_bell.ring()
        if self._is_cancelled:  # asked last: `cancel` may have dropped its items before this one came
            self._items.clear()
            return False
        return True

    def close(self, end: Outcome[None]) -> None:
        """The sender's last word: the end, or the error that follows what was sent. The first word counts."""
        with self._lock:
            self._end = self._end or end
            if self._is_cancelled:
                self._end = None
            self._item_bell.ring()

    def receive(self, on_wait: Callable[[], None] | None = None) -> T:
        """Take the next item out, waiting for one; `on_wait` is called under the lock before each wait.

        Raises:
            EndOfChannel: there is no more.
            ClosedError: the receiving end was closed.
            BaseException: the error that the sender closed with, at each further call.
        """
        while True:
            with self._lock:
                try:
                    item = self._items.popleft()
                except IndexError:
                    pass
                else:
                    if self._on_receipt is not None:
                        self._on_receipt(item)
                    if self._refill_at is None or len(self._items) <= self._refill_at:
                        self._room_bell.ring()
                    return item
                if self._is_cancelled:
                    self._item_bell.ring()  # `cancel` has rung once, and a second iterator may wait here too
                    raise ClosedError("the loader was closed, so no batch can be received from it any more")
                if (end := self._end) is not None:
                    if end.error is None:
                        raise EndOfChannel
                    raise copy_error(end.error)
                if on_wait is not None:
                    on_wait()
                self._item_bell.expect()
            self._item_bell.wait()

    def cancel(self) -> None:
        """The receiver wants no more: what waits here is dropped, and what is sent from now on falls away.

        From any thread, at any moment.
        """
        self._is_cancelled = True
        self._items.clear()
        self._end = None  # an error holds what was alive where it was raised, loader workers for one
        self._room_bell.ring_unlocked()
        self._item_bell.ring_unlocked()

    def wake_sender(self) -> None:
        """Let a sender that waits for room ask again whether there is some. Called under the lock."""
        self._room_bell.ring()

    def wake_sender_unlocked(self) -> None:
        """The same, from any thread, at any moment."""
        self._room_bell.ring_unlocked()

    @property
    def has_waiting_sender(self) -> bool:
        """Whether someone waits for room here, or is about to."""
        return self._room_bell.is_awaited


class _Bell:
    """Wakes those who wait at one end. A ring too many is harmless: who wakes looks again."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()
        self._expected = 0

    @property
    def is_awaited(self) -> bool:
        """Whether someone waits for it, or is about to."""
        return self._expected > 0

    def expect(self) -> None:
        """Announce a `wait`, under the lock that guards what is waited for."""
        self._expected += 1

    def wait(self) -> None:
        """Return at the next ring since `expect`, without the lock."""
        self._rings.get()

    def ring(self) -> None:
        """Wake all who are announced, under the lock."""
        while self._expected:
            self._expected -= 1
            self._rings.put(None)

    def ring_unlocked(self) -> None:
        """Wake one who waits now or next."""
        self._rings.put(None)
