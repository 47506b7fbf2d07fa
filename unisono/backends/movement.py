"""What moves with a batch: the leaves that have a place, and how one is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def send(leaf: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A tensor, packed sequence or user object with a method `to(device)` on the device; anything else unchanged."""
    if isinstance(leaf, torch.Tensor | PackedSequence):
        return leaf.to(device, non_blocking=non_blocking)
    if callable(getattr(leaf, "to", None)) and not isinstance(leaf, torch.nn.Module | type):
        return leaf.to(device)  # a module would move in place, and a batch is never modified
    return leaf
