"""`torch_xla.amp`: mixed precision."""

from __future__ import annotations

import torch

from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core.devices import DeviceName, here

__getattr__ = left_out(__name__)


def autocast(
    device: DeviceName, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool | None = None
) -> torch.autocast:
    """`torch.autocast` for the device's kind, in bfloat16."""
    return torch.autocast(here(device)[1].type, dtype, enabled, cache_enabled)
