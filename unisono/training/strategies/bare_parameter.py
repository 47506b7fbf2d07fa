"""A parameter that is prepared by itself, as the only one of a module that nobody calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.torch_private import PARAMETERS
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.held import Members
from unisono.world import World


class BareParameter(nn.Module):
    """A tensor that trains without belonging to a module, as the only parameter of one."""

    value: torch.Tensor

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        getattr(self, PARAMETERS)["value"] = tensor  # which need not be an nn.Parameter

    def move(self, device: torch.device) -> None:
        """Move it to the device: the same tensor, but where torch cannot give it memory of that type."""
        moved = self.value.detach().to(device)
        try:
            self.value.data = moved
        except RuntimeError:  # of another implementation, as XLA's
            self.value = nn.Parameter(moved)


class _Bare(Members):
    def parameters(self) -> list[Any]:
        return [self._module.value]


class ParameterEngine(Engine):
    """Reduces the gradients of a bare parameter, in any strategy. No forward pass shows the passes through it, so its
    hook is there in all of them."""

    is_called = False
    _members_class = _Bare

    def __init__(self, module: BareParameter, world: World, steps: Steps) -> None:
        super().__init__(module, world, steps)
        self.name = f"parameter of shape {list(module.value.shape)}"

    def count_leaves(self) -> None:
        super().count_leaves()
        self.scale_leaves()

    def note_step(self, optimizer: Optimizer) -> None:
        super().note_step(optimizer)
        self.scale_leaves()
