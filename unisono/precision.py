"""Full (float32) and reduced (bfloat16 or float16) precision of tensors, modules, optimizers and structures of them.

A tensor is converted into a new one, through which gradients flow back in the original's precision. A module and an
optimizer are converted in place, as by `module.to(dtype)`, so that parameters keep their identity: tied ones stay tied,
and an optimizer keeps its parameters.

What is never converted:

- **float64**, integers, booleans, complex numbers: within a structure they stay unchanged; passed directly they are an
  error.
- **A layer that keeps running statistics** (BatchNorm), with all its tensors. Statistics are sums of many small
  changes, which would be rounded away in reduced precision. torch's kernels accept inputs in reduced precision together
  with the layer's tensors in full precision, compute in full, and return the input's precision; they do not accept
  reduced weights with full statistics.
- **Hyper-parameters and counts** of an optimizer: `step`, and other state without dimensions.

Invariant: if a structure is refused, none of it is changed, since all of it is checked before anything is converted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from unisono.torch_private import APPLY
from unisono.tree import tree_map

T = TypeVar("T")

FULL = frozenset({torch.float32})
REDUCED = frozenset({torch.bfloat16, torch.float16})


def to_reduced_precision(x: T, *, dtype: torch.dtype = torch.bfloat16) -> T:
    """Convert the float32 tensors of `x` to reduced precision.

    Args:
        x: a tensor, module or optimizer, or a structure of them. Modules and optimizers are converted in place; do so
            before they are wrapped or prepared. The state of an optimizer takes the precision of its parameters, so
            convert it after its module, or with it: `to_reduced_precision((model, optimizer))`.
        dtype: `torch.bfloat16`, which has the range of float32, or `torch.float16`, which has more digits.

    Raises:
        TypeError: `x` is none of these.
        ValueError: something in `x` is in reduced precision already, and the message says where; or `x` is a tensor of
            another type than float32; or `x` is an optimizer whose parameters are in full precision; or `dtype` is not
            a reduced precision.
    """
    if dtype not in REDUCED:
        raise ValueError(f"dtype={dtype} is not a reduced precision; choose torch.bfloat16 or torch.float16")
    return _convert(x, FULL, dtype)


def to_full_precision(x: T) -> T:
    """Convert the bfloat16 and float16 tensors of `x` to float32: the inverse of `to_reduced_precision`."""
    return _convert(x, REDUCED, torch.float32)


def is_reduced_precision(x: object) -> bool:
    """Whether the tensors of `x` are in reduced precision, ignoring those that are never converted.

    For an optimizer, this checks its state for parameters in reduced precision, or all of its state if there is none.
    False if there is nothing to check.

    Raises:
        TypeError: `x` is not a tensor, module, optimizer, or structure.
        ValueError: some tensors are and some are not; the message names one of each.
    """
    content = _Content(x)
    asked = list(content.parts)
    for where, optimizer in content.optimizers:
        state = list(_state(optimizer, where))
        asked += [each for each in state if each.owners_dtype in REDUCED] or state
    first: dict[bool, _Part] = {}
    for part in asked:
        first.setdefault(part.tensor.dtype in REDUCED, part)
    if len(first) == 2:
        raise ValueError(f"x is in mixed precision: {first[True]}, but {first[False]}; convert one of them")
    return True in first


class _Part(NamedTuple):
    """One convertible tensor, the path to it, and the parameters whose state it is, if it belongs to an optimizer."""

    where: str
    tensor: torch.Tensor
    owners: tuple[torch.Tensor, ...] = ()

    @property
    def owners_dtype(self) -> torch.dtype:
        """The type to which the owners' types promote; for a single owner, its own."""
        return functools.reduce(torch.promote_types, (owner.dtype for owner in self.owners))

    def __str__(self) -> str:
        return f"{self.where} is {_name(self.tensor.dtype)}"


class _Content:
    """The contents of a structure, each once: its tensors and those of its modules, its modules, its optimizers."""

    def __init__(self, x: object) -> None:
        self.parts: list[_Part] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        for where, leaf in _leaves_with_paths(x, "x"):
            if isinstance(leaf, nn.Module):
                self.modules.append(leaf)
                self.parts += _module_parts(leaf, where)
            elif isinstance(leaf, torch.optim.Optimizer):
                self.optimizers.append((where, leaf))
            elif isinstance(leaf, torch.Tensor | PackedSequence):
                tensor = leaf.data if isinstance(leaf, PackedSequence) else leaf
                self.parts += [_Part(where, tensor)] if tensor.dtype in FULL | REDUCED else []
            elif leaf is x:
                raise TypeError(
                    f"x={x!r} is of type {type(x).__name__}; pass a tensor, module, optimizer, or a structure"
                )


def _convert(x: T, source: frozenset[torch.dtype], target: torch.dtype) -> T:
    content = _Content(x)
    _check(x, content, source)
    for module in content.modules:
        _convert_module(module, source, target)
    # After the modules: state follows its parameters, and is recognised by lagging in precision.
    for where, optimizer in content.optimizers:
        changing = {id(each.tensor) for each in _state(optimizer, where) if _lags(each, source)}
        _convert_state(optimizer, changing, target)

    def convert(leaf: Any) -> Any:
        is_source = isinstance(leaf, torch.Tensor | PackedSequence) and leaf.data.dtype in source
        return leaf.to(target) if is_source else leaf

    return tree_map(convert, x)  # type: ignore[no-any-return]


def _check(x: object, content: _Content, source: frozenset[torch.dtype]) -> None:
    """Raise ValueError if something is converted already or cannot be, or is an optimizer before its parameters."""
    word = "reduced" if source is FULL else "full"
    if isinstance(x, torch.Tensor) and x.dtype not in FULL | REDUCED:
        raise ValueError(
            f"x is {_name(x.dtype)}, and precision applies to float32, bfloat16 and float16; if you mean a conversion, "
            "convert it with x.to(dtype)"
        )
    for part in content.parts:
        if part.tensor.dtype not in source:
            raise ValueError(f"{part}: it is in {word} precision already, and nothing has been converted")
    # Parameters that are converted in this call, before the optimizer's state.
    accompanied = {id(parameter) for module in content.modules for parameter in module.parameters()}
    for where, optimizer in content.optimizers:
        state = list(_state(optimizer, where))
        owners = {id(owner) for each in state for owner in each.owners}
        if not state or owners & accompanied or any(_lags(each, source) for each in state):
            continue
        if state[0].tensor.dtype not in source:
            raise ValueError(f"{state[0]}: it is in {word} precision already, and nothing has been converted")
        raise ValueError(
            f"{state[0]}, and so is its parameter, whose precision it takes: convert the module first, or pass both: "
            f"to_{word}_precision((model, optimizer))"
        )


def _lags(state: _Part, source: frozenset[torch.dtype]) -> bool:
    """Whether an optimizer's state is in the source precision, but its parameters no longer are."""
    return state.tensor.dtype in source and state.owners_dtype not in source


def _convert_module(module: nn.Module, source: frozenset[torch.dtype], target: torch.dtype) -> None:
    own = [part.tensor for part in _module_parts(module, "")]
    # This also calls the function for gradients. Reading `.grad` warns unless the tensor is a leaf.
    gradients = [each.grad for each in own if each.is_leaf and each.grad is not None]
    changing = {id(each) for each in [*own, *gradients]}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target) if id(tensor) in changing and tensor.dtype in source else tensor

    getattr(module, APPLY)(convert)


def _convert_state(optimizer: torch.optim.Optimizer, changing: set[int], target: torch.dtype) -> None:
    for group in optimizer.param_groups:
        for state in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
            for key, value in state.items():
                state[key] = tree_map(lambda leaf: leaf.to(target) if id(leaf) in changing else leaf, value)


def _module_parts(module: nn.Module, where: str) -> Iterator[_Part]:
    """The parameters and buffers in full or reduced precision, except those of layers that keep running statistics."""
    for path, layer in module.named_modules():
        if getattr(layer, "running_mean", None) is None:
            for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
                if tensor.dtype in FULL | REDUCED:
                    yield _Part(".".join(filter(None, [where, path, name])), tensor)


def _state(optimizer: torch.optim.Optimizer, where: str) -> Iterator[_Part]:
    """The state that takes its parameter's precision: no step counts, and no scalars of parameters with dimensions."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_joint = isinstance(optimizer, torch.optim.LBFGS)  # keeps one vector for all parameters, as state of the first
    for index, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            for path, leaf in _leaves_with_paths(value, f"{where}.state[{index}][{key!r}]"):
                is_number = key == "step" or (isinstance(leaf, torch.Tensor) and leaf.ndim < min(parameter.ndim, 1))
                if isinstance(leaf, torch.Tensor) and leaf.dtype in FULL | REDUCED and not is_number:
                    yield _Part(path, leaf, tuple(parameters) if is_joint else (parameter,))


def _leaves_with_paths(tree: object, where: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a structure and the paths to them, as Python expressions; each leaf once."""
    tree_map(lambda leaf: leaf, tree)  # raises ValueError if a container contains itself
    seen: dict[int, object] = {}

    def walk(node: Any, where: str) -> Iterator[tuple[str, Any]]:
        children = _children(node)
        if children is not None:
            for step, child in children:
                yield from walk(child, where + step)
        elif id(node) not in seen:
            seen[id(node)] = node  # held, so that no later node gets its id
            yield where, node

    return walk(tree, where)


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """The children of a container as defined in `unisono.tree`, each with its path; None for a leaf."""
    if isinstance(node, PackedSequence | type):
        return None
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        return [(f".{name}", getattr(node, name)) for name in names]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if isinstance(node, list | tuple | set | frozenset):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
