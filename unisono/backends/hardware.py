"""What a family's devices are made of: a runtime of its own, as XLA's, may run on a TPU as well as on the CPU."""

from __future__ import annotations

import os

from unisono.protocols import Backend

_OWN = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS"}


def hardware_of(backend: Backend) -> str:
    """The hardware below the family's devices: "CPU", "CUDA", "MPS" or "TPU". Starts no runtime."""
    if backend.name in _OWN:
        return _OWN[backend.name]
    named = os.environ.get("PJRT_DEVICE", "").partition("_")[0].upper()  # "TPU_2x2" has a topology behind it
    return named or ("TPU" if backend.is_accelerated() else "CPU")
