"""`torch_xla.experimental`: only its switch to eager mode."""

from __future__ import annotations

from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)


def eager_mode(enable: bool) -> None:
    """Has no effect: a lazy device continues to record, with the same results; others are always eager."""
