"""Checks of arguments that many functions have: the type, a choice, and the least value of an integer."""

from __future__ import annotations

from typing import Any


def check_type(value: Any, name: str, advice: str, *kinds: Any) -> None:
    """Check that an argument is of one of these types. A bool is no number, unless `bool` is one of them.

    Raises:
        TypeError: it is of another type; the message names that, and gives the advice.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name}={value!r:.200} is of type {type(value).__name__}; {advice}")


def check_choice(value: Any, name: str, *choices: Any) -> None:
    """Check that an argument is one of these choices.

    Raises:
        ValueError: it is none of them; the message names them.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} does not exist; choose one of {', '.join(map(str, choices))}")


def check_integer(value: Any, name: str, least: int, advice: str = "") -> int:
    """Check that an argument is an integer of at least `least`, and return it.

    Raises:
        TypeError: it is no integer.
        ValueError: it is smaller.
    """
    check_type(value, name, advice or "pass an integer", int)
    if value < least:
        raise ValueError(f"{name}={value} is too small; {advice or f'pass an integer of at least {least}'}")
    return int(value)
