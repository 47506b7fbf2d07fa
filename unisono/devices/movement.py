"""How data is moved: the leaves of a batch on a device, and a module whose weights are tied."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.torch_private import APPLY


def send(leaf: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move a tensor, a packed sequence, or an object with a method `to(device)`; return anything else unchanged."""
    if isinstance(leaf, torch.Tensor | PackedSequence):
        movable: Any = leaf  # torch's annotation of the second one's method is incomplete
        return movable.to(device, non_blocking=non_blocking)
    if callable(getattr(leaf, "to", None)) and not isinstance(leaf, torch.nn.Module | type):
        return leaf.to(device)  # modules are excluded: they would move in place, and a batch is never modified
    return leaf


def host_buffer(like: torch.Tensor, pins: bool) -> torch.Tensor:
    """Allocate main memory for a copy of a tensor, with the same layout; page-locked if `pins`."""
    # Via meta: a tensor created like an XLA tensor has no memory, whatever its device.
    layout = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return torch.empty_like(layout, device="cpu", pin_memory=pins)


def map_module(fn: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module) -> None:
    """Put `fn(tensor)` in place of each tensor of a module, as `module.to` does: parameters stay the same objects."""
    getattr(module, APPLY)(fn)


def move_module(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """`module.to(device)`, which returns the module; tied parameters and buffers stay tied.

    On devices with another tensor implementation (xla, meta) torch replaces each parameter that it finds by a new one,
    and so creates two for one that is found twice.
    """
    ties: dict[int, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            ties.setdefault(id(tensor), []).append(name)
    module.to(device)
    for first, *others in ties.values():
        for name in others:
            owner, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(owner), own_name, attrgetter(first)(module))
    return module
