"""Tensors of a structure that share memory."""

from __future__ import annotations

from typing import Any

import torch

from unisono.compat.torch_xla.utils.utils import for_each_instance
from unisono.torch_private import STORAGE_ADDRESS


def check_view_sharing(obj: Any) -> None:
    """Refuse a structure in which two different tensors share memory, which they would no longer do on a device.

    Raises:
        RuntimeError: two tensors share memory.
    """
    owners: dict[int, torch.Tensor] = {}

    def check(tensor: torch.Tensor) -> None:
        owner = owners.setdefault(getattr(tensor.untyped_storage(), STORAGE_ADDRESS), tensor)
        if owner is not tensor:
            raise RuntimeError(
                f"tensors of shape {tuple(owner.shape)} and {tuple(tensor.shape)} share memory, and would no longer "
                "share it after a move; clone() one of them, or move the tensor that they are views of"
            )

    for_each_instance(obj, lambda part: isinstance(part, torch.Tensor), check)
