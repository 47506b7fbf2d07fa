"""Strategies by the names that users give them."""

from __future__ import annotations

from importlib import import_module

from unisono.parallel.ledger import Ledger
from unisono.parallel.strategies.flat import Flat
from unisono.parallel.strategies.strategy import Options, Strategy
from unisono.world import World

STRATEGIES = ("ddp", "fsdp", "spmd", "zero1")
"""Each is a module beside this one, imported when it is asked for."""


def strategy_class(name: str) -> type[Strategy]:
    """
    Raises:
        ValueError: there is none of that name.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy={name!r} does not exist; choose one of {', '.join(STRATEGIES)}")
    found: type[Strategy] = import_module(f"{__package__}.{name}").strategy_class
    return found


def strategy_in(world: World, kind: type[Strategy], ledger: Ledger, options: Options) -> Strategy:
    """The strategy in that world: the plain one, where there is nothing that torch's engines could do."""
    return (kind if world.takes_engines or not kind.is_of_torch else Flat)(world, ledger, options)
