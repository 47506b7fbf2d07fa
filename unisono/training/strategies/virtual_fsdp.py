"""Virtual ranks with parameters that FSDP2 divides among the ranks: gradients are set aside whole, as passes leave
them, and each rank keeps its shards of the sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.strategies import FSDP
from unisono.torch_private import VERSION
from unisono.training.parameter_names import parameters_of
from unisono.training.strategies.engine import weak_method
from unisono.training.strategies.fsdp import FSDPEngine
from unisono.training.strategies.sharded import drop_whole_gradients, whole_gradient
from unisono.training.strategies.virtual import VirtualEngine
from unisono.virtual_ranks import VirtualRanks
from unisono.world import World


class VirtualFSDPEngine(VirtualEngine, FSDPEngine):
    """Runs a sharded module for several virtual ranks; no backward pass reduces."""

    def __init__(self, module: nn.Module, world: World, steps: Any, virtual: VirtualRanks, options: FSDP) -> None:
        self._options = replace(options, broadcast_buffers=False)
        super().__init__(module, world, steps, virtual)

    def _run_with(self, module: nn.Module, world: World, steps: Any) -> None:
        FSDPEngine.__init__(self, module, world, steps, self._options)
        self.gradients.looks_at = weak_method(self._look)

    def _look(self) -> list[tuple[int, torch.Tensor | None]]:
        whole, parts = self.leaves(), self.with_gradients()
        return [*((id(each), whole_gradient(each)) for each in whole), *((id(each), each.grad) for each in parts)]

    def count_writes(self) -> int:
        shards: Any = self._parts
        return sum(getattr(each.to_local(), VERSION) for each in shards)

    def with_gradients(self) -> list[torch.Tensor]:
        return [each for each in self._parts if each.requires_grad or each.grad is not None]

    def trained_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        own = set(map(id, parameters_of(optimizer)))
        return [each for each in self._whole if id(each.sharded) in own and each.requires_grad]

    def take_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        taken = whole_gradient(parameter)
        drop_whole_gradients([parameter])
        return taken

    def give_gradient(self, parameter: Any, total: torch.Tensor, factor: float, out: Any) -> None:
        from torch.distributed.tensor import distribute_tensor

        part = parameter.sharded
        # Each rank has the whole sum, and keeps its own shard.
        shard: Any = distribute_tensor(total, part.device_mesh, part.placements, src_data_rank=None)
        part.grad = shard * factor
        self._guard(part.grad)
