# ruff: noqa: F403 - the names of these modules are this module's
"""`torch_xla.core.xla_model`, the `xm` of PyTorch/XLA scripts, on any device family.

Each name means the same in a plain script, in a thread of a `DataParallel` and in a worker of `spawn`.
"""

from __future__ import annotations

import time

from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core.collectives import *
from unisono.compat.torch_xla.core.collectives import fetch_gradients as _fetch_gradients  # noqa: F401 - scripts call it
from unisono.compat.torch_xla.core.devices import *
from unisono.compat.torch_xla.core.meeting import *
from unisono.compat.torch_xla.core.steps import *
from unisono.compat.torch_xla.utils.utils import getenv_as

__getattr__ = left_out(__name__)


class RateTracker:
    """Counts, and computes the rate per second.

    Args:
        smooth_factor: from 0 to 1, the weight of the last rate in the next; None uses the environment variable
            RATE_TRACKER_SMOOTHING, or 0.4.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        if smooth_factor is None:
            smooth_factor = getenv_as("RATE_TRACKER_SMOOTHING", float, 0.4)
        if not 0 <= smooth_factor <= 1:
            raise ValueError(
                f"smooth_factor={smooth_factor} is not a fraction; pass a number from 0 (not smoothed) to 1"
            )
        self._smooth_factor = smooth_factor
        self._began = self._last_time = time.monotonic()
        self._total = self._last_total = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Add to the count."""
        self._total += count

    def rate(self) -> float:
        """The rate per second since the last call, smoothed by earlier rates; 0 if no time has passed."""
        now = time.monotonic()
        passed = now - self._last_time
        if passed <= 0:
            return 0.0
        rate = (self._total - self._last_total) / passed
        if self._rate is not None:
            rate += self._smooth_factor * (self._rate - rate)
        self._last_time, self._last_total, self._rate = now, self._total, rate
        return rate

    def global_rate(self) -> float:
        """The rate per second since the beginning."""
        passed = time.monotonic() - self._began
        return self._total / passed if passed > 0 else 0.0
