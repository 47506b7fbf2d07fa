"""`accelerate.scheduler`: the class of prepared schedulers."""

from __future__ import annotations

from unisono.compat.left_out import left_out
from unisono.training.prepared.scheduler import PreparedScheduler

__getattr__ = left_out(__name__)

AcceleratedScheduler = PreparedScheduler
