"""Modules built on the device "meta", which has shapes without values: materialises them on their device.

A model that exceeds each rank's memory is built this way, and sharded unit by unit: each unit is initialised and
sharded before the next. The values come from the modules' own `reset_parameters()`, drawn by rank zero.
"""

from __future__ import annotations

import torch
from torch import nn

from unisono.torch_private import BUFFERS, PARAMETERS, RESET_PARAMETERS

_RESETS = ("reset_parameters", RESET_PARAMETERS)  # the second one is used by torch's attention and transformers


def is_on_meta(module: nn.Module) -> bool:
    """Whether one of its parameters or buffers is on meta."""
    return any(_of_own(part) for part in module.modules())


def check_fillable(module: nn.Module) -> None:
    """Refuse (ValueError) a module that `fill` cannot initialise."""
    for name, part in module.named_modules():
        names = _of_own(part)
        if names and not any(hasattr(part, each) for each in _RESETS):
            where = f"its part {name!r}, a {type(part).__name__}," if name else "it"
            raise ValueError(
                f"the {type(module).__name__} was built on the device 'meta', and {where} has {', '.join(names)} and "
                "no reset_parameters(), which would initialise them; write one, or build that part on another device"
            )


@torch.no_grad()
def fill(module: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Replace the tensors on meta by tensors on the device, and initialise them, with values drawn by this rank; return
    them. Tied parameters stay tied."""
    filled: dict[torch.Tensor, torch.Tensor] = {}
    # A list, since the filled parts could not be found again: they have nothing on meta.
    inner_first: list[nn.Module] = []  # the order in which they were built, and in which they draw random numbers
    module.apply(inner_first.append)
    parts = [part for part in dict.fromkeys(inner_first) if _of_own(part)]
    for part in parts:
        for held in (getattr(part, PARAMETERS), getattr(part, BUFFERS)):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in filled:
                    empty = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    filled[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                held[name] = filled[tensor]
    for part in parts:
        reset = next(getattr(part, each) for each in _RESETS if hasattr(part, each))
        reset()
    return list(filled.values())


def _of_own(part: nn.Module) -> list[str]:
    held = {**getattr(part, PARAMETERS), **getattr(part, BUFFERS)}
    return [name for name, tensor in held.items() if tensor is not None and tensor.is_meta]
