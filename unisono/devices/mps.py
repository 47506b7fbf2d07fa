"""The MPS family: the GPU of an Apple machine. One device, no float64, and no process group that supports its tensors:
processes exchange copies in main memory, which the GPU shares."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.devices.movement import send
from unisono.protocols import Backend
from unisono.tree import map_objects

logger = logging.getLogger(__name__)


class MpsBackend(Backend):
    name = "mps"
    moves_in_loop = True  # Metal operations of two threads crash torch (its issue 197805)

    def device_count(self) -> int:
        return int(torch.backends.mps.is_available())

    def unavailable_reason(self) -> str:
        return "" if torch.backends.mps.is_built() else "this torch is built without MPS"

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        return map_objects(lambda leaf: send(self._narrow_leaf(leaf), device), batch), None

    def wait_ready(self, token: Any) -> None:
        pass

    def synchronize(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        torch.mps.set_rng_state(state)

    def memory(self, device: torch.device) -> int:
        return int(torch.mps.current_allocated_memory())

    def _narrow_leaf(self, leaf: Any) -> Any:
        values = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if isinstance(values, torch.Tensor) and values.dtype == torch.float64:
            _warn_of_float64()
            return leaf.float()
        return leaf


@cache
def _warn_of_float64() -> None:
    logger.warning("a batch holds float64 tensors, which mps does not have: they arrive as float32")


backend_class = MpsBackend
