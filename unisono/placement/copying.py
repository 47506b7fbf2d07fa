"""Copies of whole structures on another device: tensors, modules, optimizers, and nestings of these.

All tensors of the structure are found and copied first, each once; `copy.deepcopy` then rebuilds everything around
them. So one object in the original is one object in the copy: tied parameters, and those shared by an optimizer and its
module. The copy shares no memory with the original, even on the same device.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from unisono.arguments import check_type
from unisono.backends.device import DeviceLike, torch_device
from unisono.torch_private import make_subclass
from unisono.tree import leaves

T = TypeVar("T")

_NO_OWNERS = (type, types.ModuleType, types.FunctionType)  # their attributes are not copied


def copy_to(obj: T, device: DeviceLike) -> T:
    """Copy `obj` with all its tensors on `device`, sharing nothing with the original.

    `requires_grad`, gradients, attributes of parameters and the modules' hooks are copied; hooks of tensors and of
    optimizers, which refer to the originals, are not. A tensor that was computed from others stays connected to them:
    its gradient flows back to the original's device. Views of one memory are copied separately.

    Args:
        obj: a tensor, a module, or a structure of these and of optimizers; its other parts are copied by `deepcopy`.
            Copy an optimizer together with what it optimizes: `model, optimizer = copy_to((model, optimizer), device)`.
            Its step counts and other numbers stay in main memory, where torch keeps them, unless it is `capturable` or
            `fused`; its other state moves.
        device: a string, an index, a `torch.device` or a `Device`; also "meta", for shapes without data.

    Returns:
        The copy, of the same type.

    Raises:
        TypeError: `device` is not a device, or a part of `obj` cannot be copied.
        ValueError: there is no such device here, or an optimizer is copied without its parameters.
    """
    target = torch_device(device)
    found = _Found()
    found.visit(obj)
    found.visit_optimizers()
    memo: dict[int, Any] = {id(each): _copy_tensor(each, target) for each in found.tensors.values()}
    memo.update((id(each), object.__new__(type(each))) for each in found.optimizers.values())
    twin = copy.deepcopy(obj, memo)
    for tensor in found.tensors.values():
        memo[id(tensor)].__dict__.update(copy.deepcopy(tensor.__dict__, memo))
    for optimizer in found.optimizers.values():
        # All attributes, since the state that torch pickles lacks some of LBFGS; "step" is there if a scheduler has
        # replaced it by one that steps the original. Hooks, which are missing then, are created empty.
        own = {key: each for key, each in vars(optimizer).items() if key != "step" and not key.endswith("_hooks")}
        memo[id(optimizer)].__setstate__(copy.deepcopy(own, memo))
    return twin


def scalar_like(value: float, tensor: torch.Tensor) -> torch.Tensor:
    """Return a zero-dimensional tensor that holds `value`, with the device and dtype of `tensor`.

    Args:
        value: a number.
        tensor: the tensor whose device and dtype are used.

    Raises:
        TypeError: `tensor` is not a tensor.
    """
    check_type(tensor, "tensor", "pass a tensor", torch.Tensor)
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device)


class _Found:
    """The parts of an object that move, by id, found by a walk that visits the attributes of every object."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._seen: dict[int, object] = {}  # holds references, so that no id is reused

    def visit(self, obj: Any) -> None:
        for leaf in leaves(obj):
            if id(leaf) in self._seen:
                continue
            self._seen[id(leaf)] = leaf
            if isinstance(leaf, torch.Tensor):
                self.tensors[id(leaf)] = leaf
            elif isinstance(leaf, PackedSequence):
                # Not the batch sizes, which torch reads in main memory.
                self.visit([leaf.data, leaf.sorted_indices, leaf.unsorted_indices])
            elif isinstance(leaf, torch.optim.Optimizer):
                self.optimizers[id(leaf)] = leaf
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, _NO_OWNERS):
                self.visit(list(vars(leaf).values()))

    def visit_optimizers(self) -> None:
        """Refuse optimizers whose parameters are not in the structure; then add the parts of their state that move."""
        for optimizer in self.optimizers.values():
            strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self.tensors]
            if strange:
                raise ValueError(
                    f"the {type(optimizer).__name__} steps {len(strange)} parameter(s) that are not in the structure, "
                    f"the first of shape {tuple(strange[0].shape)}, so its copy would update unused tensors; copy it "
                    "with its module: model, optimizer = copy_to((model, optimizer), device)"
                )
        for optimizer in self.optimizers.values():
            self.visit(list(_moving_state(optimizer)))


def _moving_state(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the parts of an optimizer that move with its parameters; numbers only if torch expects them there."""
    for group in optimizer.param_groups:
        has_moving_numbers = group.get("capturable") or group.get("fused")
        if has_moving_numbers:
            yield {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if has_moving_numbers or key != "step":
                    yield value


def _copy_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the same type, parameter or plain tensor, with its gradient."""
    if is_lazy(tensor):  # a parameter or buffer of a lazy module: it has neither shape nor data yet
        kind: Any = type(tensor)
        return kind(tensor.requires_grad, device=device, dtype=tensor.dtype)  # type: ignore[no-any-return]
    if not tensor.is_leaf:
        return tensor.to(device, copy=True)
    data = tensor.detach().to(device, copy=True)
    if issubclass(type(tensor), nn.Parameter):
        twin = make_subclass(type(tensor), data, tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter):  # of another class of tensors
        twin = nn.Parameter(data, tensor.requires_grad)
    else:
        twin = data.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        twin.grad = tensor.grad.detach().to(device, copy=True)
    return twin
