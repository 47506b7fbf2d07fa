"""Where a step ends, and what is to run then.

*Threads:* closures belong to the replica that has added them, and run in its thread; those that are to run beside the
loop, in one of its own, `unisono-step-closures`, which ends when it has run them all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from unisono.compat.torch_xla.places import here
from unisono.world import current_world

MARK_STEP = "MarkStep"
"""The counter of the steps' ends."""


_MOST_WAITING = 100
"""Closures that may wait beside the loop; each holds its step's tensors."""


class _Closures(list[Callable[[], Any]]):
    """Those of a replica, which run at the end of its step."""


class _Beside:
    """Those that run beside its loop, in order."""

    def __init__(self) -> None:
        self.added: list[Callable[[], Any]] = []
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], Any]] = deque()
        self._is_running = False
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Let those that were added run. Waits while too many do.

        Raises:
            BaseException: what one has raised since; those after it are dropped.
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
                # No daemon: a process that ends waits for it.
                threading.Thread(target=run_closures, args=(self, copy_context()), name="unisono-step-closures").start()

    def take(self) -> Callable[[], Any] | None:
        """The next one; None where the thread is to end."""
        with self._changed:
            self._is_running = bool(self._waiting)
            closure = self._waiting.popleft() if self._waiting else None
            self._changed.notify_all()
            return closure

    def fail(self, error: BaseException) -> None:
        """One has raised: those after it are dropped."""
        with self._changed:
            self._error, self._is_running = error, False
            self._waiting.clear()
            self._changed.notify_all()


def run_closures(beside: _Beside, context: Context) -> None:
    """Body of the thread: run closures in the replica's context until none waits, or one raises."""
    try:
        while (closure := beside.take()) is not None:
            context.run(closure)
            del closure  # and its tensors
    except BaseException as error:
        beside.fail(error)


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` after the next step's end, in this thread; what was added first comes first.

    Args:
        run_async: call it beside the loop, in another thread, behind those that were added so before. What one raises,
            the next step's end raises, and those after it are dropped.

    Raises:
        TypeError: `closure` cannot be called.
    """
    if not callable(closure):
        raise TypeError(f"closure={closure!r} is a {type(closure).__name__}; pass a function")
    state = current_world().state
    (state.part(_Beside).added if run_async else state.part(_Closures)).append(partial(closure, *args))


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """The step ends here: a lazy device executes what it has recorded, then the step closures run.

    A closure that one of them adds waits for the next step's end. What one raises, this raises; the others of this step
    are dropped.

    Args:
        wait: return when the device has done all its work, too.
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
    """Let a lazy device execute what it has recorded; no step ends."""
    backend, device = here()
    backend.mark_step(device)
    if wait:
        backend.synchronize(device)
