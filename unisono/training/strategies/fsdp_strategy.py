"""strategy="fsdp": torch's FSDP2; each rank keeps its shard of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from unisono.training.strategies.bare_parameter import BareParameter
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.fsdp import FSDPEngine
from unisono.training.strategies.sharded import check_shardable
from unisono.training.strategies.strategy import Strategy, check_divisible, kind_of, takes_whole_parameters


class FSDPStrategy(Strategy):
    """The strategy for a world of processes."""

    is_of_torch = is_needed = fills = True

    def check(self, each: nn.Module | Optimizer) -> None:
        super().check(each)
        family = self.world.backend
        if family.process_group_backend != "gloo" and f"{family.name}:gloo" in dist.get_backend_config().split(","):
            raise ValueError(
                f"strategy='fsdp' on {self.world.device} cannot use a gloo group: torch crashes when it gathers "
                "shards there; give each rank a device of its own and a group of "
                f"{family.process_group_backend}, or use strategy='zero1' or 'ddp'"
            )

    def check_divisible(self, each: nn.Module | Optimizer) -> None:
        if isinstance(each, Optimizer):
            check_divisible(each, self.options)
        elif not isinstance(each, BareParameter):  # which stays whole
            check_shardable(each, self.options.units)

    def engine_of(self, module: nn.Module) -> Engine:
        return FSDPEngine(module, self.world, self.steps, self.options)

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        if takes_whole_parameters(optimizer, self.options):
            from unisono.training.strategies.whole_steps import stepping_whole

            return stepping_whole(optimizer, self.world)
        from unisono.training.strategies.parts import stepping_plain

        return optimizer.step if kind_of(optimizer) is None else stepping_plain(optimizer)
