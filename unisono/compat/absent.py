"""Names of other frameworks that are left out here: each says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn


def refuse(module: str, name: str, instead: Mapping[str, str]) -> NoReturn:
    """What a module's `__getattr__` does with a name that it does not have.

    Args:
        instead: what to do, by the names that are left out on purpose.

    Raises:
        AttributeError: always.
    """
    if name in instead:
        raise AttributeError(f"{module}.{name} is left out on purpose: {instead[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
