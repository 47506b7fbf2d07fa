# ruff: noqa: N999 - the name is PyTorch/XLA's
"""`torch_xla._XLAC`, the original's C extension: the functions that its scripts call."""

from __future__ import annotations

from typing import Any

from unisono.compat.absent import refuse
from unisono.compat.torch_xla.debug.metrics import metrics_report
from unisono.compat.torch_xla.places import here


def __getattr__(name: str) -> Any:
    instead = "it is of the original's C extension, which works only there"
    refuse(__name__, name, {name: instead} if name.startswith("_xla") else {})


def _xla_metrics_report() -> str:
    return metrics_report()


def _xla_set_mat_mul_precision(precision: str) -> None:
    """Set the precision of float32 matrix products: "default", "high" or "highest".

    Raises:
        ValueError: it is another one.
    """
    here()[0].set_matmul_precision(precision)


def _xla_get_mat_mul_precision() -> str:
    return here()[0].matmul_precision()
