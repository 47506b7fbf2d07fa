"""A source that repeats one batch, to measure everything except loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from unisono.arguments import check_integer

T = TypeVar("T")


class SampleGenerator(Generic[T]):
    """Yields `data`, the same object, `sample_count` times in each loop over it.

    Semantics of PyTorch/XLA's `SampleGenerator`: it is an iterable with a length, and also an iterator with its own
    counter, which loops do not change.

    Raises:
        TypeError: `sample_count` is not an integer.
        ValueError: `sample_count` is negative.
    """

    def __init__(self, data: T, sample_count: int) -> None:
        check_integer(sample_count, "sample_count", 0)
        self._data = data
        self._sample_count = sample_count
        self._taken = 0

    def __len__(self) -> int:
        return self._sample_count

    def __iter__(self) -> Iterator[T]:
        return (self._data for _ in range(self._sample_count))

    def __next__(self) -> T:
        if self._taken >= self._sample_count:
            raise StopIteration
        self._taken += 1
        return self._data
