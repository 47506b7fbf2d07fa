"""Host memory that is reused from save to save, so that the loop only waits for the copy.

*Threads:* the loop copies; a writing thread only reads what was copied for it: the loop waits for that thread before it
copies again.
"""

from __future__ import annotations

import torch

from unisono.backends import get_backend
from unisono.backends.movement import host_buffer
from unisono.parallel.strategies.sharded import is_distributed, with_part


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
        """Copy a tensor; the copy is complete once the device has been synchronized. Of a tensor sharded over ranks,
        this part."""
        if is_distributed(tensor):
            return with_part(tensor, self.copy(tensor.to_local().detach()))
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_quantized:
            return source.cpu() if source.device != source.cpu().device else source.clone()
        if source.is_conj() or source.is_neg():
            source = source.resolve_conj().resolve_neg()
        return self._buffer(source).copy_(source, non_blocking=True)

    def _buffer(self, source: torch.Tensor) -> torch.Tensor:
        free = self._free.get((source.shape, source.stride(), source.dtype), [])
        buffer = free.pop() if free else host_buffer(source, get_backend(source.device.type).pins_memory)
        self._used.append(buffer)
        return buffer


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in main memory, for a caller that waits until it is written: itself, if it is there and alone."""
    if is_distributed(tensor):
        return with_part(tensor, host_view(tensor.to_local().detach()))
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if host.layout is torch.strided and host.untyped_storage().nbytes() != host.numel() * host.element_size():
        return host.clone()  # otherwise all of the memory that it is a view of would be written
    return host
