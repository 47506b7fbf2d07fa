"""`torch_xla.debug.profiler`, over torch.profiler: named parts of a step, in a trace for Perfetto or Chrome."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core.devices import get_ordinal
from unisono.compat.torch_xla.core.steps import mark_step

_running: list[tuple[torch.profiler.profile, Path]] = []  # at most one: torch has one profiler per process

__getattr__ = left_out(__name__)


class Trace(torch.profiler.record_function):
    """A `with` block, or a decorator, whose time appears in the trace under that name. Other arguments have no
    effect."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name)


class StepTrace(Trace):
    """Like `Trace`, for a whole step, which ends with the block; its number is appended to the name."""

    def __init__(self, name: str, step_num: int | None = None, **kwargs: Any) -> None:
        super().__init__(name if step_num is None else f"{name}#{step_num}")

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if exc_type is None:
            mark_step()
        super().__exit__(exc_type, exc_value, traceback)


def start_server(port: int, only_on_master: bool = True) -> None:
    """Has no effect except a log message: profilers cannot connect to a replica here."""
    logging.getLogger("unisono").info("no profiler listens at port %s; start_trace(folder) writes a trace", port)


def start_trace(log_dir: str | os.PathLike[str]) -> None:
    """Record what this process does, until `stop_trace`, which writes `trace-ORDINAL.json` into that folder."""
    if _running:
        raise RuntimeError("a trace is already being recorded in this process; call stop_trace() first")
    _running.append((torch.profiler.profile(), Path(log_dir)))
    _running[0][0].start()


def stop_trace() -> None:
    """Write the trace; the folder is created if it is missing."""
    if not _running:
        raise RuntimeError("no trace is being recorded in this process; call start_trace(log_dir) first")
    profile, folder = _running.pop()
    profile.stop()
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / f"trace-{get_ordinal()}.json"))
