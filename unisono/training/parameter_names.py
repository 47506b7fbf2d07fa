"""Names for the parameters of optimizers, which hold them without names, and for their learning rates."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

_SHOWN = 3  # learning rates; more are compared by a checksum
_names = WeakTensorKeyDictionary()


def remember_names(module: nn.Module) -> None:
    """Register the module's parameters, so that messages can name them."""
    for name, parameter in module.named_parameters():
        _names[parameter] = name


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of the optimizer, in the order of their numbers in a state."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def trained_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Those that require gradients."""
    return [each for each in parameters_of(optimizer) if each.requires_grad]


def in_brackets(parameter: torch.Tensor) -> str:
    """ " (its name)"; empty if it has none."""
    name = _names.get(parameter)
    return f" ({name})" if name else ""


def name_of(parameter: torch.Tensor) -> str:
    """Its name, in quotes; its shape, if it has none."""
    name = _names.get(parameter)
    return f"a parameter of shape {list(parameter.shape)}" if name is None else repr(name)


def has_gradient(optimizer: Optimizer) -> bool:
    """Whether some parameter of the optimizer has a gradient."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                return True
    return False


def describe_rates(groups: Iterable[Mapping[str, Any]]) -> str:
    """The learning rates of optimizers' groups that are plain numbers, in words that ranks can compare."""
    # To six digits: hosts may compute the cosine of a schedule differently in the last one.
    found: dict[str, None] = {}
    for group in groups:
        if isinstance(rate := group.get("lr"), int | float):
            found[f"{rate:.6g}"] = None
    shown = list(found)
    if len(shown) > _SHOWN:
        shown = [*shown[:_SHOWN], f"{zlib.crc32(repr(shown).encode()):08x}"]
    return f" at lr {'/'.join(shown)}" if shown else ""


def listed(names: Sequence[str]) -> str:
    """The names, in quotes; of many, the first."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
