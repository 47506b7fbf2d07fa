"""The CUDA family. Batches are copied on a side stream of each device, so that copying overlaps computing.

Counting devices uses NVML through torch and does not initialise CUDA, so a parent process may ask and fork later.
"""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.backends import check_index
from unisono.backends.movement import send
from unisono.tree import leaves, tree_map


class _Ready(NamedTuple):
    """A copy under way: its end, and the tensors whose memory the side stream owns."""

    done: torch.cuda.Event
    batch: Any
    device: torch.device


class CudaBackend:
    name = "cuda"
    process_group_backend = "nccl"
    moves_in_background = True

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def device(self, index: int) -> torch.device:
        check_index(index, self.device_count(), self.name)
        return torch.device("cuda", index)

    def activate(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        stream = self._side_stream(device)
        with torch.cuda.stream(stream):
            moved = tree_map(lambda leaf: send(_pinned(leaf), device, non_blocking=True), batch)
            done = torch.cuda.Event()
            done.record(stream)
        return moved, _Ready(done, moved, device)

    def wait_ready(self, token: _Ready) -> None:
        stream = torch.cuda.current_stream(token.device)
        stream.wait_event(token.done)
        for part in chain.from_iterable(map(_dense_parts, leaves(token.batch))):
            if part.is_cuda:
                part.record_stream(stream)  # or the side stream could reuse the memory while this one reads it

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def mark_step(self, device: torch.device) -> None:
        pass

    def rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        torch.cuda.set_rng_state(state, device)

    def memory(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device)

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device.index not in self._streams:
                self._streams[device.index] = torch.cuda.Stream(device)
            return self._streams[device.index]


def _dense_parts(leaf: Any) -> list[torch.Tensor]:
    """The tensors whose memory a leaf holds: a stream is recorded on dense ones only."""
    if isinstance(leaf, PackedSequence):
        return [leaf.data]
    if not isinstance(leaf, torch.Tensor):
        return []
    return [leaf._indices(), leaf._values()] if leaf.layout is torch.sparse_coo else [leaf]


def _pinned(leaf: Any) -> Any:
    """Page-locked host memory, from which a copy does not block the copying thread; torch reuses the blocks."""
    if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
        return leaf.pin_memory()
    return leaf


backend_class = CudaBackend
