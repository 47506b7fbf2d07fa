"""Which optimizers may step for a part of the parameters, or of their elements, and leave the rest to other ranks."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

# Optimizers of torch.optim that combine all parameters.
_OVER_ALL = {torch.optim.LBFGS}
# Optimizers that use operations which torch lacks for DTensors, or gradients which shards do not have.
_NOT_SHARDED = {torch.optim.Rprop, torch.optim.SparseAdam}
_FUSED = {torch.optim.Adam, torch.optim.AdamW}  # their fused steps support DTensors
# Optimizers of torch.optim that combine the elements of each parameter.
_OVER_EACH = {getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)}


def check_elementwise(optimizer: Optimizer, strategy: str, is_declared: bool, takes_whole: bool) -> None:
    """Check that the optimizer can step separately for what the strategy divides: parameters, or their elements.

    Args:
        strategy: its name, for the message.
        is_declared: whether the user declares that the optimizer treats each element separately.
        takes_whole: whether each rank steps for whole parameters.

    Raises:
        TypeError: the optimizer's steps may depend on elements of other ranks, or cannot update DTensors.
    """
    kind = _kind(optimizer)
    cut = "parameters" if takes_whole else "each parameter"
    refused = _OVER_ALL if takes_whole else _OVER_ALL | _OVER_EACH
    if kind in refused:
        what = "all parameters as one vector" if kind in _OVER_ALL else "each parameter as a whole"
        raise TypeError(
            f"strategy={strategy!r} divides {cut} by ranks, and {type(optimizer).__name__} takes {what}; use "
            "strategy='ddp', or an optimizer that treats each element separately"
        )
    if kind in _NOT_SHARDED and not takes_whole:
        raise TypeError(
            f"strategy={strategy!r} keeps DTensors, and torch's {type(optimizer).__name__} cannot update these; use "
            "another optimizer, or strategy='zero1' or 'ddp'"
        )
    if not takes_whole and kind not in _FUSED and any(group.get("fused") for group in optimizer.param_groups):
        raise TypeError(
            f"strategy={strategy!r} keeps DTensors, and {type(optimizer).__name__}(fused=True) cannot update these; "
            "create it with fused=False"
        )
    if kind is None and not is_declared:
        named = {"zero1": "ZeRO1", "fsdp": "FSDP"}[strategy]
        raise TypeError(
            f"strategy={strategy!r} divides {cut} by ranks, and {type(optimizer).__name__} is not one of "
            "torch.optim's, so it is unknown whether it combines several of them, as a norm over all does; if it "
            f"treats each element separately, pass strategy=unisono.strategies.{named}(elementwise_optimizer=True), "
            "otherwise use strategy='ddp'"
        )


def _kind(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch.optim that defines the optimizer's `step`; None if it is defined elsewhere."""
    # torch wraps the `step` of a class when its first optimizer is created.
    step = inspect.unwrap(type(optimizer).step)
    for kind in vars(torch.optim).values():
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and inspect.unwrap(kind.step) is step:
            return kind
    return None
