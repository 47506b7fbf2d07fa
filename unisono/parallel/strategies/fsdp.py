"""strategy="fsdp": torch's FSDP2; each rank keeps its part of parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.parallel.agreement import broadcast_parameters
from unisono.parallel.ledger import Ledger
from unisono.parallel.strategies.elementwise import check_elementwise
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.sharded import check_shardable, shard
from unisono.parallel.strategies.strategy import Options, Strategy
from unisono.parallel.weakly import weakly
from unisono.tree import leaves
from unisono.world import World


class Sharded(Strategy):
    """In a world of processes."""

    name = "fsdp"
    is_of_torch = is_needed = True

    @classmethod
    def check_options(cls, options: Options) -> None:
        if options.comm_hook is not None:
            raise ValueError(
                f"comm_hook={options.comm_hook!r} is for strategy='ddp' or 'zero1'; strategy='fsdp' sends gradients "
                "as they are"
            )

    def check(self, each: nn.Module | Optimizer) -> None:
        if isinstance(each, Optimizer):
            check_elementwise(each, "fsdp", self.options.is_elementwise, takes_whole=False)
        else:
            check_shardable(each)

    def wrap_model(self, module: nn.Module) -> Engine:
        broadcast_parameters(module, world=self.world)
        return ShardedEngine(module, self.world, self.ledger, self.options.finds_unused)


class ShardedEngine(Engine):
    """
    Gradients arrive at the whole parameters, which torch makes for a backward pass, and never at the module's own.

    Args:
        module, world, ledger: as for `Engine`; a world of processes.
        finds_unused: as for `shard`.
    """

    is_leafy = False

    def __init__(self, module: nn.Module, world: World, ledger: Ledger, finds_unused: bool) -> None:
        self._name = type(module).__name__
        sharded: Any = shard(module, world, weakly(ledger.factor), find_unused_parameters=finds_unused)
        super().__init__(sharded, world, ledger)
        self._sharded = sharded
        self._backward_pass = -1  # the last one that was announced
        sharded.register_forward_hook(weakly(self._watch), prepend=True)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._world.comm.announce(f"a forward pass of the {self._name}")  # gathers parameters
        if torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        try:
            return self.module(*args, **kwargs)
        finally:
            self._sharded.reshard()

    def _watch(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Let the outputs announce their backward pass: before FSDP2's own hooks on them gather parameters."""
        for leaf in leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(weakly(self._announce))

    def _announce(self, gradient: torch.Tensor | None) -> None:
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass != self._backward_pass:
            self._backward_pass = backward_pass
            self._world.comm.announce(f"a backward pass of the {self._name}")

    def prepare(self, reduces: bool) -> None:
        self._world.comm.announce(f"the backward pass of {self._ledger.place()}")
        self._sharded.set_requires_gradient_sync(reduces)

    def complete(self) -> None:
        """The backward pass has reduced."""

    def reduce(self) -> None:
        raise RuntimeError(
            "strategy='fsdp' reduces in the backward pass that ends a step, and this one ran under no_sync(model); let "
            "the last backward pass of a step run outside of it"
        )

    def before_step(self) -> None:
        self._world.comm.announce(f"the end of {self._ledger.place()}")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._sharded.reshard()  # what a forward pass has gathered, and no backward pass has given back, is old now


strategy_class = Sharded
