"""`torch_xla.utils.utils`: generated data, and objects that name their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

import unisono
from unisono.compat.left_out import left_out

T = TypeVar("T")

__getattr__ = left_out(__name__)


class SampleGenerator(unisono.SampleGenerator[T]):
    """Yields the same object, `data`, `sample_count` times per loop over it."""

    def next(self) -> T:
        """The next item by the object's own counter, which is independent of loops."""
        return next(self)


class FnDataGenerator(SampleGenerator[Any]):
    """Yields `(data, func(data))`, where data is `gen_tensor(batch_size, *dims)`, `count` times per loop over it;
    `dims` is (1,) if None."""

    def __init__(
        self,
        func: Callable[[torch.Tensor], Any],
        batch_size: int,
        gen_tensor: Callable[..., torch.Tensor],
        dims: Sequence[int] | None = None,
        count: int = 1,
    ) -> None:
        super().__init__(None, count)
        self._func, self._make = func, partial(gen_tensor, batch_size, *(dims or [1]))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Any]]:
        return map(self._make_pair, super().__iter__())

    def __next__(self) -> tuple[torch.Tensor, Any]:
        return self._make_pair(super().__next__())

    def _make_pair(self, _: None) -> tuple[torch.Tensor, Any]:
        data = self._make()
        return data, self._func(data)


class DataWrapper:
    """Base class of objects in a batch that choose which of their tensors move with it; loaders call `to`."""

    def get_tensors(self) -> list[torch.Tensor]:
        """The tensors that move."""
        raise NotImplementedError(f"{type(self).__name__} must define get_tensors()")

    def from_tensors(self, tensors: list[torch.Tensor]) -> Any:
        """Make an object like this one from those tensors, in the order of `get_tensors`."""
        raise NotImplementedError(f"{type(self).__name__} must define from_tensors(tensors)")

    def to(self, device: torch.device) -> Any:
        """Make an object like this one with its tensors on the device."""
        return self.from_tensors([tensor.to(device) for tensor in self.get_tensors()])
