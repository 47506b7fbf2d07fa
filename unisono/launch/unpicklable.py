"""Pickles a call, and names what in it cannot be pickled, since a pickler does not report where it has failed.

The search descends from the failing part to a part of it that fails, and ends where no inner part fails: at the open
file, the lock, the generator.
"""

from __future__ import annotations

import contextlib
import dis
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from unisono.errors import UnpicklableError
from unisono.pickling import codes_in, dumps_call

_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")


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
    where = ""
    seen = {id(part)}
    while found := next(_failing(part, seen), None):
        where, part = found
        seen.add(id(part))
    return f"; {where}, a {type(part).__name__}" if where else ""


def _failing(part: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for where, inner in _parts_of(part):
        if id(inner) not in seen and not is_picklable(inner):
            yield where, inner


def _parts_of(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a part, and where it is."""
    if isinstance(part, FunctionType):
        yield from _parts_of_function(part)
    elif isinstance(part, type):
        yield from ((f"the class {part.__qualname__!r} has {name!r}", each) for name, each in vars(part).items())
    elif isinstance(part, MethodType):
        yield from [("the method belongs to an object", part.__self__), ("a method's function", part.__func__)]
    elif isinstance(part, partial):
        yield from [("it calls", part.func), ("it holds arguments", (part.args, part.keywords))]
    elif isinstance(part, Mapping):
        yield from ((f"it holds {key!r}", each) for key, each in part.items())
    elif isinstance(part, Sequence | Set) and not isinstance(part, str | bytes):
        yield from ((f"it holds element {place}", each) for place, each in enumerate(part))
    else:
        held = getattr(part, "__dict__", {})
        yield from ((f"the {type(part).__name__} has the attribute {name!r}", each) for name, each in held.items())
        yield "its class", type(part)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__qualname__
    for each in _globals_in(function):
        yield f"the function {name!r} uses the global {each!r}", function.__globals__[each]
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if (value := _contents(cell)) is not None:
            yield f"the function {name!r} uses the variable {free!r} of the function around it", value
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False))
    for each, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
        yield f"the function {name!r} has a default for its argument {each!r}", value
    for each, value in vars(function).items():
        yield f"the function {name!r} has the attribute {each!r}", value


def _globals_in(function: FunctionType) -> list[str]:
    named = {
        instruction.argval
        for code in codes_in(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname in _GLOBAL
    }
    return sorted(named & function.__globals__.keys())


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None
