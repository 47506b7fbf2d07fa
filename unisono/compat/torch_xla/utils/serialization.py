"""`torch_xla.utils.serialization`: saving, and loading into main memory; `save` is that of `xla_model`.

The original writes a file for each tensor, so that one at a time is in main memory. Here a file has them all.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from unisono.compat.torch_xla.core.meeting import save as save


def load(path: str | os.PathLike[str], weights_only: bool = True) -> Any:
    """Load what `save` has written.

    Args:
        path: as for `save`.
        weights_only: as for `torch.load`: refuse files with objects other than tensors, containers and plain values.
    """
    return torch.load(path, weights_only=weights_only)
