"""`accelerate.utils.imports`: `is_..._available()` for device families and packages."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from unisono.compat.accelerate.state import joined_world
from unisono.compat.left_out import refuse

_PACKAGES = {"bnb": "bitsandbytes"}
_REFUSED = ("deepspeed", "megatron_lm", "fp8", "msamp", "transformer_engine", "pippy", "sagemaker")
"""Unsupported packages are not available, even if they are installed."""


def __getattr__(name: str) -> Any:
    found = re.fullmatch(r"is_(\w+)_available", name)
    return partial(_is_available, found[1]) if found is not None else refuse(__name__, name)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether mixed_precision="bf16" is supported: it is on all families."""
    return True


def is_fp16_available() -> bool:
    """Whether mixed_precision="fp16" is supported on this rank's device."""
    return joined_world().backend.unsupported_reason("fp16") is None


def _is_available(name: str, *_: Any, **__: Any) -> bool:
    if name in _REFUSED:
        return False
    family = getattr(torch, name, None) or getattr(torch.backends, name, None)
    if family is not None and hasattr(family, "is_available"):
        return bool(family.is_available())
    return find_spec(_PACKAGES.get(name, name)) is not None
