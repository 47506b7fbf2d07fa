"""`torch_xla.experimental`: only its switch to eager mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unisono.compat.absent import refuse
from unisono.compat.torch_xla.absent_modules import INSTEAD


def __getattr__(name: str) -> Any:
    refuse(__name__, name, {name: INSTEAD["experimental"]} if not name.startswith("__") else {})


def eager_mode(enable: bool) -> None:
    """Has no effect: a lazy device continues to record, with the same results; others are always eager."""


@contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Has no effect, as `eager_mode`."""
    yield
