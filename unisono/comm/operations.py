"""What a collective call is: its description, and the rules that hold in every mode before any rank meets another."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, get_args

import cloudpickle
import torch

from unisono.protocols import ReduceOp

REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


@dataclass(frozen=True)
class Call:
    """One rank's call of one collective; equal on all ranks, or the ranks have lost step."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    argument: str | int | None = None

    @classmethod
    def on(cls, name: str, tensor: torch.Tensor, argument: str | int | None = None) -> Call:
        return cls(name, tuple(tensor.shape), tensor.dtype, argument)

    def __str__(self) -> str:
        parts = []
        if self.dtype is not None and self.shape is not None:
            parts.append(f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}")
        if self.argument is not None:
            parts.append(repr(self.argument))
        return f"{self.name}({', '.join(parts)})"


def check_tensor(tensor: Any, name: str) -> None:
    """Refuse what is no dense tensor.

    Raises:
        TypeError: `tensor` is something else, or sparse.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} takes a tensor, got a {type(tensor).__name__}; all_gather_object takes any object")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} takes a dense tensor, got layout {tensor.layout}; call to_dense() first")


def check_reduction(tensor: torch.Tensor, op: str, name: str = "all_reduce") -> None:
    """Refuse a reduction that is not exact, or that some mode cannot do, on every rank alike.

    Raises:
        TypeError: the tensor's type does not have the operation.
        ValueError: there is no such operation.
    """
    check_tensor(tensor, name)
    if op not in REDUCE_OPS:
        raise ValueError(f"{name} op={op!r} does not exist; choose one of {', '.join(REDUCE_OPS)}")
    if tensor.dtype == torch.bool and op not in ("min", "max"):
        raise TypeError(f"{name} of bool tensors is 'min' (and) or 'max' (or), not {op!r}; convert to int64 to count")
    if tensor.is_complex() and op not in ("sum", "mean"):
        raise TypeError(f"{name} of complex tensors is 'sum' or 'mean', not {op!r}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{name} op='mean' of {tensor.dtype} would round; convert to a floating type, or use 'sum'")


def check_root(root: int, size: int) -> None:
    """Refuse a root that is no rank of the world.

    Raises:
        ValueError: `root` is not in 0 .. size - 1.
    """
    if not 0 <= root < size:
        raise ValueError(f"root={root} is no rank of a world of {size}; ranks are 0 to {size - 1}")


def check_scatter(tensor: torch.Tensor, size: int) -> None:
    """Refuse a tensor that cannot be cut into `size` equal parts along dim 0.

    Raises:
        ValueError: its first dimension is missing or not a multiple of `size`.
    """
    if tensor.ndim == 0 or tensor.shape[0] % size:
        raise ValueError(
            f"reduce_scatter over {size} ranks cuts dim 0 into equal parts, but the shape is {list(tensor.shape)}; "
            f"pad dim 0 to a multiple of {size}"
        )


def pack(value: Any) -> bytes:
    """Pickle an object on the rank that sends it, so that every receiver gets a copy of its own."""
    data: bytes = cloudpickle.dumps(value)
    return data


def unpack(data: bytes) -> Any:
    """The object that `pack` was given."""
    return pickle.loads(data)
