"""Full (float32) and reduced (bfloat16 or float16) precision of tensors, modules, optimizers and structures of them.

A tensor is converted into a new one, through which gradients flow back in the original's precision. A module and an
optimizer are converted in place, as by `module.to(dtype)`, so that parameters keep their identity: tied ones stay tied,
and an optimizer keeps its parameters. The state of an optimizer takes the precision of its parameters.

What is never converted:

- **float64**, integers, booleans, complex numbers: within a structure they stay unchanged; passed directly they are an
  error.
- **A layer that keeps running statistics** (BatchNorm), with all its tensors: sums of many small changes would be
  rounded away. torch's kernels accept reduced inputs with it, but no reduced weights with full statistics.
- **Hyper-parameters and counts** of an optimizer: `step`, and other state without dimensions.

Invariant: if a structure is refused, none of it is changed, since all of it is checked before anything is converted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import LBFGS, Optimizer

from unisono.torch_private import APPLY
from unisono.tree import leaves, tree_map

T = TypeVar("T")

FULL = frozenset({torch.float32})
REDUCED = frozenset({torch.bfloat16, torch.float16})


def to_reduced_precision(x: T, *, dtype: torch.dtype = torch.bfloat16) -> T:
    """Convert the float32 tensors of `x` to reduced precision.

    Args:
        x: a tensor, module or optimizer, or a structure of them. Modules and optimizers are converted in place; do so
            before they are wrapped or prepared. The state of an optimizer takes the precision that its parameters have
            then, so convert it with its module: `to_reduced_precision((model, optimizer))`.
        dtype: `torch.bfloat16`, which has the range of float32, or `torch.float16`, which has more digits.

    Raises:
        TypeError: `x` is none of these.
        ValueError: something in `x` is in reduced precision already, and the message names it; or `x` is a tensor of
            another type than float32; or `dtype` is not a reduced precision.
    """
    if dtype not in REDUCED:
        raise ValueError(f"dtype={dtype} is not a reduced precision; choose torch.bfloat16 or torch.float16")
    return _convert_all(x, FULL, dtype, "reduced")


def to_full_precision(x: T) -> T:
    """Convert the bfloat16 and float16 tensors of `x` to float32: the inverse of `to_reduced_precision`."""
    return _convert_all(x, REDUCED, torch.float32, "full")


def is_reduced_precision(x: object) -> bool:
    """Whether the tensors of `x` are in reduced precision, ignoring those that are never converted, and the state of an
    optimizer for parameters in full precision. False if there is nothing to check; ValueError, which names one of each,
    if some are and some are not; TypeError if `x` is not a tensor, module, optimizer, or structure."""
    first: dict[bool, _Part] = {}
    states = [each for leaf in leaves(x) if isinstance(leaf, Optimizer) for each in _state_parts(leaf)]
    for part in [*_convertible_parts(x), *(each for each in states if each.owners_dtype in REDUCED)]:
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


def _convertible_parts(x: object) -> Iterator[_Part]:
    """The tensors of a structure, and those of its modules."""
    for leaf in leaves(x):
        if isinstance(leaf, nn.Module):
            yield from _module_parts(leaf)
        elif isinstance(leaf, torch.Tensor | PackedSequence):
            if leaf.data.dtype in FULL | REDUCED:
                yield _Part("x" if leaf is x else f"a tensor of shape {tuple(leaf.data.shape)}", leaf.data)
        elif leaf is x and not isinstance(leaf, Optimizer):
            raise TypeError(f"x={x!r} is of type {type(x).__name__}; pass a tensor, module, optimizer, or a structure")


def _module_parts(module: nn.Module) -> Iterator[_Part]:
    """The parameters and buffers in full or reduced precision, except those of layers that keep running statistics."""
    for path, layer in module.named_modules():
        if getattr(layer, "running_mean", None) is None:
            for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
                if tensor.dtype in FULL | REDUCED:
                    yield _Part(f"{path}.{name}" if path else name, tensor)


def _state_parts(optimizer: Optimizer) -> Iterator[_Part]:
    """The state that takes its parameter's precision: no step counts, and no scalars of parameters with dimensions."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        # LBFGS keeps one vector for all parameters, as state of the first.
        owners = parameters if isinstance(optimizer, LBFGS) else [parameter]
        dtype = functools.reduce(torch.promote_types, [each.dtype for each in owners])
        for key, value in optimizer.state.get(parameter, {}).items():
            for leaf in leaves(value):
                is_number = key == "step" or (isinstance(leaf, torch.Tensor) and leaf.ndim < min(parameter.ndim, 1))
                if isinstance(leaf, torch.Tensor) and leaf.dtype in FULL | REDUCED and not is_number:
                    yield _Part(f"the {key} of a parameter of shape {tuple(parameter.shape)}", leaf, dtype)


def _convert_all(x: T, source: frozenset[torch.dtype], target: torch.dtype, word: str) -> T:
    if isinstance(x, torch.Tensor) and x.dtype not in FULL | REDUCED:
        raise ValueError(
            f"{_Part('x', x)}, and precision applies to float32, bfloat16 and float16; if you mean a conversion, "
            "convert it with x.to(dtype)"
        )
    for part in _convertible_parts(x):
        if part.tensor.dtype not in source:
            raise ValueError(f"{part}: it is in {word} precision already, and nothing has been converted")
    whole = leaves(x)
    for module in [leaf for leaf in whole if isinstance(leaf, nn.Module)]:
        _convert_module(module, source, target)
    for optimizer in [leaf for leaf in whole if isinstance(leaf, Optimizer)]:  # after the modules: it follows them
        _convert_state(optimizer)

    def convert(leaf: Any) -> Any:
        is_source = isinstance(leaf, torch.Tensor | PackedSequence) and leaf.data.dtype in source
        return leaf.to(target) if is_source else leaf

    return tree_map(convert, x)  # type: ignore[no-any-return]


def _convert_module(module: nn.Module, source: frozenset[torch.dtype], target: torch.dtype) -> None:
    own = [part.tensor for part in _module_parts(module)]
    # This also calls the function for gradients. Reading `.grad` warns unless the tensor is a leaf.
    gradients = [each.grad for each in own if each.is_leaf and each.grad is not None]
    changing = {id(each) for each in [*own, *gradients]}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target) if id(tensor) in changing and tensor.dtype in source else tensor

    getattr(module, APPLY)(convert)


def _convert_state(optimizer: Optimizer) -> None:
    dtypes = {id(part.tensor): part.owners_dtype for part in _state_parts(optimizer)}
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = tree_map(lambda leaf: leaf.to(dtypes[id(leaf)]) if id(leaf) in dtypes else leaf, value)
