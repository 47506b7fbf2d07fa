"""Saves that run concurrently with the loop, which only waits for a copy into host memory that is used again and again.

Ownership: a `Writer` owns the thread of the save in progress. It is not a daemon, so an exiting process waits for it.

*Threads:* the loop calls; `run_save` is the writing thread's body. It only reads what was copied for it: the loop waits
for that thread before it copies again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from unisono.backends import get_backend
from unisono.backends.movement import host_buffer
from unisono.outcome import Outcome

logger = logging.getLogger(__name__)


class Writer:
    """Runs saves in a thread, one at a time, and loses none of their errors."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def start(self, save: Callable[[], Any], what: str) -> None:
        """Run a save in a separate thread. No other may be in progress."""
        assert self._thread is None
        # Not a daemon: the interpreter's exit waits for the save.
        self._thread = threading.Thread(
            target=run_save, args=(save, what, self._failures), name="unisono-checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether there is a failure to take."""
        return bool(self._failures)

    def take_failure(self) -> BaseException | None:
        """The error of a save that has ended, once."""
        return self._failures.pop() if self._failures else None


def run_save(save: Callable[[], Any], what: str, failures: list[BaseException]) -> None:
    """Body of the thread: adds its error to `failures`, and logs it, since it may never be asked for."""
    error = Outcome.capture(save).error
    if error is not None:
        failures.append(error)
        kind = type(error).__name__
        logger.error("%s has failed: %s: %s; raised at the next step or save, or by close()", what, kind, error)


class HostMemory:
    """Copies of tensors in main memory, page-locked where that is faster. A save of the same tensors allocates none."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []

    def restart(self) -> None:
        """Allow the copies, which are no longer read, to be overwritten."""
        self._free.clear()  # frees what the previous save did not need
        for each in self._used:
            self._free.setdefault((each.shape, each.stride(), each.dtype), []).append(each)
        self._used.clear()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; the copy is complete once the device has been synchronized."""
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_quantized:
            return source.cpu() if source.device != source.cpu().device else source.clone()
        source = source.resolve_conj().resolve_neg()
        free = self._free.get((source.shape, source.stride(), source.dtype), [])
        buffer = free.pop() if free else host_buffer(source, get_backend(source.device.type).pins_memory)
        self._used.append(buffer)
        return buffer.copy_(source, non_blocking=True)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in main memory, for a caller that waits until it is written: itself, if it is there and alone."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if host.layout is torch.strided and host.untyped_storage().nbytes() != host.numel() * host.element_size():
        return host.clone()  # otherwise all of the memory that it is a view of would be written
    return host
