"""The CUDA family. Batches are copied on a side stream of each device, so that copying overlaps computing.

A batch is staged in page-locked memory, from which the copy engine reads by itself; a copy from other memory would be
staged by the driver, and block. The blocks are reused rather than allocated for each batch, which would take longer
than the copy: torch's caching host allocator reuses a block once the copies that were issued from it have completed,
which it knows by an event. So the staged tensor may be dropped as soon as its copy is issued.

The memory of a moved batch belongs to the side stream. Its use on another stream must be recorded (`record_stream`), or
the next copy could overwrite what a kernel is still reading. For an object of an unknown class that is not possible: it
is moved on the device's default stream, without overlap, unless it has a method `record_stream(stream)` of its own.

*Threads:* several may move batches concurrently; their copies are ordered on the device's side stream. Threads other
than the main one ask for events and for memory. The driver treats that as an error while any thread captures a graph,
and ends the capture, unless the asking thread has declared that only its own captures matter to it.

Counting devices uses NVML through torch and does not initialise CUDA, so a parent process may count and fork later.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.backends.mig import describe_mig
from unisono.backends.movement import send
from unisono.backends.usual import UsualBackend
from unisono.protocols import DeviceClock
from unisono.torch_private import sparse_indices, sparse_values
from unisono.tree import map_objects, nbytes, objects

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, and hipStreamCaptureModeThreadLocal


class _Ready(NamedTuple):
    """Work in progress on a stream: its end, and the tensors whose memory the stream owns."""

    done: torch.cuda.Event
    batch: Any
    device: torch.device


class _Clock:
    """Records events on the calling thread's stream; none before CUDA is initialised, which a parent process leaves to
    its workers, and none in a graph, which would replay them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event | None:
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ns(self, first: torch.cuda.Event, second: torch.cuda.Event) -> int | None:
        # `elapsed_time` raises while the device has not reached both events.
        return round(first.elapsed_time(second) * 1e6) if first.query() and second.query() else None


class CudaBackend(UsualBackend):
    name = "cuda"
    process_group_backend = "nccl"

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def unused_hardware(self) -> str:
        return describe_mig() if self.is_available() else ""

    def activate(self, device: torch.device) -> None:
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:
            if advice := describe_mig():
                error.add_note(advice)
            raise
        if threading.current_thread() is not threading.main_thread():
            _leave_captures_alone()

    def enter_worker(self, local_rank: int, local_world_size: int) -> torch.device:
        """The device, other than 0, chosen by `torch.cuda.set_device` before; otherwise that of the local rank.

        It is one of the devices visible to the process: a launcher may show each rank only its own GPU, which is
        `cuda:0` to all of them, and the code that created the process group may not have said how many ranks are on a
        machine.
        """
        chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        # 0 may also be the default of a process that has chosen no device; then the local rank decides.
        device = self.device(chosen or local_rank % max(1, self.device_count()))
        self.activate(device)
        return device

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        stream = self.side_stream(device)
        with torch.cuda.stream(stream):
            moved = map_objects(lambda leaf: _move_leaf(leaf, device), batch)
            done = torch.cuda.Event()
            done.record(stream)
        return moved, _Ready(done, moved, device)

    def wait_ready(self, token: _Ready) -> None:
        stream = torch.cuda.current_stream(token.device)
        stream.wait_event(token.done)
        for leaf in objects(token.batch):
            for part in dense_parts(leaf):
                if part.is_cuda:
                    part.record_stream(stream)
            if _tells_streams(leaf):
                leaf.record_stream(stream)

    def mark(self, device: torch.device, tensors: Any = ()) -> _Ready:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        return _Ready(done, tensors, device)

    def is_reached(self, mark: _Ready) -> bool:
        return bool(mark.done.query())

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        torch.cuda.set_rng_state(state, device)

    def memory(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device)

    def peak_memory(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def clock(self, device: torch.device) -> DeviceClock | None:
        return _Clock(device)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device.index not in self._streams:
                self._streams[device.index] = torch.cuda.Stream(device)
            return self._streams[device.index]


def _leave_captures_alone() -> None:
    """Ensure that nothing in the calling thread ends a graph capture in another thread."""
    exchange = _exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@cache
def _exchange_capture_mode() -> Any:
    """The function of the driver's library, or of ROCm's runtime; None if it has another name, as on other systems."""
    hip = torch.version.hip
    names = ["libcuda.so.1"] if hip is None else ["libamdhip64.so", f"libamdhip64.so.{hip.split('.')[0]}"]
    for name in names:
        with suppress(OSError):
            # As torch has loaded it: a second copy of a runtime would have a state of its own.
            library = ctypes.CDLL(name, ctypes.DEFAULT_MODE if hip is None else os.RTLD_NOLOAD)
            return getattr(library, f"{'cu' if hip is None else 'hip'}ThreadExchangeStreamCaptureMode")
    return None


def _move_leaf(leaf: Any, device: torch.device) -> Any:
    """A leaf on the device, or on its way there on the current stream."""
    if isinstance(leaf, torch.Tensor | PackedSequence):
        return send(pin_leaf(leaf), device, non_blocking=True)
    if _tells_streams(leaf):
        return send(pin_leaf(leaf), device)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        return send(leaf, device)


def _tells_streams(leaf: Any) -> bool:
    """Whether it is a user-defined object that records which streams use its memory."""
    return not isinstance(leaf, torch.Tensor | type) and callable(getattr(leaf, "record_stream", None))


def dense_parts(leaf: Any) -> list[torch.Tensor]:
    """The tensors whose memory a leaf holds: a stream can be recorded on dense ones only."""
    if isinstance(leaf, PackedSequence):
        return [part for part in leaf if isinstance(part, torch.Tensor)]
    if not isinstance(leaf, torch.Tensor):
        return []
    if leaf.layout is torch.sparse_coo:
        return [sparse_indices(leaf), sparse_values(leaf)]
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [leaf.crow_indices(), leaf.col_indices(), leaf.values()]
    if leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [leaf.ccol_indices(), leaf.row_indices(), leaf.values()]
    if hasattr(leaf, "__tensor_flatten__"):  # a wrapper of other tensors, such as a jagged one
        return [part for name in leaf.__tensor_flatten__()[0] for part in dense_parts(getattr(leaf, name))]
    return [leaf]


def pin_leaf(leaf: Any) -> Any:
    """The leaf in page-locked memory; for a user-defined object, by its method `pin_memory()`, if it has one."""
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return leaf
    elif isinstance(leaf, PackedSequence):
        if leaf.data.device.type != "cpu":
            return leaf
    elif not callable(getattr(leaf, "pin_memory", None)):
        return leaf
    try:
        return leaf.pin_memory()
    except RuntimeError as error:
        error.add_note(
            f"while {nbytes(leaf):,} bytes were put into page-locked memory, which is scarcer than other memory; "
            "prefetch_bytes bounds what waits there"
        )
        raise


backend_class = CudaBackend
