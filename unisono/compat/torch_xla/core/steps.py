"""The end of a step, and closures that run then.

*Threads:* closures belong to the replica that has added them, and run in its thread; the asynchronous ones of a step in
a thread of their own, `unisono-step-closures`, which the end of the next step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from unisono import current_world
from unisono.building_blocks import check_threads, check_type
from unisono.compat.torch_xla.core.devices import here

MARK_STEP = "MarkStep"
"""The counter of ended steps."""


class _Closures:
    """A replica's closures: those that run in its thread at the end of its step, those that run concurrently with its
    loop, and what has become of the latter's last ones."""

    def __init__(self) -> None:
        self.own: list[Callable[[], Any]] = []
        self.beside: list[Callable[[], Any]] = []
        self.running: Future[None] | None = None

    def start_beside(self) -> None:
        """Start the asynchronous closures of a step, after those of the step before; raises the error of one of these,
        and drops the new ones then."""
        beside, running, self.beside, self.running = self.beside, self.running, [], None
        if running is not None:
            running.result()
        if beside:
            check_threads("an asynchronous step closure")
            thread = ThreadPoolExecutor(1, thread_name_prefix="unisono-step-closures")  # joined at exit
            self.running = thread.submit(copy_context().run, run_closures, beside)
            thread.shutdown(wait=False)


def run_closures(closures: list[Callable[[], Any]]) -> None:
    """Run the closures of one step, until one fails."""
    for closure in closures:
        closure()


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` after the end of the next step, in this thread; closures run in the order they were added.

    With `run_async`, another thread calls it concurrently with the next step of the loop, whose end waits for it and
    raises its error; the closures after it are dropped.
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
    run_closures(own)


def execute_recorded(wait: bool = False) -> None:
    """Make a lazy device execute what it has recorded, without ending the step."""
    backend, device = here()
    backend.mark_step(device)
    if wait:
        backend.synchronize(device)
