"""The strategy of runs with virtual ranks, over another one.

*Threads:* the rank's own.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.batches.virtual_ranks import VirtualRanks
from unisono.strategies import FSDP
from unisono.training.strategies.bare_parameter import BareParameter
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.strategy import Strategy, takes_whole_parameters
from unisono.training.strategies.virtual import VirtualEngine


class VirtualStrategy(Strategy):
    """Reduces over virtual ranks; optimizers are those of another strategy.

    Args:
        other: that strategy; on one rank, the plain one.
        chosen: the one that was chosen: what it refuses on several ranks is refused on one.
    """

    def __init__(self, other: Strategy, chosen: Strategy, virtual: VirtualRanks) -> None:
        super().__init__(other.world, other.steps, other.options)
        self._other, self._chosen, self._virtual = other, chosen, virtual
        self.wrap_optimizer, self.step_of = other.wrap_optimizer, other.step_of  # type: ignore[method-assign]

    def check(self, each: nn.Module | Optimizer) -> None:
        self._other.check(each)
        self._chosen.check_divisible(each)
        if isinstance(each, torch.optim.SparseAdam):
            raise ValueError("virtual_ranks add gradients as dense ones, which SparseAdam refuses; use Adam or SGD")
        if (
            isinstance(self.options, FSDP)
            and isinstance(each, Optimizer)
            and any(group.get("fused") for group in each.param_groups)
            and not takes_whole_parameters(each, self.options)
        ):
            raise ValueError(
                f"the {type(each).__name__} has fused=True, and its kernel rounds the last numbers of a shard "
                "differently: with virtual_ranks and strategy='fsdp', pass fused=False"
            )
        if isinstance(each, nn.Module) and any(isinstance(part, nn.SyncBatchNorm) for part in each.modules()):
            raise ValueError(
                f"the {type(each).__name__} has a SyncBatchNorm, and with virtual_ranks each one has statistics of its "
                "own; use BatchNorm"
            )
        if isinstance(each, BareParameter):
            raise ValueError(
                f"virtual_ranks do not train a parameter of shape {list(each.value.shape)} that is no model's; make it "
                "one of a module's, and prepare that"
            )

    def engine_of(self, module: nn.Module) -> Engine:
        if not (self._other.is_of_torch and isinstance(self.options, FSDP)):
            return VirtualEngine(module, self.world, self.steps, self._virtual)
        from unisono.training.strategies.virtual_fsdp import VirtualFSDPEngine  # which imports FSDP2

        return VirtualFSDPEngine(module, self.world, self.steps, self._virtual, self.options)
