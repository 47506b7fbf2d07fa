"""`torch_xla.amp`: mixed precision."""

from __future__ import annotations

from typing import Any

import torch

from unisono.backends import resolve_device
from unisono.compat.absent import refuse


def __getattr__(name: str) -> Any:
    scaling = (
        "bfloat16, which autocast uses here, needs no loss scaling; for float16, Accelerator(mixed_precision='fp16')"
    )
    refuse(__name__, name, {"GradScaler": scaling})


def autocast(
    device: str | torch.device,
    enabled: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    cache_enabled: bool | None = None,
) -> torch.autocast:
    """`torch.autocast` for the device's kind, in bfloat16.

    Raises:
        TypeError, ValueError: it is not a device.
    """
    return torch.autocast(resolve_device(device)[1].type, dtype, enabled, cache_enabled)
