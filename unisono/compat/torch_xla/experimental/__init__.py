"""`torch_xla.experimental`: only its switch to eager mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)


def eager_mode(enable: bool) -> None:
    """Has no effect: a lazy device continues to record, with the same results; others are always eager."""


@contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Has no effect, as `eager_mode`."""
    yield
