"""Names of other frameworks that are left out here: the error for each says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn


def refuse(module: str, name: str, instead: Mapping[str, str]) -> NoReturn:
    """Raise the error of a module's `__getattr__` for a name that it does not have.

    Args:
        module: the module's name.
        name: the missing name.
        instead: what to do instead, by the names that are left out on purpose.

    Raises:
        AttributeError: always.
    """
    if name in instead:
        raise AttributeError(f"{module}.{name} is deliberately not supported: {instead[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
