"""Persistent replica threads: each runs the functions that it is given, one at a time, for as long as its owner lives.

*Threads:* `unisono-replica-K` runs `serve`. The owner's thread hands out work and waits; one call at a time.

Invariants:
1. Each piece of work yields exactly one `Outcome`.
2. The threads hold their queues only, so an owner that is dropped ends them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from unisono.outcome import Outcome

_Work = tuple[int, Callable[[], Any], dict[int, Outcome[Any]], "SimpleQueue[None]"]


class ReplicaThreads:
    """`count` threads, started at the first use."""

    def __init__(self, count: int) -> None:
        self._queues: list[SimpleQueue[_Work | None]] = [SimpleQueue() for _ in range(count)]
        self._has_started = False
        weakref.finalize(self, _dismiss, self._queues)

    def run(
        self, bodies: Sequence[Callable[[], Any]], on_interrupt: Callable[[BaseException], None]
    ) -> list[Outcome[Any]]:
        """Run one function on each thread and wait for all of them.

        Args:
            bodies: one function per thread.
            on_interrupt: called with what interrupted the waiting (`KeyboardInterrupt`), to make the functions end;
                then they are waited for, until a second interrupt.
        """
        self._start()
        outcomes: dict[int, Outcome[Any]] = {}
        news: SimpleQueue[None] = SimpleQueue()
        for number, (queue, body) in enumerate(zip(self._queues, bodies, strict=True)):
            queue.put((number, body, outcomes, news))
        interrupt: BaseException | None = None
        while len(outcomes) < len(bodies):  # not by counting the news, of which an interrupt may lose one
            try:
                news.get()
            except BaseException as error:
                if interrupt is not None:
                    raise
                interrupt = error
                on_interrupt(error)
        if interrupt is not None:
            raise interrupt
        return [outcomes[number] for number in range(len(bodies))]

    def _start(self) -> None:
        if not self._has_started:
            self._has_started = True
            for number, queue in enumerate(self._queues):
                threading.Thread(target=serve, args=(queue,), name=f"unisono-replica-{number}", daemon=True).start()


def serve(queue: SimpleQueue[_Work | None]) -> None:
    """Body of a replica thread: run what comes, put each outcome where it is awaited and tell, end at None."""
    while (work := queue.get()) is not None:
        number, body, outcomes, news = work
        outcomes[number] = Outcome.capture(body)
        news.put(None)
        del work, body, outcomes, news  # hold nothing of the last call while waiting for the next


def _dismiss(queues: Sequence[SimpleQueue[_Work | None]]) -> None:
    for queue in queues:
        queue.put(None)
