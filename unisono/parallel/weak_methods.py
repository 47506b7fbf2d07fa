"""Methods as callbacks for torch, held weakly, since the garbage collector does not see references from C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from weakref import ref

_P = ParamSpec("_P")
_T = TypeVar("_T")


def weak_method(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """The method, without keeping its object alive; returns None when that is gone."""
    bound: Any = method
    held, function = ref(bound.__self__), bound.__func__

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        found = held()
        result: Any = None if found is None else function(found, *args, **kwargs)
        return result  # type: ignore[no-any-return]

    return call
