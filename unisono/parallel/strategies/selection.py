"""Selects a strategy by its name or its options."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unisono.parallel.steps import Steps
from unisono.parallel.strategies.flat import Flat
from unisono.parallel.strategies.strategy import Strategy
from unisono.strategies import DDP, FSDP, SPMD, Choice, ZeRO1
from unisono.world import World

STRATEGIES: dict[str, type[Choice]] = {each.name: each for each in (DDP, FSDP, SPMD, ZeRO1)}
"""Options by strategy name, which is also the name of a module of this package, imported on demand."""


def options_of(strategy: Any) -> Choice:
    """The options of a strategy that is given by name or by options.

    Raises:
        ValueError: there is no strategy of that name.
        TypeError: it is neither a name nor options.
    """
    if isinstance(strategy, DDP | FSDP | SPMD):
        return strategy
    if not isinstance(strategy, str):
        kinds = ", ".join(each.__name__ for each in STRATEGIES.values())
        raise TypeError(f"strategy={strategy!r} is of type {type(strategy).__name__}; pass a name, or one of {kinds}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} does not exist; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]()


def strategy_class(options: Choice) -> type[Strategy]:
    """The class of the strategy with these options."""
    found: type[Strategy] = import_module(f"{__package__}.{options.name}").strategy_class
    return found


def strategy_in(world: World, kind: type[Strategy], steps: Steps, options: Choice) -> Strategy:
    """Create the strategy for that world: the plain one instead of one of torch's if its engine cannot run there."""
    return (kind if world.takes_engines or not kind.is_of_torch else Flat)(world, steps, options)
