"""The end of a step, and closures that run then.

*Threads:* closures belong to the replica that has added them, and run in its thread; asynchronous ones run in another
thread, `unisono-step-closures`, which ends when it has run them all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from unisono.arguments import check_type
from unisono.compat.torch_xla.places import here
from unisono.world import current_world

MARK_STEP = "MarkStep"
"""The counter of ended steps."""


_MOST_WAITING = 100
"""The number of asynchronous closures that may be pending; each holds its step's tensors."""


class _Closures(list[Callable[[], Any]]):
    """A replica's closures, which run at the end of its step."""


class _Beside:
    """A replica's asynchronous closures, which run concurrently with its loop, in order."""

    def __init__(self) -> None:
        self.added: list[Callable[[], Any]] = []
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], Any]] = deque()
        self._is_running = False
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Start the closures that were added. Blocks while too many are pending.

        Raises:
            BaseException: the error of an earlier one; those after it are dropped.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING or self._error is not None)
            error, self._error = self._error, None
            if error is not None:
                self.added.clear()
                raise error
            if not self.added:
                return
            self._waiting.extend(self.added)
            self.added.clear()
            if not self._is_running:
                self._is_running = True
                # Not a daemon: an exiting process waits for it.
                threading.Thread(target=run_closures, args=(self, copy_context()), name="unisono-step-closures").start()

    def take(self) -> Callable[[], Any] | None:
        """The next closure; None if the thread is to end."""
        with self._changed:
            self._is_running = bool(self._waiting)
            closure = self._waiting.popleft() if self._waiting else None
            self._changed.notify_all()
            return closure

    def fail(self, error: BaseException) -> None:
        """Record a closure's error; the closures after it are dropped."""
        with self._changed:
            self._error, self._is_running = error, False
            self._waiting.clear()
            self._changed.notify_all()


def run_closures(beside: _Beside, context: Context) -> None:
    """Body of the thread: run closures in the replica's context until none is left, or one raises."""
    try:
        while (closure := beside.take()) is not None:
            context.run(closure)
            del closure  # and its tensors
    except BaseException as error:
        beside.fail(error)


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` after the end of the next step, in this thread; closures run in the order they were added.

    Args:
        closure: a function.
        args: its arguments.
        run_async: call it concurrently with the loop, in another thread, after those added earlier in this way. The end
            of the next step raises its error, and those after it are dropped.

    Raises:
        TypeError: `closure` is not callable.
    """
    check_type(closure, "closure", "pass a function", Callable)
    state = current_world().state
    (state.part(_Beside).added if run_async else state.part(_Closures)).append(partial(closure, *args))


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End the step: a lazy device executes what it has recorded, then the step closures run.

    A closure added by one of them waits for the end of the next step. An error of a closure is raised here; the other
    closures of this step are dropped.

    Args:
        wait: also wait until the device has finished all its work.
        reset_scope: has no effect.
    """
    cut(wait)
    world = current_world()
    world.timeline.loop().count(MARK_STEP)
    world.state.part(_Beside).begin()
    waiting = world.state.part(_Closures)
    closures = [waiting.pop(0) for _ in range(len(waiting))]
    for closure in closures:
        closure()


def cut(wait: bool = False) -> None:
    """Make a lazy device execute what it has recorded, without ending the step."""
    backend, device = here()
    backend.mark_step(device)
    if wait:
        backend.synchronize(device)
