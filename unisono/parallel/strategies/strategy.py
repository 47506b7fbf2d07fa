"""Strategy: what `prepare` puts behind models and optimizers, so that the ranks train as one.

A strategy is a file that ends with `strategy_class = ...`, and a name in `selection.py`.
tests/contract/test_strategy.py holds each of them to the same law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.parallel.ledger import Ledger
from unisono.parallel.meta_modules import check_fillable
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.sharded import is_sharded, loaded_class
from unisono.protocols import Backend
from unisono.world import World


class Strategy(ABC):
    """
    Args:
        world: the rank's.
        ledger: says what the rank's gradients weigh.
        options: of `unisono.strategies`, that have passed `check_options`.

    Attributes:
        name: by which users choose it.
        is_of_torch: it joins one of torch's engines, which take several processes; elsewhere the plain one serves.
        is_needed: among processes no other one may take its place.
        fills: a model that is on the device "meta" comes to `wrap_model` as it is.
    """

    name: ClassVar[str]
    is_of_torch: ClassVar[bool] = False
    is_needed: ClassVar[bool] = False
    fills: ClassVar[bool] = False

    def __init__(self, world: World, ledger: Ledger, options: Any) -> None:
        self.world, self.ledger, self.options = world, ledger, options

    @classmethod
    def check_options(cls, options: Any, precision: str, max_grad_norm: float | None) -> None:
        """Refuse options that it does not know, or that do not go with those of the Accelerator. ValueError."""

    @classmethod
    def check_world(cls, world: World) -> None:
        """Refuse a world that it cannot run in. ValueError."""

    @classmethod
    def enter(cls, backend: Backend, device: torch.device) -> None:
        """In a world of one, before the first work on the device. ValueError where the family lacks what it takes."""

    def check(self, each: nn.Module | Optimizer) -> None:
        """Whether a model, or an optimizer, suits it; nothing is changed.

        Raises:
            TypeError, ValueError: it does not.
        """
        if isinstance(each, nn.Module):
            _check_plain(each)
            check_fillable(each)

    @abstractmethod
    def wrap_model(self, module: nn.Module) -> Engine:
        """The module behind its engine, with the parameters of rank zero on all ranks. A collective."""

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that takes this one's place, most often itself."""
        return optimizer

    def check_clipping(self) -> None:
        """Refuse to clip by a norm that the ranks have in common. ValueError."""


def _check_plain(model: nn.Module) -> None:
    """Refuse a model whose gradients something else reduces, or whose parameters it has cut. ValueError."""
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


_SHARDED = (
    "the {} cannot be prepared: {} was sharded by {}, which does not know the weights of the ranks' gradients; pass "
    "the model as it was before sharding, with Accelerator(strategy='fsdp'), and prepare() shards it"
)
