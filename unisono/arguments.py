"""Checks of arguments that many functions have: a name, a type, a choice, the least integer; a table of rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple


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


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Check that arguments which were given by name exist.

    Raises:
        TypeError: one does not; the message has the most similar name, and lists all.
    """
    for name in given:
        if name not in known:
            close = "".join(f" did you mean {each}=?" for each in get_close_matches(name, known, 1))
            raise TypeError(f"there is no argument {name}=;{close} there are {', '.join(sorted(known))}")


class Rule(NamedTuple):
    """What an argument may be.

    Attributes:
        kinds: its types; None allows None, and a bool is no number unless `bool` is among them.
        choices: its values, in place of types.
        least: the smallest number.
        above: a number that it must exceed.
        hint: what to pass instead.
    """

    kinds: tuple[Any, ...] = ()
    choices: tuple[Any, ...] = ()
    least: float | None = None
    above: float | None = None
    hint: str = ""


def check_by_rules(given: Mapping[str, Any], **rules: Rule) -> None:
    """Check the arguments that have a rule, in the order of the rules.

    Args:
        given: the arguments, by name; those without a rule are ignored.
        rules: by the names of arguments.

    Raises:
        TypeError: one is of another type.
        ValueError: one is out of range, or not among its choices.
    """
    for name, rule in rules.items():
        value = given[name]
        if rule.choices:
            check_choice(value, name, *rule.choices)
            continue
        if value is None and None in rule.kinds:
            continue
        check_type(value, name, rule.hint, *(kind for kind in rule.kinds if kind is not None))
        if rule.least is not None and value < rule.least:
            raise ValueError(f"{name}={value} is too small; {rule.hint}")
        if rule.above is not None and not value > rule.above:
            raise ValueError(f"{name}={value!r} is not above {rule.above:g}; {rule.hint}")
