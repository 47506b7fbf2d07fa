"""`accelerate.utils.environment`: what environment variables say, such as those that `accelerate launch` sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unisono.building_blocks import check_choice
from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)

_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str) -> int:
    """1 for y, yes, t, true, on and 1, and 0 for their opposites, in any case; else a ValueError."""
    check_choice(value.lower(), "value", *_TRUE, *_FALSE)
    return int(value.lower() in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The variable as a bool."""
    return str_to_bool(os.environ.get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: Any = "no") -> str:
    """The variable as text."""
    return os.environ.get(key, str(default))


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set environment variables during the block; their names are converted to upper case."""
    own = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
        os.environ.update(before)
