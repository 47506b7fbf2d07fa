"""`accelerate.tracking`: the trackers of the Accelerator."""

from __future__ import annotations

from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)
