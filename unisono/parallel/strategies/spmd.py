"""strategy="spmd": one program, with batches spread over all devices of the process, which XLA partitions."""

from __future__ import annotations

import torch

from unisono.parallel.strategies.strategy import Strategy
from unisono.protocols import Backend
from unisono.world import World


class SPMDStrategy(Strategy):
    """The compiler inserts the reductions, so this package runs it as a world of one."""

    name = "spmd"

    @classmethod
    def check_world(cls, world: World) -> None:
        if world.world_size > 1:
            raise ValueError(
                f"strategy='spmd' is one program that has all devices, and this is rank {world.rank} of "
                f"{world.world_size}; call it in a plain script, or use strategy='ddp' here"
            )

    @classmethod
    def enter(cls, backend: Backend, device: torch.device) -> None:
        if reason := backend.unsupported_reason("spmd"):
            raise ValueError(f"strategy='spmd' does not work with {device}: {reason}")
        backend.spread()


strategy_class = SPMDStrategy
