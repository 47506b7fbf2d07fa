"""`accelerate.big_modeling`: models whose parameters have no memory yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from unisono.compat.left_out import left_out

__getattr__ = left_out(__name__)


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which this thread creates modules with their parameters on the meta device, or (`include_buffers`) all
    their tensors."""
    own, meta = threading.get_ident(), torch.device("meta")
    if include_buffers:
        with meta:
            yield
        return

    def move_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or threading.get_ident() != own:
            return parameter
        moved = nn.Parameter(parameter.to(meta), parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    handle = register_module_parameter_registration_hook(move_parameter)
    try:
        yield
    finally:
        handle.remove()
