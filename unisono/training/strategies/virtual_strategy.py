"""The strategy of runs with virtual ranks, over another one; and the engine for parameters that FSDP2 divides among the
ranks: gradients are set aside whole, as passes leave them, and each rank keeps its shards of the sums.

*Threads:* the rank's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.batches.virtual_ranks import VirtualRanks
from unisono.strategies import FSDP
from unisono.torch_private import VERSION, queue_callback
from unisono.training.machine import Visit
from unisono.training.parameter_names import parameters_of
from unisono.training.strategies.bare_parameter import BareParameter
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.fsdp import FSDPEngine
from unisono.training.strategies.sharded import cut_like, drop_whole_gradients, whole_gradient
from unisono.training.strategies.strategy import Strategy, takes_whole_parameters
from unisono.training.strategies.virtual import VirtualEngine
from unisono.training.strategies.weak import weak_method
from unisono.world import World


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
        if self._other.is_of_torch and isinstance(self.options, FSDP):
            return VirtualFSDPEngine(module, self.world, self.steps, self._virtual, self.options)
        return VirtualEngine(module, self.world, self.steps, self._virtual)


class VirtualFSDPEngine(VirtualEngine, FSDPEngine):
    """Runs a sharded module for several virtual ranks; no backward pass reduces."""

    def __init__(self, module: nn.Module, world: World, steps: Any, virtual: VirtualRanks, options: FSDP) -> None:
        self._options = replace(options, broadcast_buffers=False)
        super().__init__(module, world, steps, virtual)

    def _run_with(self, module: nn.Module, world: World, steps: Any) -> None:
        FSDPEngine.__init__(self, module, world, steps, self._options)
        self.gradients.looks_at = weak_method(self._look)

    def begin_pass(self, reduces: bool, visit: Visit) -> None:
        super().begin_pass(reduces, visit)
        queue_callback(weak_method(self._show))  # after the one that ends the pass

    def note_dropped(self, dropped: set[int]) -> None:
        super().note_dropped(dropped)
        drop_whole_gradients([each for each in self._whole if id(each.sharded) in dropped])

    def _show(self) -> None:
        """Have `.grad` of the sharded parameters be shards of what the passes of a virtual rank have left: so what the
        loop does to it is noticed."""
        each: Any
        for each in self.leaves():
            if (gradient := whole_gradient(each)) is not None:
                self._set_shard(each, cut_like(each.sharded, gradient).clone())
        self.gradients.look_again()

    def _set_shard(self, parameter: Any, shard: torch.Tensor) -> None:
        parameter.sharded.grad = shard
        self._guard(shard)

    def _look(self) -> list[tuple[int, torch.Tensor | None]]:
        """Of the sharded parameters, another tensor where the loop has changed what was shown: kernels for several of
        them count no writes."""
        found = [(id(part), part.grad) for part in self.with_gradients()]
        each: Any
        for each in self.leaves():
            gradient, shown = whole_gradient(each), each.sharded.grad
            found.append((id(each), gradient))
            if gradient is not None and shown is not None and not _are_equal(shown, cut_like(each.sharded, gradient)):
                found.append((id(each.sharded), shown.detach()))
        return found

    def count_writes(self) -> int:
        shards: Any = self._parts
        return sum(getattr(each.to_local(), VERSION) for each in shards)

    def with_gradients(self) -> list[torch.Tensor]:
        return [each for each in self._parts if each.requires_grad or each.grad is not None]

    def parameters_by(self, optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
        own = set(map(id, parameters_of(optimizer)))
        return [(id(each.sharded), each) for each in self._whole if id(each.sharded) in own]

    def trained_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        own = set(map(id, parameters_of(optimizer)))
        return [each for each in self._whole if id(each.sharded) in own and each.requires_grad]

    def take_gradient(self, parameter: Any) -> torch.Tensor | None:
        taken, sharded = whole_gradient(parameter), parameter.sharded
        if taken is not None and sharded.grad is None and self.gradients.known:
            taken = None  # the loop has set it to None
        drop_whole_gradients([parameter])
        sharded.grad = None
        return taken

    def give_gradient(self, parameter: Any, total: torch.Tensor, factor: float, out: Any) -> None:
        self._set_shard(parameter, cut_like(parameter.sharded, total) * factor)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether these shards have the same bits."""
    return torch.equal(*(each.to_local().contiguous().view(torch.uint8) for each in (one, other)))
