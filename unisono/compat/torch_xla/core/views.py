"""Tensors of a structure, handled together: which share memory, and converting them in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.compat.torch_xla.utils.utils import for_each_instance, for_each_instance_rewrite
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


class ToXlaTensorArena:
    """Converts the tensors of structures, all of one structure in one call.

    Args:
        convert_fn: takes a list of tensors and returns as many.
        select_fn: whether a tensor is to be converted.
    """

    def __init__(
        self, convert_fn: Callable[[list[torch.Tensor]], list[torch.Tensor]], select_fn: Callable[[torch.Tensor], bool]
    ) -> None:
        self._convert_fn = convert_fn
        self._select_fn = select_fn

    def transform(self, inputs: Any) -> Any:
        """The structure with converted tensors, in containers of the same types."""
        found: list[torch.Tensor] = []
        for_each_instance(inputs, self._is_selected, found.append)
        images = dict(zip(map(id, found), self._convert_fn(found), strict=True)) if found else {}
        return for_each_instance_rewrite(inputs, self._is_selected, lambda tensor: images[id(tensor)])

    def _is_selected(self, part: Any) -> bool:
        return isinstance(part, torch.Tensor) and self._select_fn(part)
