"""Saves that run concurrently with the loop, which waits only for a copy into host memory that is reused each time.

*Threads:* the loop calls; `run_save` is the writing thread's body. It reads only what was copied for it: the loop waits
for that thread before it copies again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from unisono.comm.outcome import Outcome
from unisono.comm.thread_start import start_threads
from unisono.devices import get_backend
from unisono.devices.movement import host_buffer

logger = logging.getLogger(__name__)


def start_save(save: Callable[[], Any], what: str) -> Future[None]:
    """Run a save in its own thread; the future has its error."""
    future: Future[None] = Future()
    # Not a daemon: the interpreter's exit waits for the save, and so does a worker that ends by an error.
    args = save, what, future
    start_threads([threading.Thread(target=run_save, args=args, name="unisono-checkpoint", daemon=False)])
    return future


def run_save(save: Callable[[], Any], what: str, future: Future[None]) -> None:
    """Body of the thread: ends the future, and logs an error, since it may never be asked for."""
    error = Outcome.capture(save).error
    if error is None:
        future.set_result(None)
        return
    logger.error("%s has failed: %r; raised at the next step or save, or by close()", what, error)
    future.set_exception(error)


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
        return host.clone()  # otherwise all the memory that it is a view of would be written
    return host
