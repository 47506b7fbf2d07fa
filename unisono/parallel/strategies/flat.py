"""The plain strategy: in a world of one, among threads, and on devices that process groups do not support."""

from __future__ import annotations

from torch import nn

from unisono.parallel.agreement import broadcast_parameters
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.strategy import Strategy


class Flat(Strategy):
    """Reduces gradients in flat buckets after the backward pass."""

    name = "flat"

    def wrap_model(self, module: nn.Module) -> Engine:
        if self.world.world_size > 1:
            broadcast_parameters(module, world=self.world)
        return Engine(module, self.world, self.steps, getattr(self.options, "broadcast_buffers", True))


strategy_class = Flat
