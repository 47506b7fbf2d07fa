"""Strategy: what `prepare` puts behind models and optimizers. The plain one reduces in flat buckets.

A further one is a file with a subclass, and a line in `choosing.py`.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.parallel.agreement import broadcast_parameters
from unisono.parallel.ledger import Ledger
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.sharded import is_sharded, loaded_class
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
        if isinstance(each, nn.Module):
            _check_plain(each)

    def wrap_model(self, module: nn.Module) -> Engine:
        """Give all ranks the parameters of rank zero, and the module its engine."""
        if self.world.world_size > 1:
            broadcast_parameters(module, world=self.world)
        return Engine(module, self.world, self.ledger)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that takes this one's place, most often itself."""
        return optimizer


def _check_plain(model: nn.Module) -> None:
    """
    Raises:
        ValueError: something else reduces the model's gradients, or has cut its parameters.
    """
    sharded_before = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, part in model.named_modules():
        where = f"its part {name!r}" if name else "it"
        if isinstance(part, DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"the {type(model).__name__} cannot be prepared: {where} is wrapped in {type(part).__name__}, which "
                "reduces gradients by itself; pass the model that is inside (its .module), and prepare() does what the "
                "wrapper is for"
            )
        if sharded_before and isinstance(part, sharded_before):
            raise ValueError(_SHARDED.format(type(model).__name__, where, "FullyShardedDataParallel"))
    if is_sharded(model):
        raise ValueError(_SHARDED.format(type(model).__name__, "it, or a part of it,", "torch's fully_shard"))


_SHARDED = (
    "the {} cannot be prepared: {} was sharded by {}, which knows nothing of what each rank's gradients weigh; pass "
    "the model as it was before, with Accelerator(strategy='fsdp'), and prepare() shards it"
)
