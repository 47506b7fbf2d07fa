"""Where the steps end of a device that records work before it executes it: at a barrier, around a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from unisono.arguments import check_type
from unisono.backends import resolve_device
from unisono.backends.device import DeviceLike, torch_device
from unisono.world import current_world

P = ParamSpec("P")
R = TypeVar("R")


def lazy_barrier(device: DeviceLike | Sequence[DeviceLike] | None = None, wait: bool = False) -> None:
    """End the step on a device, so that a lazy device executes what it has recorded. On eager devices there is nothing
    to do.

    A lazy device compiles what was recorded since the last barrier as one graph. A loader's `next()` and an optimizer's
    step end the step implicitly; a loop with neither keeps recording, so it must call this once per iteration.

    Args:
        device: one device, or a list: the step ends on all of them before any is waited for. None uses this rank's
            device.
        wait: return only when all work submitted to the devices has finished, on eager devices too.

    Raises:
        TypeError: `device` is not a device, or `wait` is not a bool.
        ValueError: there is no such device here.
    """
    check_type(wait, "wait", "pass True or False", bool)
    if device is None:
        world = current_world()
        resolved = [(world.backend, world.device)]
    else:
        several = device if isinstance(device, Sequence) and not isinstance(device, str) else [device]
        resolved = [resolve_device(torch_device(each)) for each in several]
    for backend, each in resolved:
        backend.mark_step(each)
    if wait:
        for backend, each in resolved:
            backend.synchronize(each)


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
        lazy_barrier()
        result = fn(*args, **kwargs)
        lazy_barrier()
        return result

    return call
