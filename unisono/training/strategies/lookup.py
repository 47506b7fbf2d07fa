"""Strategies by their names: this package's, and those of others, by the entry points "unisono.strategies"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any

from unisono.arguments import check_choice, check_type
from unisono.strategies import DDP, FSDP, SPMD, Options, ZeRO1
from unisono.training.steps import Steps
from unisono.training.strategies.strategy import Strategy
from unisono.world import World

OWN: dict[str, type[Options]] = {each.name: each for each in (DDP, FSDP, SPMD, ZeRO1)}
"""The options of this package's strategies, by name."""

_IN_CONTRIB = {"diloco": "unisono-diloco"}
"""The packages of strategies that the repository has beside this package."""


def foreign() -> dict[str, EntryPoint]:
    """The strategies of other installed packages, by name. Each is imported on demand."""
    return {each.name: each for each in entry_points(group="unisono.strategies") if each.name not in OWN}


def options_of(strategy: Any) -> Options:
    """The options of a strategy that is given by name or by options; else TypeError. ValueError, if there is none of
    that name; ImportError, if its package is not installed, or cannot be loaded."""
    if isinstance(strategy, Options):
        # Not when the class is made: a class of `__main__` is sent to the workers, and has no attributes at first.
        if not (hasattr(strategy, "name") and hasattr(strategy, "strategy")):
            raise TypeError(f"{type(strategy).__qualname__} lacks what names it; give the class a name and a strategy")
        return strategy
    check_type(strategy, "strategy", "pass a name, or options such as unisono.strategies.DDP()", str)
    if strategy in OWN:
        return OWN[strategy]()
    entries = foreign()
    if strategy not in entries and (package := _IN_CONTRIB.get(strategy)):
        raise ImportError(
            f"strategy={strategy!r} comes with the package {package}, which is not installed; pip install "
            f"contrib/{package}, a directory of Unisono's repository"
        )
    check_choice(strategy, "strategy", *sorted([*OWN, *entries]))
    entry = entries[strategy]
    with _loading(strategy, entry.dist.name if entry.dist else entry.module):
        kind = entry.load()
        if not (isinstance(kind, type) and issubclass(kind, Options) and getattr(kind, "name", None) == entry.name):
            raise TypeError(f"{entry.value} is no subclass of unisono.strategies.Options of the name {entry.name!r}")
        return kind()


def strategy_class(options: Options) -> type[Strategy]:
    """The class of the strategy with these options. ImportError, if it cannot be loaded."""
    kind = type(options)
    with _loading(options.name, kind.__module__.partition(".")[0]):
        found: Any = resolve_name(kind.strategy) if isinstance(kind.strategy, str) else kind.strategy
        if not (isinstance(found, type) and issubclass(found, Strategy)):
            raise TypeError(f"{kind.__qualname__}.strategy={found!r} is no subclass of unisono.strategies.Strategy")
        return found


@contextmanager
def _loading(name: str, package: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ImportError(
            f"strategy {name!r} of the package {package} cannot be loaded, {type(error).__name__}: {error}; "
            "repair or uninstall that package"
        ) from error


def strategy_in(world: World, kind: type[Strategy], steps: Steps, options: Options) -> Strategy:
    """Create the strategy for that world: the plain one instead of one of torch's if its engine cannot run there."""
    chosen = kind(world, steps, options)
    found = chosen if world.takes_engines or not kind.is_of_torch else Strategy(world, steps, options)
    if steps.virtual is None:
        return found
    over_virtual = import_module(f"{__package__}.virtual_strategy").VirtualStrategy
    return over_virtual(found, chosen, steps.virtual)  # type: ignore[no-any-return]
