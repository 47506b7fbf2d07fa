"""`torch_xla.debug.profiler`, over torch.profiler: named parts of a step, in a trace for Perfetto or Chrome."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from unisono.compat.absent import refuse
from unisono.compat.torch_xla.core.ordinals import get_ordinal
from unisono.compat.torch_xla.core.steps import mark_step

P = ParamSpec("P")
R = TypeVar("R")

_LOCAL = "a replica traces itself: start_trace(folder) before the steps in question, stop_trace() after them"

_running: tuple[torch.profiler.profile, Path] | None = None  # torch has one profiler per process


def __getattr__(name: str) -> Any:
    refuse(__name__, name, {"trace": _LOCAL, "trace_detached": _LOCAL})


class Trace(torch.profiler.record_function):
    """A `with` block, or a decorator, whose time appears in the trace under that name. Other arguments have no
    effect."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name)


class StepTrace(Trace):
    """Like `Trace`, for a whole step, which ends with the block.

    Args:
        step_num: appended to the name.
    """

    def __init__(self, name: str, step_num: int | None = None, **kwargs: Any) -> None:
        super().__init__(name if step_num is None else f"{name}#{step_num}")

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if exc_type is None:
            mark_step()
        super().__exit__(exc_type, exc_value, traceback)


def trace_me(scope: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: each call of the function is a `Trace` of that name."""

    def traced(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with Trace(scope):
                return fn(*args, **kwargs)

        return call

    return traced


def start_server(port: int, only_on_master: bool = True) -> None:
    """Has no effect except a log message: profilers cannot connect to a replica here."""
    logging.getLogger("unisono").info("no profiler listens at port %s: %s", port, _LOCAL)


def start_trace(log_dir: str | os.PathLike[str]) -> None:
    """Record what this process does, until `stop_trace`.

    Args:
        log_dir: a folder for `trace-ORDINAL.json`, created if it is missing.

    Raises:
        RuntimeError: a trace is already being recorded.
    """
    global _running
    if _running is not None:
        raise RuntimeError("a trace is already being recorded in this process; call stop_trace() first")
    profile = torch.profiler.profile()
    profile.start()
    _running = profile, Path(log_dir)


def stop_trace() -> None:
    """Write the trace.

    Raises:
        RuntimeError: no trace is being recorded.
    """
    global _running
    if _running is None:
        raise RuntimeError("no trace is being recorded in this process; call start_trace(log_dir) first")
    (profile, folder), _running = _running, None
    profile.stop()
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / f"trace-{get_ordinal()}.json"))
