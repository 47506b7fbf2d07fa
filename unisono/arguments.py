"""Checks of arguments that many functions have: a type, a choice, the least value of an integer; and of their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def check_type(value: Any, name: str, advice: str, *kinds: Any) -> None:
    """Check that an argument has one of these types; a TypeError names its type, and gives the advice. A bool is not a
    number, unless `bool` is one of them."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name}={value!r:.200} is of type {type(value).__name__}; {advice}")


def check_choice(value: Any, name: str, *choices: Any) -> None:
    """Check that an argument is one of these choices; a ValueError names them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} does not exist; choose one of {', '.join(map(str, choices))}")


def check_integer(value: Any, name: str, least: int, advice: str = "") -> int:
    """Check that an argument is an integer (else TypeError) of at least `least` (else ValueError), and return it."""
    check_type(value, name, advice or "pass an integer", int)
    if value < least:
        raise ValueError(f"{name}={value} is too small; {advice or f'pass an integer of at least {least}'}")
    return int(value)


def check_names(owner: str, given: Iterable[str], names: Collection[str], advice: Mapping[str, str]) -> None:
    """Check that a function has arguments of the given names; see `explain_unknown_names`."""
    for name in [each for each in given if each not in names]:
        close = get_close_matches(name, names, n=1)
        hint = advice.get(name) or (f"is it {close[0]}?" if close else f"there are {', '.join(names)}")
        raise TypeError(f"{owner}() has no argument {name!r}; {hint}")


def explain_unknown_names(advice: Mapping[str, str] | None = None, more: Iterable[str] = ()) -> Callable[[C], C]:
    """Decorate a function, or a class, for its constructor: for an argument of an unknown name, a TypeError gives the
    advice on it, or else the closest name.

    Args:
        advice: what to do instead, by unknown names.
        more: the names that its `**options` take.
    """

    def decorate(target: C) -> C:
        is_class = isinstance(target, type)
        parameters = inspect.signature(target).parameters
        names = [name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD] + list(more)
        function: Any = vars(target)["__init__"] if is_class else target

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            check_names(target.__name__, kwargs, names, advice or {})
            return function(*args, **kwargs)

        checked: Any = call
        if is_class:
            setattr(target, "__init__", call)  # noqa: B010 - for a type checker the constructor stays as it is
        return target if is_class else checked

    return decorate
