"""The end of a step, and closures that run then.

*Threads:* closures belong to the replica that has added them, and run in its thread. Asynchronous ones run in threads
named `unisono-step-closures`, one for those of each step, which first waits for that of the step before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from unisono.arguments import check_type
from unisono.compat.torch_xla.core.devices import here
from unisono.world import current_world

MARK_STEP = "MarkStep"
"""The counter of ended steps."""

_MOST_STEPS = 16
"""The number of steps whose asynchronous closures may be pending; each holds its step's tensors."""


class _Closures:
    """A replica's closures, which run at the end of its step.

    Attributes:
        own: those that run in its thread.
        beside: those that run concurrently with its loop.
        running: the threads of the latter, of the latest steps.
        failed: the error of one of them, after which the others are dropped; a new list once it was raised.
    """

    def __init__(self) -> None:
        self.own: list[Callable[[], Any]] = []
        self.beside: list[Callable[[], Any]] = []
        self.running: list[threading.Thread] = []
        self.failed: list[BaseException] = []

    def start_beside(self) -> None:
        """Start the asynchronous closures of a step. Blocks while those of too many steps are pending; raises the error
        of an earlier one, after which the others are dropped."""
        self.running = [each for each in self.running if each.is_alive()]
        if len(self.running) == _MOST_STEPS:
            self.running[0].join()
        beside, self.beside = self.beside, []
        if self.failed:
            (error,), self.failed = self.failed, []
            raise error
        if beside:
            before = self.running[-1] if self.running else None
            work = (before, beside, self.failed, copy_context())
            # Not a daemon: an exiting process waits for it.
            self.running.append(threading.Thread(target=run_closures, args=work, name="unisono-step-closures"))
            self.running[-1].start()


def run_closures(
    before: threading.Thread | None, closures: list[Callable[[], Any]], failed: list[BaseException], context: Context
) -> None:
    """Body of a thread: run the closures of one step in the replica's context, unless one has failed."""
    if before is not None:
        before.join()
    try:
        while closures and not failed:
            context.run(closures.pop(0))
    except BaseException as error:
        failed.append(error)


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` after the end of the next step, in this thread; closures run in the order they were added.

    With `run_async`, another thread calls it concurrently with the loop, after those added earlier in this way. The end
    of the next step raises its error, and those after it are dropped.
    """
    check_type(closure, "closure", "pass a function", Callable)
    closures = current_world().state.part(_Closures)
    (closures.beside if run_async else closures.own).append(partial(closure, *args))


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End the step: a lazy device executes what it has recorded, then the step closures run.

    A closure added by one of them waits for the end of the next step. An error of a closure is raised here; the other
    closures of this step are dropped. `wait`: also wait until the device has finished all its work.
    """
    execute_recorded(wait)
    world = current_world()
    world.timeline.loop().count(MARK_STEP)
    closures = world.state.part(_Closures)
    closures.start_beside()
    own, closures.own = closures.own, []
    for closure in own:
        closure()


def execute_recorded(wait: bool = False) -> None:
    """Make a lazy device execute what it has recorded, without ending the step."""
    backend, device = here()
    backend.mark_step(device)
    if wait:
        backend.synchronize(device)
