"""Where a step ends, and what is to run then.

*Threads:* closures belong to the replica that has added them, and run in its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.compat.torch_xla.places import here
from unisono.world import current_world

MARK_STEP = "MarkStep"
"""The counter of the steps' ends."""


class _Closures(list[Callable[[], Any]]):
    """Those of a replica, which run at the end of its step."""


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` behind the next step's end, in this thread; what was added first comes first.

    Args:
        run_async: has no effect: closures run in order, in the replica's own thread.

    Raises:
        TypeError: `closure` cannot be called.
    """
    if not callable(closure):
        raise TypeError(f"closure={closure!r} is a {type(closure).__name__}; pass a function")
    current_world().state.part(_Closures).append(partial(closure, *args))


def mark_step(wait: bool = False) -> None:
    """The step ends here: a lazy device executes what it has recorded, then the step closures run.

    A closure that one of them adds waits for the next step's end. What one raises, this raises; the others of this step
    are dropped.

    Args:
        wait: return when the device has done all its work, too.
    """
    cut(wait)
    world = current_world()
    world.timeline.loop().count(MARK_STEP)
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
