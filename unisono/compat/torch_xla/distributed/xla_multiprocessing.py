"""`torch_xla.distributed.xla_multiprocessing`: one worker process per device, and what they share."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

import unisono
from unisono.building_blocks import check_choice, private_directory

R = TypeVar("R")


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Call `fn(index, *args)` in one worker process per device, as `unisono.spawn` does, with the same errors. Returns
    what the calls returned, by ordinal.

    Args:
        nprocs: 1 to the number of devices, any number on the CPU; None uses all. 1 runs `fn` in this process.
        join: False returns a `ProcessContext` immediately instead.
        start_method: "spawn", "fork" or "forkserver". All start workers in the same way, which is as fast as "fork" and
            safe for accelerators: `fn` and `args` are pickled by value, with what `fn` uses of its module.
    """
    check_choice(start_method, "start_method", "spawn", "fork", "forkserver")
    start: Any = unisono.spawn  # for a type checker, either of the two values of `join` is a signature
    return start(fn, args, nprocs, join, daemon)


class MpSerialExecutor:
    """Lets the workers of this machine, processes and threads, run something one after another, such as a download."""

    def __init__(self) -> None:
        copies = contextlib.ExitStack()
        self._path = copies.enter_context(private_directory("serial")) / "turn"
        self._path.touch()
        weakref.finalize(self, copies.close)

    def run(self, fn: Callable[[], R]) -> R:
        """Return `fn()`; every worker that calls this runs it, one at a time."""
        import fcntl

        with self._path.open("rb") as file:  # a separate open file per call, so that its lock ends with it in any case
            fcntl.flock(file, fcntl.LOCK_EX)
            return fn()


class MpModelWrapper:
    """A model for `spawn`: created once, in the calling process, and moved by the workers one after another."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._turns = model, MpSerialExecutor()

    def to(self, device: str | torch.device) -> nn.Module:
        """The model itself, on the device."""
        return self._turns.run(lambda: self._model.to(device))
