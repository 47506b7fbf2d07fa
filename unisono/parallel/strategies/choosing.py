"""Which strategy serves where, by the names that users give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.parallel.ledger import Ledger
from unisono.parallel.strategies.ddp import Replicated
from unisono.parallel.strategies.fsdp import Sharded
from unisono.parallel.strategies.strategy import Strategy
from unisono.parallel.strategies.zero import Divided
from unisono.world import World

STRATEGIES = ("ddp", "fsdp", "spmd", "zero1")


def strategy_on(
    name: str,
    world: World,
    ledger: Ledger,
    hook: str | None,
    options: Mapping[str, Any] | None,
    finds_unused: bool,
    is_elementwise: bool,
) -> Strategy:
    """The strategy of that name, in that world.

    Args:
        hook, options: as for `attach_hook`.
        finds_unused: some parameters take no part in some forward passes.
        is_elementwise: the user says that the optimizers treat each element for itself.
    """
    if not world.takes_engines or name == "spmd":  # there is nothing that torch's engines could do
        return Strategy(world, ledger)
    if name == "fsdp":
        return Sharded(world, ledger, finds_unused, is_elementwise)
    if name == "zero1":
        return Divided(world, ledger, hook, options, finds_unused, is_elementwise)
    return Replicated(world, ledger, hook, options, finds_unused)
