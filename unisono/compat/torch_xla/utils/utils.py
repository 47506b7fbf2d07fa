"""Generated data, objects that name their tensors, and small helpers that scripts use."""

from __future__ import annotations

import copy
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from unisono.compat.left_out import left_out
from unisono.loaders import sources
from unisono.tree import leaves

T = TypeVar("T")

_OPAQUE = (type, types.ModuleType, types.FunctionType, torch.Tensor)  # their attributes are not visited


__getattr__ = left_out(__name__)


class SampleGenerator(sources.SampleGenerator[T]):
    """Yields the same object, `data`, `sample_count` times per loop over it."""

    def next(self) -> T:
        """The next item by the object's own counter, which is independent of loops."""
        return next(self)


class FnDataGenerator:
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
        self._func, self._make = func, partial(gen_tensor, batch_size, *(dims or [1]))
        self._counter = sources.SampleGenerator(None, count)

    def __len__(self) -> int:
        return len(self._counter)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Any]]:
        return (self._make_pair() for _ in self._counter)

    def __next__(self) -> tuple[torch.Tensor, Any]:
        next(self._counter)
        return self._make_pair()

    next = __next__

    def _make_pair(self) -> tuple[torch.Tensor, Any]:
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


@contextmanager
def TimedScope(msg: str = "", printfn: Callable[[str], Any] = print) -> Iterator[None]:  # noqa: N802
    """A `with` block that reports how long it took: `printfn` is called with `msg` and the time."""
    start = time.perf_counter()
    try:
        yield
    finally:
        printfn(f"{msg}{1000 * (time.perf_counter() - start):.3f}ms")


def eprint(*args: Any, **options: Any) -> None:
    """`print` to stderr."""
    print(*args, file=sys.stderr, **options)


def timed(fn: Callable[[], T], msg: str = "", printfn: Callable[[str], Any] = eprint) -> T:
    """Return `fn()`, and print how long it took."""
    with TimedScope(msg, printfn):
        return fn()


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:
    """The environment variable, converted by `type`; `defval`, unconverted, if the variable is unset. A note of the
    error names it, if its text cannot be converted."""
    text = os.environ.get(name)
    try:
        return defval if text is None else type(text)
    except ValueError as error:
        error.add_note(f"{name}={text!r} in the environment; set another value or unset it")
        raise


def for_each_instance(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> None:
    """Call `fn` with each part of a structure that `select_fn` selects, once, in order.

    `select_fn` is called with everything that is not a container; the attributes of objects are visited, too.
    """
    for part in _parts_of(value, select_fn, {}):
        if select_fn(part):
            fn(part)


def for_each_instance_rewrite(value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]) -> Any:
    """The structure with `fn(part)` in place of each part that `select_fn` selects.

    Parts are found as in `for_each_instance`. Containers keep their types, an object is replaced by a shallow copy, and
    the structure itself is not modified. A structure without such a part is returned itself.
    """
    parts = list(_parts_of(value, select_fn, {}))
    if not any(map(select_fn, parts)):
        return value
    memo: dict[int, Any] = {}

    def image_of(part: Any) -> Any:
        if id(part) in memo:
            return memo[id(part)]
        return fn(part) if select_fn(part) else part

    for part in parts:
        if _is_whole(part) or select_fn(part):
            memo[id(part)] = image_of(part)
    for part in parts:
        if isinstance(part, DataWrapper):  # whose tensors may be new ones at each call
            memo[id(part)] = part.from_tensors([image_of(tensor) for tensor in part.get_tensors()])
    return copy.deepcopy(value, memo)  # rebuilds what is around these


def _parts_of(value: Any, select_fn: Callable[[Any], bool], seen: dict[int, Any]) -> Iterator[Any]:
    """Yield the leaves, each once, and those of the attributes of leaves that are not selected."""
    for leaf in leaves(value):
        if id(leaf) not in seen:
            seen[id(leaf)] = leaf
            yield leaf
            if isinstance(leaf, DataWrapper):
                yield from _parts_of(leaf.get_tensors(), select_fn, seen)
            elif not _is_whole(leaf) and not select_fn(leaf):
                yield from _parts_of(list(vars(leaf).values()), select_fn, seen)


def _is_whole(leaf: Any) -> bool:
    return not hasattr(leaf, "__dict__") or isinstance(leaf, _OPAQUE)
