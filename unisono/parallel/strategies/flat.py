"""The plain strategy: in a world of one, among threads, and on devices that process groups do not serve."""

from __future__ import annotations

from torch import nn

from unisono.parallel.agreement import broadcast_parameters
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.strategy import Strategy


class Flat(Strategy):
    """Gradients are reduced in flat buckets when the backward pass has ended."""

    name = "flat"

    def wrap_model(self, module: nn.Module) -> Engine:
        if self.world.world_size > 1:
            broadcast_parameters(module, world=self.world)
        return Engine(module, self.world, self.ledger, getattr(self.options, "broadcast_buffers", True))


strategy_class = Flat
