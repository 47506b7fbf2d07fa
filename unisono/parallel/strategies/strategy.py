"""Strategy: what `prepare` puts behind models and optimizers. The plain one reduces in flat buckets.

A further one is a file with a subclass, and a line in `choosing.py`.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from unisono.parallel.agreement import broadcast_parameters
from unisono.parallel.ledger import Ledger
from unisono.parallel.strategies.engine import Engine
from unisono.world import World


class Strategy:
    """In a world of one, among threads, and on devices that process groups do not serve.

    Args:
        world: the rank's.
        ledger: says what the rank's gradients weigh.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world, self.ledger = world, ledger

    def check(self, each: nn.Module | Optimizer) -> None:
        """Whether a model, or an optimizer, suits the strategy; nothing is changed.

        Raises:
            TypeError, ValueError: it does not.
        """

    def wrap_model(self, module: nn.Module) -> Engine:
        """Give all ranks the parameters of rank zero, and the module its engine."""
        if self.world.world_size > 1:
            broadcast_parameters(module, world=self.world)
        return Engine(module, self.world, self.ledger)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that takes this one's place, most often itself."""
        return optimizer
