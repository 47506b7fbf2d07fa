"""Values in main memory, to be sent to other ranks or written to files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.backends import CPU
from unisono.placement.copying import copy_to
from unisono.torch_private import STORAGE_ADDRESS
from unisono.tree import tree_map


def to_host(data: Any) -> Any:
    """The data with its tensors in main memory, in containers of the same types.

    Tensors already there are not copied. Tensors over the same elements of one storage keep sharing it: tied weights
    are stored once in a file, too.
    """
    images: dict[object, torch.Tensor] = {}

    def image_of(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return copy_to(leaf, CPU)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = _place(leaf)
        if place not in images:
            images[place] = leaf.detach().cpu()
        return _like(leaf, images[place])

    return tree_map(image_of, data)


def _place(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors over the same elements."""
    try:
        storage = getattr(tensor.untyped_storage(), STORAGE_ADDRESS)
    except (NotImplementedError, RuntimeError):  # a kind of tensor without storage
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _like(tensor: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Give the image the tensor's type."""
    if tensor.is_cpu and tensor.is_leaf:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(image, tensor.requires_grad)
    return image.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)
