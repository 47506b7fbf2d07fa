"""`accelerate.scheduler`: the class of prepared schedulers."""

from __future__ import annotations

from unisono.building_blocks import PreparedScheduler
from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)

AcceleratedScheduler = PreparedScheduler
