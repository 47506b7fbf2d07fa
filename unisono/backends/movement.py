"""What moves with a batch: the leaves that have a place, and how one is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def send(leaf: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A tensor, a packed sequence, or an object with a method `to(device)`, on the device; else as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=non_blocking)
    if isinstance(leaf, PackedSequence):
        packed: Any = leaf  # torch annotates only some of what its method takes
        return packed.to(device, non_blocking=non_blocking)
    if callable(getattr(leaf, "to", None)) and not isinstance(leaf, torch.nn.Module | type):
        return leaf.to(device)  # a module would move in place, and a batch is never modified
    return leaf
