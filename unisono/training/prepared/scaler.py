"""LossScaler: torch's GradScaler, shared by several optimizers."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from unisono.training.gradients import values_of
from unisono.training.parameter_names import parameters_of
from unisono.world import World


class LossScaler(GradScaler):
    """Updates the scale for a step when the next one begins, or when its state is read: by then all optimizers of the
    step have stepped. The scale stays on the device.

    Attributes:
        unscaled: the optimizers whose gradients are unscaled, and that have neither stepped nor zeroed them.
        is_due: whether an optimizer has stepped, or skipped its step, since the last update.
    """

    def __init__(self, device: str, **options: float) -> None:
        super().__init__(device, **options)  # type: ignore[arg-type]
        self.unscaled: WeakSet[Optimizer] = WeakSet()
        self.is_due = False

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        self.unscaled.add(optimizer)

    def share_overflow(self, optimizer: Optimizer, world: World) -> None:
        """Have all ranks skip a step whose gradients, each rank's own, have overflowed on one rank. A collective."""
        gradients = [values_of(each.grad) for each in parameters_of(optimizer) if each.grad is not None]
        sign = nn.utils.get_total_norm(gradients, torch.inf) * 0  # 0, or NaN
        gradients[0].add_(world.comm.all_reduce(sign))

    def let_go(self, optimizer: Optimizer) -> None:
        """Note that the optimizer is done with its gradients."""
        if optimizer in self.unscaled:
            self.unscaled.discard(optimizer)
            self.is_due = True

    def settle(self) -> None:
        """Update the scale according to the steps that were taken or skipped."""
        if self.is_due:
            self.update()
            self.is_due = False

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()
