"""A function as a separate program, for devices that compile what they have recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from unisono.arguments import check_type
from unisono.world import current_world

P = ParamSpec("P")
R = TypeVar("R")


def compiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Make the function one program of a lazy device, compiled once and run on every call.

    It is compiled once per combination of input shapes and dtypes, for all ranks that are threads of this process, even
    if they call it concurrently. What was recorded before the call is not part of it, and results are computed when it
    returns. Reading a value inside (`item()`) ends the program at that point and begins another one. The runtime keeps
    the `XLA_COMPILATION_CACHE_SIZE` (default 2048) most recently used programs; `gather_report` counts how many were
    compiled, and how often one was reused. On eager devices the function is simply called.

    Args:
        fn: the function, called with the arguments of each call: its Python code runs, and its operations are recorded.

    Returns:
        A function with the same signature.

    Raises:
        TypeError: `fn` is not callable.
    """
    check_type(fn, "fn", "pass a function", Callable)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        world = current_world()
        world.backend.mark_step(world.device)
        result = fn(*args, **kwargs)
        world.backend.mark_step(world.device)
        return result

    return call
