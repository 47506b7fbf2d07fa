"""The family of an accelerator that torch knows, through `torch.accelerator` and the module of its device type: CUDA,
XPU, NPU, HPU and others. Batches are copied on a side stream of each device, so that copying overlaps computing.

A batch is staged in page-locked memory, where torch has that for the device: the copy engine reads from it by itself;
the driver would stage a copy from other memory, and block. torch's caching host allocator reuses a block once the
copies that were issued from it have completed, so the staged tensor may be dropped as soon as its copy is issued.

The memory of a moved batch belongs to the side stream. Its use on another stream must be recorded (`record_stream`), or
the next copy could overwrite what a kernel still reads. For a sparse tensor, or an object of an unknown class, this
is not possible: it is moved on the calling thread's stream, without overlap, unless it has a method `record_stream`.

*Threads:* several may move batches concurrently; their copies are ordered on the device's side stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from unisono.devices.movement import send
from unisono.protocols import Backend, DeviceClock, Feature
from unisono.tree import map_objects, nbytes, objects


class _Ready(NamedTuple):
    """Work in progress on a stream: its end, and the tensors whose memory the stream owns."""

    done: torch.Event
    batch: Any
    device: torch.device


class AcceleratorBackend(Backend):
    """A subclass has what only its devices do, and their type as its `name`."""

    def __init__(self, name: str = "") -> None:
        self.name = name or self.name
        self._streams: dict[int, torch.Stream] = {}

    @property
    def module(self) -> Any:
        """torch's module of the device type, such as `torch.cuda`."""
        return torch.get_device_module(self.name)

    def device_count(self) -> int:
        return torch.accelerator.device_count() if current_accelerator() == self.name else 0

    def device_name(self, device: torch.device) -> str:
        name = getattr(self.module, "get_device_name", None)
        return super().device_name(device) if name is None else str(name(device))

    def activate(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def enter_worker(self, local_rank: int, local_world_size: int) -> torch.device:
        """The device, other than 0, that the process chose before; otherwise the local rank's, among those that it
        sees: a launcher may show each rank only its own, or may not say how many ranks are on a machine."""
        chosen = torch.accelerator.current_device_index() if self.module.is_initialized() else 0
        # 0 may also be the default of a process that has chosen no device; then the local rank decides.
        device = self.device(chosen or local_rank % max(1, self.device_count()))
        self.activate(device)
        return device

    @property
    def process_group_backend(self) -> str:
        return dist.Backend.default_device_backend_map.get(self.name, "gloo")

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        # If two threads come first together, the stream of one is dropped.
        stream = self._streams.get(device.index) or self._streams.setdefault(device.index, torch.Stream(device))
        own = torch.accelerator.current_stream(device)
        with _on_stream(stream):
            moved = map_objects(lambda leaf: self._move_leaf(leaf, device, own), batch)
            done = _record(stream)
        return moved, _Ready(done, moved, device)

    def wait_ready(self, token: _Ready) -> None:
        stream = torch.accelerator.current_stream(token.device)
        stream.wait_event(token.done)
        for leaf in objects(token.batch):
            for part in dense_parts(leaf):
                if part.device.type == self.name:
                    part.record_stream(stream)
            if _records_streams(leaf):
                leaf.record_stream(stream)

    def mark(self, device: torch.device, tensors: Any = ()) -> _Ready:
        return _Ready(_record(torch.accelerator.current_stream(device)), tensors, device)

    def is_reached(self, mark: _Ready) -> bool:
        return mark.done.query()

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def rng_state(self, device: torch.device) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state(device)
        return state

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.module.set_rng_state(state, device)

    def memory(self, device: torch.device) -> int:
        return int(self.module.memory_allocated(device)) if hasattr(self.module, "memory_allocated") else 0

    def peak_memory(self, device: torch.device) -> int:
        return int(self.module.max_memory_allocated(device)) if hasattr(self.module, "max_memory_allocated") else 0

    @cached_property
    def pins_memory(self) -> bool:
        try:
            return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
        except (RuntimeError, NotImplementedError):  # the accelerator has no allocator for it
            return False

    def repeat_kernels(self) -> None:
        super().repeat_kernels()
        torch.use_deterministic_algorithms(True)

    def unsupported_reason(self, feature: Feature) -> str | None:
        return None if feature == "virtual_ranks" else super().unsupported_reason(feature)

    def clock(self, device: torch.device) -> DeviceClock | None:
        return _Clock(self, device)

    def may_record(self) -> bool:
        """Whether an event may be recorded now: not before the runtime is up, which a parent leaves to its workers."""
        return bool(self.module.is_initialized())

    def _move_leaf(self, leaf: Any, device: torch.device, own: torch.Stream) -> Any:
        """A leaf on the device, or on its way there on the current stream; if its use cannot be recorded, on `own`."""
        if dense_parts(leaf) or _records_streams(leaf):
            return send(pin_leaf(leaf) if self.pins_memory else leaf, device, non_blocking=True)
        with _on_stream(own):
            return send(leaf, device)


class _Clock:
    """Records events on the calling thread's stream."""

    def __init__(self, backend: AcceleratorBackend, device: torch.device) -> None:
        self._backend, self._device = backend, device

    def stamp(self) -> torch.Event | None:
        if not self._backend.may_record():
            return None
        return _record(torch.accelerator.current_stream(self._device), enable_timing=True)

    def elapsed_ns(self, first: torch.Event, second: torch.Event) -> int | None:
        # `elapsed_time` raises while the device has not reached both events.
        return round(first.elapsed_time(second) * 1e6) if first.query() and second.query() else None


def current_accelerator() -> str:
    """The type of torch's accelerator, whether or not a device of it is here; "" if torch has none."""
    known = torch.accelerator.current_accelerator()
    return known.type if known is not None else ""


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    """Submit to that stream in the block. (A `torch.Stream` is a context, too, but for one thread at a time.)"""
    device = torch.accelerator.current_device_index()
    own = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # this also activates its device
    try:
        yield
    finally:
        torch.accelerator.set_stream(own)
        torch.accelerator.set_device_index(device)


def _record(stream: torch.Stream, enable_timing: bool = False) -> torch.Event:
    event = torch.Event(stream.device, enable_timing=enable_timing)
    event.record(stream)
    return event


def _records_streams(leaf: Any) -> bool:
    """Whether it is a user-defined object that records which streams use its memory."""
    return not isinstance(leaf, torch.Tensor | type) and callable(getattr(leaf, "record_stream", None))


def dense_parts(leaf: Any) -> list[torch.Tensor]:
    """The tensors of a leaf that a stream can be recorded on; none if it is sparse, or a wrapper of other tensors."""
    if isinstance(leaf, PackedSequence):
        return [part for part in leaf if isinstance(part, torch.Tensor)]
    is_plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return [leaf] if is_plain and not hasattr(leaf, "__tensor_flatten__") else []


def pin_leaf(leaf: Any) -> Any:
    """The leaf in page-locked memory; for a user-defined object, by its method `pin_memory()`, if it has one."""
    if any(part.device.type != "cpu" for part in dense_parts(leaf)) or not hasattr(leaf, "pin_memory"):
        return leaf
    if isinstance(leaf, torch.Tensor) and torch.empty_like(leaf, device="meta").stride() != leaf.stride():
        leaf = leaf.clone()  # torch refuses an expanded tensor, and would lock what lies between the elements
    try:
        return leaf.pin_memory()
    except RuntimeError as error:
        error.add_note(
            f"while {nbytes(leaf):,} bytes were put into page-locked memory, which is scarcer than other memory; "
            "a smaller `prefetch` bounds what waits there"
        )
        raise
