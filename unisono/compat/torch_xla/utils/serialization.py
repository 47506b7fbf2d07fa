"""`torch_xla.utils.serialization`: `save` is that of `xla_model`, into one file; what it has written is in main
memory."""

from __future__ import annotations

import torch

from unisono.compat.torch_xla.core.xla_model import save as save

load = torch.load
