"""References that keep nothing alive: lists of objects, and methods as callbacks for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from weakref import ref

_P = ParamSpec("_P")
_T = TypeVar("_T")


class WeakList(list[ref[_T]]):
    """Objects that are held weakly, in order; a call returns those that are alive. (To iterate over a WeakKeyDictionary
    takes a microsecond more, in each step.)"""

    def add(self, each: _T) -> None:
        self[:] = [*(known for known in self if known() is not None), ref(each)]

    def __call__(self) -> list[_T]:
        return [found for each in self if (found := each()) is not None]


def weak_method(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method as a callback for torch, whose references the garbage collector does not see: it returns None when its
    object is gone."""
    bound: Any = method
    held, function = ref(bound.__self__), bound.__func__

    def weak(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        found = held()
        return None if found is None else function(found, *args, **kwargs)  # type: ignore[return-value]

    return weak
