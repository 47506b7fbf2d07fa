"""Channel: a queue with two ends, each of which can be closed, and which notify each other.

A channel has no bound itself. The sender first waits for room, by a condition over whatever the bound spans: one
channel, or both of a lane.

*Threads:* one sender and one receiver at a time. Channels created with the same lock can be inspected together.

Invariants:
1. Items are received in the order in which they were sent, all of them before the end or the error that follows.
2. Closing either end wakes the other at once. Nothing polls.
3. Any object can be an item, including None: the end is an exception, not a marker.
4. `cancel` acquires no lock. A loader that is garbage is cancelled by the thread that collects it, which may be one of
   its own that holds the lock. So threads wait for a bell, which can be rung from anywhere and remembers each ring,
   rather than for a condition.
5. Only threads that have announced a wait are woken, so between two threads that keep up with each other an item costs
   no system call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from unisono.comm.outcome import Outcome, copy_error
from unisono.errors import ClosedError

T = TypeVar("T")


class EndOfChannel(Exception):  # noqa: N818 - an end, not an error
    """The sender has closed the channel and everything was received."""


class Channel(Generic[T]):
    """A queue from one thread to another. `on_receipt` is called under the lock at each receipt, before a sender is
    woken: only when at most `refill_at` items are left, if given, so that it fills the channel in one go, without
    interrupting its receiver at each item."""

    def __init__(
        self,
        lock: threading.Lock | None = None,
        on_receipt: Callable[[], None] = lambda: None,
        refill_at: int | None = None,
    ) -> None:
        self._items: deque[T] = deque()
        self._lock = lock or threading.Lock()
        self.room_bell, self.item_bell = _Bell(), _Bell()
        self._on_receipt, self._refill_at = on_receipt, refill_at
        self._end: Outcome[None] | None = None
        self.is_cancelled = False

    def __len__(self) -> int:
        return len(self._items)

    def wait_for_room(self, has_room: Callable[[], bool]) -> bool:
        """Return True when `has_room()` does, under the lock, or False when the receiver has ended."""
        while not self.is_cancelled:
            with self._lock:
                # `cancel` acquires no lock, so it may run during this check.
                if has_room():
                    return not self.is_cancelled
                # Under the lock of the check, so that a receipt before `wait` rings for this sender.
                self.room_bell.expect()
            self.room_bell.wait()
        return False

    def send(self, item: T) -> bool:
        """Put an item in, without waiting; return False, and drop the item, if the receiver has ended."""
        with self._lock:
            self._items.append(item)
            self.item_bell.ring()
        if self.is_cancelled:  # checked last: `cancel` may have dropped the items before this one was added
            self._items.clear()
            return False
        return True

    def close(self, end: Outcome[None]) -> None:
        """Close the sending end: with the end, or with the error that follows what was sent. The first call counts."""
        with self._lock:
            # Stored before the flag is checked, as in `send`: a concurrent `cancel` clears it, or is seen here.
            self._end = self._end or end
            if self.is_cancelled:
                self._end = None
            self.item_bell.ring()

    def receive(self) -> T:
        """Take the next item out, waiting for one. After the last one: EndOfChannel, or the error that the sender
        closed with; ClosedError if the receiving end was closed."""
        while True:
            with self._lock:
                try:
                    # Tried rather than tested: `cancel` may empty the queue between a test and this line.
                    item = self._items.popleft()
                except IndexError:
                    pass
                else:
                    self._on_receipt()
                    if self._refill_at is None or len(self._items) <= self._refill_at:
                        self.room_bell.ring()
                    return item
                if self.is_cancelled:
                    self.item_bell.ring()  # `cancel` has rung once, and a second iterator may wait here too
                    raise ClosedError("the loader was closed, so it yields no more batches")
                if (end := self._end) is not None:
                    if end.error is None:
                        raise EndOfChannel
                    raise copy_error(end.error)
                self.item_bell.expect()
            self.item_bell.wait()

    def cancel(self) -> None:
        """Close the receiving end, from any thread, at any moment: drop the items that wait and those to come."""
        # The flag comes first: a sender that appends after `clear` sees it, and clears again.
        self.is_cancelled = True
        self._items.clear()
        self._end = None  # an error's traceback keeps its frames' objects alive, such as loader workers
        self.room_bell.ring_unlocked()
        self.item_bell.ring_unlocked()


class _Bell:
    """Wakes the threads that wait at one end. A spurious ring is harmless: a woken thread checks again."""

    def __init__(self) -> None:
        # The `put` of a SimpleQueue is reentrant: a garbage collection within it may call `cancel`, which rings too.
        self._rings: SimpleQueue[None] = SimpleQueue()
        self.expected = 0

    def expect(self) -> None:
        """Announce a `wait`, under the lock that guards the awaited state."""
        self.expected += 1

    def wait(self) -> None:
        """Wait for the next ring since `expect`, without the lock."""
        self._rings.get()

    def ring(self) -> None:
        """Wake all announced threads, under the lock."""
        while self.expected:
            self.expected -= 1
            self._rings.put(None)

    def ring_unlocked(self) -> None:
        """Wake one thread that waits now or next."""
        self._rings.put(None)
