"""`torch_xla.utils.serialization`: `save` is that of `xla_model`, and what it has written is in main memory.

The original writes a file for each tensor, so that one at a time is in main memory. Here a file has them all.
"""

from __future__ import annotations

import torch

from unisono.compat.torch_xla.core.meeting import save as save

load = torch.load
