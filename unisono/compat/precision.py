"""Full (float32) and reduced (bfloat16 or float16) precision of tensors, modules, optimizers and structures of them.

A tensor is converted into a new one, through which gradients flow back. Modules and optimizers are converted in place,
so that parameters keep their identity and ties. The state of an optimizer takes the precision of its parameters.

Never converted are float64, integers, booleans and complex numbers (passed directly they are an error); a layer that
keeps running statistics (BatchNorm), with all its tensors, since sums of many small changes would be rounded away; and
an optimizer's hyper-parameters and counts: `step`, and other state without dimensions.

Invariant: if a structure is refused, none of it is changed, since all of it is checked before anything is converted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from unisono.building_blocks import leaves, map_module, tree_map

T = TypeVar("T")

FULL = frozenset({torch.float32})
REDUCED = frozenset({torch.bfloat16, torch.float16})


def to_reduced_precision(x: T, *, dtype: torch.dtype = torch.bfloat16) -> T:
    """Convert the float32 tensors of `x` to reduced precision.

    Args:
        x: a tensor, module or optimizer, or a structure of them. Convert modules and optimizers before they are wrapped
            or prepared, and an optimizer with its module: `to_reduced_precision((model, optimizer))`.
        dtype: `torch.bfloat16`, which has the range of float32, or `torch.float16`, which has more digits.

    Raises:
        TypeError: `x` is none of these.
        ValueError: something in `x` is in reduced precision already, and the message names it; or `x` is a tensor of
            another type than float32; or `dtype` is not a reduced precision.
    """
    if dtype not in REDUCED:
        raise ValueError(f"dtype={dtype} is not a reduced precision; choose torch.bfloat16 or torch.float16")
    return _convert_all(x, FULL, dtype)


def to_full_precision(x: T) -> T:
    """Convert the bfloat16 and float16 tensors of `x` to float32: the inverse of `to_reduced_precision`."""
    return _convert_all(x, REDUCED, torch.float32)


def is_reduced_precision(x: object) -> bool:
    """Whether the tensors of `x` are in reduced precision, ignoring those that are never converted, and the state of an
    optimizer for parameters in full precision. False if there is nothing to check; ValueError, which names one of each,
    if some are and some are not; TypeError if `x` is not a tensor, module, optimizer, or structure."""
    first: dict[bool, _Part] = {}
    for part in _parts(x):
        if part.owners_dtype is None or part.owners_dtype in REDUCED:
            first.setdefault(part.tensor.dtype in REDUCED, part)
    if len(first) == 2:
        raise ValueError(f"x is in mixed precision: {first[True]}, but {first[False]}; convert one of them")
    return True in first


class _Part(NamedTuple):
    """A tensor that can be converted; for the state of an optimizer, with the precision that it takes."""

    name: str
    tensor: torch.Tensor
    owners_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.name} is {str(self.tensor.dtype).removeprefix('torch.')}"


def _parts(x: object) -> Iterator[_Part]:
    """The tensors of a structure, of its modules, and of its optimizers' state."""
    for leaf in leaves(x):
        if isinstance(leaf, nn.Module):
            kept = _statistics(leaf)
            for name, tensor in [*leaf.named_parameters(), *leaf.named_buffers()]:
                if tensor.dtype in FULL | REDUCED and id(tensor) not in kept:
                    yield _Part(name, tensor)
        elif isinstance(leaf, Optimizer):
            for parameter, state in leaf.state.items():
                values = leaves([value for key, value in state.items() if key != "step"])
                for each in [value for value in values if _follows(value, parameter)]:
                    yield _Part(f"the state of a parameter of shape {tuple(parameter.shape)}", each, parameter.dtype)
        elif isinstance(leaf, torch.Tensor | PackedSequence):
            if leaf.data.dtype in FULL | REDUCED:
                yield _Part("x" if leaf is x else f"a tensor of shape {tuple(leaf.data.shape)}", leaf.data)
        elif leaf is x:
            raise TypeError(f"x={x!r} is of type {type(x).__name__}; pass a tensor, module, optimizer, or a structure")


def _statistics(module: nn.Module) -> dict[int, Any]:
    """The tensors of layers that keep running statistics, and their gradients, by id."""
    layers = [each for each in module.modules() if getattr(each, "running_mean", None) is not None]
    parameters = [each for layer in layers for each in layer.parameters(recurse=False)]
    buffers = [each for layer in layers for each in layer.buffers(recurse=False)]
    return {id(each): each for each in [*parameters, *buffers, *(parameter.grad for parameter in parameters)]}


def _follows(leaf: Any, parameter: torch.Tensor) -> bool:
    """Whether a part of an optimizer's state takes its parameter's precision: a scalar does if the parameter is one."""
    return isinstance(leaf, torch.Tensor) and leaf.dtype in FULL | REDUCED and leaf.ndim >= min(parameter.ndim, 1)


def _convert_all(x: T, source: frozenset[torch.dtype], target: torch.dtype) -> T:
    if isinstance(x, torch.Tensor) and x.dtype not in FULL | REDUCED:
        raise ValueError(f"{_Part('x', x)}, and precision applies to float32, bfloat16 and float16; use x.to(dtype)")
    for part in _parts(x):
        if part.owners_dtype is None and part.tensor.dtype not in source:
            word = "reduced" if source == FULL else "full"
            raise ValueError(f"{part}: it is in {word} precision already, and nothing has been converted")

    def convert(leaf: Any) -> Any:
        is_source = isinstance(leaf, torch.Tensor | PackedSequence) and leaf.data.dtype in source
        return leaf.to(target) if is_source else leaf

    for module in [leaf for leaf in leaves(x) if isinstance(leaf, nn.Module)]:
        kept = _statistics(module)

        def convert_most(tensor: torch.Tensor, kept: dict[int, Any] = kept) -> torch.Tensor:
            return tensor if id(tensor) in kept else convert(tensor)

        map_module(convert_most, module)
    for optimizer in [leaf for leaf in leaves(x) if isinstance(leaf, Optimizer)]:  # after the modules: it follows them
        for parameter, state in optimizer.state.items():

            def follow(leaf: Any, parameter: torch.Tensor = parameter) -> Any:
                return leaf.to(parameter.dtype) if _follows(leaf, parameter) else leaf

            state.update({key: tree_map(follow, value) for key, value in state.items() if key != "step"})
    return tree_map(convert, x)  # type: ignore[no-any-return]
