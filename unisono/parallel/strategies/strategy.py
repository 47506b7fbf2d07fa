"""Strategy: determines how gradients are reduced, and what each rank keeps of prepared models and optimizers.

Each one is a module of its name, imported on demand, that ends with `strategy_class = ...`.
tests/contract/test_strategy.py runs the same tests for each of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.arguments import check_choice, check_type
from unisono.parallel.agreement import broadcast_parameters
from unisono.parallel.meta_modules import check_fillable
from unisono.parallel.steps import Steps
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.sharded import is_sharded, loaded_class
from unisono.protocols import Backend
from unisono.strategies import DDP, FSDP, SPMD, Choice, ZeRO1
from unisono.world import World

STRATEGIES: dict[str, type[Choice]] = {each.name: each for each in (DDP, FSDP, SPMD, ZeRO1)}
"""Options by strategy name."""

given_up: WeakSet[Optimizer] = WeakSet()
"""Optimizers of users whose state zero1 has divided among the ranks: they have none themselves."""


class Strategy:
    """Wraps models and optimizers so that all ranks train the same model.

    This one reduces gradients in flat buckets after the backward pass: in a world of one, among threads, and on devices
    that process groups do not support. The others are derived from it.

    Args:
        world: the rank's world.
        steps: provides the weights of the rank's gradients.
        options: an object of `unisono.strategies`.

    Attributes:
        name: the name by which users choose it.
        is_of_torch: whether it uses one of torch's engines, which need several processes; elsewhere the plain strategy
            is used.
        is_needed: whether no other strategy may replace it in a world of processes.
        fills: whether `wrap_model` accepts a model on the device "meta".
    """

    name: ClassVar[str] = "flat"
    is_of_torch: ClassVar[bool] = False
    is_needed: ClassVar[bool] = False
    fills: ClassVar[bool] = False

    def __init__(self, world: World, steps: Steps, options: Any) -> None:
        self.world, self.steps, self.options = world, steps, options

    @classmethod
    def check_world(cls, world: World) -> None:
        """Refuse a world in which it cannot run. Raises ValueError."""

    @classmethod
    def enter(cls, backend: Backend, device: torch.device) -> None:
        """Prepare a world of one, before the first work on the device. Raises ValueError if that is not supported."""

    def check(self, each: nn.Module | Optimizer) -> None:
        """Check that a model or an optimizer is supported; nothing is changed.

        Raises:
            TypeError, ValueError: it is not.
        """
        if isinstance(each, nn.Module):
            _check_plain(each)
            check_fillable(each)
            if self.world.comm.size > 1:
                _check_norms(each)
        elif each in given_up and not each.state:
            raise ValueError(
                f"strategy='zero1' has divided the state of this {type(each).__name__} among the ranks, and it was "
                "released, so that training would begin again without it; save accelerator.state_dict(optimizer) "
                "before free_memory(), load it into a new optimizer after prepare(), or make a new one to begin again"
            )

    def wrap_model(self, module: nn.Module) -> Engine:
        """Create the engine of the module; all ranks get rank zero's parameters. A collective."""
        if self.world.world_size > 1:
            broadcast_parameters(module, world=self.world)
        return Engine(module, self.world, self.steps, getattr(self.options, "broadcast_buffers", True))

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that replaces this one, usually itself."""
        return optimizer


def options_of(strategy: Any) -> Choice:
    """The options of a strategy that is given by name or by options.

    Raises:
        ValueError: there is no strategy of that name.
        TypeError: it is neither a name nor options.
    """
    if isinstance(strategy, Choice):
        return strategy
    kinds = ", ".join(each.__name__ for each in STRATEGIES.values())
    check_type(strategy, "strategy", f"pass a name, or one of {kinds}", str)
    check_choice(strategy, "strategy", *STRATEGIES)
    return STRATEGIES[strategy]()


def strategy_class(options: Choice) -> type[Strategy]:
    """The class of the strategy with these options."""
    found: type[Strategy] = import_module(f"{__package__}.{options.name}").strategy_class
    return found


def strategy_in(world: World, kind: type[Strategy], steps: Steps, options: Choice) -> Strategy:
    """Create the strategy for that world: the plain one instead of one of torch's if its engine cannot run there."""
    return (kind if world.takes_engines or not kind.is_of_torch else Strategy)(world, steps, options)


def _check_plain(model: nn.Module) -> None:
    """Refuse a model whose gradients or parameters another engine reduces or shards. Raises ValueError."""
    sharded_before = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, part in model.named_modules():
        where = f"its part {name!r}" if name else "it"
        if isinstance(part, DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"the {type(model).__name__} cannot be prepared: {where} is wrapped in {type(part).__name__}, which "
                "reduces gradients by itself; pass the model inside it (its .module), and prepare() does what the "
                "wrapper is for"
            )
        if sharded_before and isinstance(part, sharded_before):
            raise ValueError(_SHARDED.format(type(model).__name__, where, "FullyShardedDataParallel"))
    if is_sharded(model):
        raise ValueError(_SHARDED.format(type(model).__name__, "it, or a part of it,", "torch's fully_shard"))


def _check_norms(model: nn.Module) -> None:
    """Refuse layers that change their parameters in a forward pass, in which each rank has other samples."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and part.weight.requires_grad:
            raise ValueError(
                f"the {type(model).__name__} cannot be prepared for several ranks: its layer {name!r} has "
                f"max_norm={part.max_norm}, so a forward pass shortens the rows that it looks up, and these differ by "
                "rank; make it without max_norm, and shorten all rows after optimizer.step(): with torch.no_grad(): "
                f"weight.mul_(({part.max_norm} / weight.norm({part.norm_type:g}, 1, True)).clamp(max=1))"
            )


_SHARDED = (
    "the {} cannot be prepared: {} was sharded by {}, which does not know the weights of the ranks' gradients; pass "
    "the model as it was before sharding, with Accelerator(strategy='fsdp'), and prepare() shards it"
)
