# ruff: noqa: N999 - the name is PyTorch/XLA's
"""`torch_xla._XLAC`, the original's C extension: the functions that its scripts call."""

from __future__ import annotations

from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core.devices import here
from unisono.compat.torch_xla.debug.metrics import metrics_report

__getattr__ = left_out(__name__)

_xla_metrics_report = metrics_report


def _xla_set_mat_mul_precision(precision: str) -> None:
    """Set the precision of float32 matrix products: "default", "high" or "highest"; ValueError if it is another one."""
    here()[0].set_matmul_precision(precision)


def _xla_get_mat_mul_precision() -> str:
    return here()[0].matmul_precision()
