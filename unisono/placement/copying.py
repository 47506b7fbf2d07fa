"""Copies of whole structures on another device: tensors, modules, optimizers, and nestings of these.

One memo serves the whole structure: all its tensors are found and copied first, each once, and `copy.deepcopy` then
rebuilds everything around them.

Invariants:

1. One object in the original is one object in the copy: tied parameters, and those shared by an optimizer and its
   module.
2. Tensors that share a storage share one in the copy.
3. The copy shares no memory with the original, even on the same device.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from unisono.arguments import check_type
from unisono.backends.device import DeviceLike, torch_device
from unisono.torch_private import STEP_WRAPPED, STORAGE_ADDRESS, make_subclass
from unisono.tree import leaves

T = TypeVar("T")

_Memo = dict[int, Any]
_NO_OWNERS = (type, types.ModuleType, types.FunctionType)  # their attributes are not copied


def copy_to(obj: T, device: DeviceLike) -> T:
    """Copy `obj` with all its tensors on `device`, sharing nothing with the original.

    `requires_grad`, gradients, attributes of parameters and the modules' hooks are copied; hooks of tensors and of
    optimizers, which refer to the originals, are not. A tensor of the structure that was computed from others stays
    connected to them: its gradient flows back to the original's device.

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
    found.check_optimizers()
    memo: _Memo = {
        id(leaf): leaf.to(target, copy=True)
        for leaf in leaves(obj)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    }
    _copy_tensors([each for each in found.tensors.values() if id(each) not in memo], target, memo)
    for optimizer in found.optimizers.values():
        memo[id(optimizer)] = object.__new__(type(optimizer))
    twin = copy.deepcopy(obj, memo)
    for tensor in found.tensors.values():
        memo[id(tensor)].__dict__.update(copy.deepcopy(tensor.__dict__, memo))
    for optimizer in found.optimizers.values():
        memo[id(optimizer)].__dict__.update(_optimizer_attributes(optimizer, memo))
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

    def check_optimizers(self) -> None:
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


def _optimizer_attributes(optimizer: torch.optim.Optimizer, memo: _Memo) -> dict[str, Any]:
    """Copy an optimizer's attributes, without hooks. Its pickled state cannot be used: it lacks what LBFGS needs."""
    attributes = dict(vars(optimizer))
    if hasattr(attributes.get("step"), STEP_WRAPPED):
        del attributes["step"]  # set by a scheduler; it steps the original
    return {
        key: OrderedDict() if key.endswith("_hooks") else copy.deepcopy(value, memo)
        for key, value in attributes.items()
    }


def _copy_tensors(tensors: list[torch.Tensor], device: torch.device, memo: _Memo) -> None:
    """Add a copy of each tensor to the memo; tensors that share a storage share one in the copy."""
    by_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    with torch.no_grad():
        for tensor in tensors:
            is_plain = tensor.layout is torch.strided and not is_lazy(tensor) and type(tensor.data) is torch.Tensor
            by_storage[getattr(tensor.untyped_storage(), STORAGE_ADDRESS) if is_plain else -id(tensor)].append(tensor)
        for sharing in by_storage.values():
            if len(sharing) == 1:
                memo[id(sharing[0])] = _like(sharing[0], _move_copy(sharing[0], device))
                continue
            memory = _storage_copy(sharing[0], device)
            for tensor in sharing:
                view = torch.empty(0, dtype=tensor.dtype, device=device)
                view.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
                memo[id(tensor)] = _like(tensor, view)
        for tensor in tensors:
            if tensor.is_leaf and tensor.grad is not None:
                memo[id(tensor)].grad = tensor.grad.detach().to(device, copy=True)


def _move_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if is_lazy(tensor):  # a parameter or buffer of a lazy module: it has neither shape nor data yet
        kind: Any = type(tensor)
        return kind(tensor.requires_grad, device=device, dtype=tensor.dtype)  # type: ignore[no-any-return]
    return tensor.detach().to(device, copy=True)


def _storage_copy(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage:
    """A copy of the storage of which the tensor is a view, as bytes."""
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return everything.to(device, copy=True).untyped_storage()


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Give the data the tensor's type: a parameter, a buffer or a plain tensor."""
    if is_lazy(tensor):
        return data
    if not isinstance(tensor, nn.Parameter):
        return data.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    if type(tensor) is not nn.Parameter and issubclass(type(tensor), nn.Parameter):
        return make_subclass(type(tensor), data, tensor.requires_grad)
    return nn.Parameter(data, tensor.requires_grad)
