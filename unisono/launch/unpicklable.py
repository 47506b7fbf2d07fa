"""Pickles a call, and names what in it cannot be pickled, since a pickler does not report where it has failed.

It has failed at the last object that it met: the open file, the lock, the generator. What it met before may name that.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from unisono.errors import UnpicklableError
from unisono.pickling import dumps_call, pickled_before_failure


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], settings: Any) -> bytes:
    """Pickle the call, and before it the settings, by value if they contain definitions of `__main__`.

    Raises:
        UnpicklableError: names what cannot be sent.
    """
    with contextlib.suppress(Exception), io.BytesIO() as file:
        _PlainPickler(file).dump(settings)  # many times as fast as by value
        settings = file.getvalue()
    try:
        return dumps_call(fn, args, settings)
    except Exception as error:
        named = [("fn", fn), *((f"args[{place}]", arg) for place, arg in enumerate(args))]
        name, part = next((each for each in named if not is_picklable(each[1])), named[0])
        raise UnpicklableError(
            f"{name}, a {type(part).__name__}, cannot be sent to the workers ({type(error).__name__}: "
            f"{error}){describe_unpicklable(part)}; create it inside fn, or pass what it is created from"
        ) from error


class _PlainPickler(pickle.Pickler):
    """Refuses definitions of `__main__`, which other processes do not find by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj!r} is defined in __main__")
        return NotImplemented


def is_picklable(part: Any) -> bool:
    """Whether it can be sent to workers."""
    try:
        pickle.dumps(part)
    except Exception:
        try:
            dumps_call(type, (part,))
        except Exception:
            return False
    return True


def describe_unpicklable(part: Any) -> str:
    """Describe the cause inside a part that cannot be pickled, as "; the function 'f' uses the global 'lock', a lock".

    Empty if the part itself is the cause.
    """
    *met, cause = pickled_before_failure(part) or [part]
    if cause is part:
        return ""
    named = (where for holder in reversed(met) for where, held in _parts_of(holder) if held is cause)
    return f"; {next(named, 'it holds one')}, a {type(cause).__name__}"


def _parts_of(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a part under a name, and where it is."""
    if not isinstance(part, FunctionType):
        for name, each in getattr(part, "__dict__", {}).items():
            yield f"the {type(part).__name__} has the attribute {name!r}", each
        return
    name = part.__qualname__
    for each in part.__globals__.keys() & _names_in(part.__code__):
        yield f"the function {name!r} uses the global {each!r}", part.__globals__[each]
    for free, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing has been assigned yet
            yield f"the function {name!r} uses the variable {free!r} of the function around it", cell.cell_contents


def _names_in(code: CodeType) -> set[str]:
    """The names in a code object and in those of the functions and classes that it defines."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)
