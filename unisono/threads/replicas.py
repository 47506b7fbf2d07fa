"""Persistent replica threads: each runs functions one at a time, as long as its owner exists.

*Threads:* `unisono-replica-K` runs `serve`. The owner's thread submits work and waits; one call at a time.

Invariants:
1. Each piece of work yields exactly one `Outcome`.
2. The threads hold only their queues, so they end when the owner is garbage-collected.
3. Either every thread gets its piece of a call or none does, wherever an interrupt occurs: otherwise the collectives
   would wait for a missing thread.
4. Work that its caller did not wait for is still tracked: no further call begins before it has ended.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import call
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from unisono.comm.operations import HOST
from unisono.comm.outcome import Outcome
from unisono.comm.preemption import serving
from unisono.comm.thread_start import start_threads
from unisono.errors import BusyError

T = TypeVar("T")

_EXIT_S = 5.0  # for all threads; a call that was interrupted twice may still run its loop
_LOOK_S = 0.2  # a signal that another thread took, or that came just before the wait, does not end the wait


@dataclass(frozen=True)
class _Call:
    """Functions for all threads, and their outcomes."""

    bodies: Sequence[Callable[[], Any]]
    outcomes: dict[int, Outcome[Any]] = field(default_factory=dict)
    news: SimpleQueue[Callable[[], object] | None] = field(default_factory=lambda: SimpleQueue())

    @property
    def is_over(self) -> bool:
        return len(self.outcomes) == len(self.bodies)


_threads: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[_Call | None]] = weakref.WeakKeyDictionary()


class ReplicaThreads:
    """`count` threads, started at the first use; in a forked process, started at the first use there."""

    def __init__(self, count: int) -> None:
        self._queues: list[SimpleQueue[_Call | None]] = [SimpleQueue() for _ in range(count)]
        self._started: set[int] = set()
        self._pid = os.getpid()  # the process in which they run: a forked process has none of them
        self._call: _Call | None = None  # the call that is running, or was abandoned
        weakref.finalize(self, _dismiss, self._queues).atexit = False  # `_end_all` does it

    @property
    def running(self) -> list[int]:
        """The threads that are still working."""
        made = self._call
        return [] if made is None else [number for number in range(len(made.bodies)) if number not in made.outcomes]

    def check_idle(self) -> None:
        """Raise BusyError if a call was interrupted twice, and some thread has not returned from it yet."""
        if running := self.running:
            raise BusyError(
                f"replicas {running} still run the loop of a call that was interrupted twice; they can be used again "
                "when it has returned"
            )

    def run(
        self, bodies: Sequence[Callable[[], Any]], on_interrupt: Callable[[BaseException], None]
    ) -> list[Outcome[Any]]:
        """Run one function on each thread and wait for all of them.

        An exception that interrupts the wait (`KeyboardInterrupt`) is passed to `on_interrupt`, which makes the
        functions end; the wait then continues, until a second interrupt.
        """
        self.check_idle()
        self._start()
        made = _Call(bodies)
        has_begun: list[bool] = []
        orders = [partial(setattr, self, "_call", made), partial(has_begun.append, True)]
        orders += [partial(queue.put, made) for queue in self._queues]
        interrupt: BaseException | None = None
        while True:
            try:
                if not has_begun:
                    deque(map(call, orders), maxlen=0)  # one call of C: an interrupt comes before or after it
                with serving(made.news):
                    while not made.is_over:  # not by counting signals, which an interrupt may lose
                        order = None
                        with suppress(Empty):
                            order = made.news.get(timeout=_LOOK_S)
                        if order is not None:
                            order()
                break
            except BaseException as error:
                if interrupt is not None or not has_begun:
                    raise
                interrupt = error
                on_interrupt(error)
        self._call = None
        if interrupt is not None:
            raise interrupt
        return [made.outcomes[number] for number in range(len(bodies))]

    def _start(self) -> None:
        if self._pid != os.getpid():
            self._queues[:] = [SimpleQueue() for _ in self._queues]  # the locks of the old ones may be held forever
            self._started.clear()
            self._pid = os.getpid()
        for number, queue in enumerate(self._queues):
            if number not in self._started:  # an interrupt may come in between; then two threads serve one queue
                name = f"unisono-replica-{number}"
                thread = threading.Thread(target=serve, args=(queue, number), name=name, daemon=True)
                _threads[thread] = queue
                start_threads([thread])
                self._started.add(number)


def serve(queue: SimpleQueue[_Call | None], number: int) -> None:
    """Body of a replica thread: run each piece of work and store its outcome; the last one signals. None ends it."""
    while (made := queue.get()) is not None:
        made.outcomes[number] = Outcome.capture(made.bodies[number])
        if made.is_over:
            made.news.put(None)
        del made  # keep nothing of the last call alive while waiting for the next
    queue.put(None)  # for another thread that serves this queue


@atexit.register
def _end_all() -> None:
    """Wait at exit: a thread that ends after the interpreter may abort the process, where torch frees what the thread
    has kept."""
    threads = [(thread, queue) for thread, queue in list(_threads.items()) if thread.is_alive()]
    _dismiss([queue for _, queue in threads])
    deadline = time.monotonic() + _EXIT_S
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _dismiss(queues: Sequence[SimpleQueue[_Call | None]]) -> None:
    for queue in queues:
        queue.put(None)


def modes_of_this_thread(families: Iterable[str]) -> Callable[[Callable[[], T]], T]:
    """Return what calls a function once in another thread, under the modes of this thread."""
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    casting = [each for each in {HOST.type, *families} if torch.is_autocast_enabled(each)]
    dtypes, caches = [torch.get_autocast_dtype(each) for each in casting], torch.is_autocast_cache_enabled()
    variables = contextvars.copy_context()

    def call(body: Callable[[], T]) -> T:
        with ExitStack() as stack:
            # First, since entering it also sets the grad mode.
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            for family, dtype in zip(casting, dtypes, strict=True):
                stack.enter_context(torch.autocast(family, dtype, cache_enabled=caches))
            return body()

    return lambda body: variables.run(call, body)
