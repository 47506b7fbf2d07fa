"""A function as a program of its own, for devices that compile what they have recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from unisono.world import current_world

P = ParamSpec("P")
R = TypeVar("R")


def compiled(fn: Callable[P, R]) -> Callable[P, R]:
    """The function as one program of a lazy device, which is compiled once and run in each call.

    Once for each shape and type of the tensors that go in, for all ranks that are threads of this process, however many
    come at once. What was recorded before the call stays out of it, and results have their values when it returns.
    Reading a value inside (`item()`) ends the program there, and begins another one. The runtime keeps as many programs
    as `XLA_COMPILATION_CACHE_SIZE` says (2048), those that were used last; `gather_report` counts how many were
    compiled, and how often one was found. On eager devices a call is one of the function itself.

    Args:
        fn: is called with what the call is given, each time: its Python code runs, and its operations are recorded.

    Raises:
        TypeError: it cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r} is a {type(fn).__name__}; pass a function")

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        world = current_world()
        world.backend.mark_step(world.device)
        result = fn(*args, **kwargs)
        world.backend.mark_step(world.device)
        return result

    return call
