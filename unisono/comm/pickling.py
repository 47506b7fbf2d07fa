"""Pickling for other processes: the definitions of a script or a notebook are sent, and keep their identity.

The script is `__main__` in the calling process only; a worker cannot import it. So a call is sent to a worker by value:
its functions, its classes under the names that they have in `__main__`, and the globals that the code names. All of
them are defined in the worker's `__main__`. From then on they are sent by name, as with plain pickle: between workers,
and back to the caller, where they resolve to the caller's own objects. (By value, cloudpickle would find the caller's
class and replace its methods with copies.)

Code that looks up globals at run time (`globals()`, `eval`) finds only those that some code names. The source lines of
notebook cells, which are in no file, are sent with their code.

An object without a name in `__main__`, such as a lambda or a class defined in a function, is always sent by value; a
module always by name.

Tensors of accelerators arrive in main memory: their device may not exist in the other process, or belong to another
rank, and accessing it would start a runtime and allocate memory on that device.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import linecache
import os
import pickle
import pkgutil
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from unisono.errors import UnpicklableError

BETWEEN_RANKS: dict[type, Callable[[Any], Any]] = {}
"""How to reduce classes that no other pickler takes."""

# The second is its name in a multiprocessing process, which has imported the script.
_MAIN = ("__main__", "__mp_main__")


def dumps(value: Any, take_storage: Callable[[pickle.PickleBuffer], object] | None = None) -> bytes:
    """Pickle for this process, or for one whose `__main__` has the same names; without the memory of tensors that
    `take_storage` takes, for the `buffers` of `pickle.loads`."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        is_storage = take_storage is not None and hasattr(memoryview(buffer).obj, "storage")
        if is_storage:
            take_storage(buffer)  # type: ignore[misc]
        return not is_storage

    with io.BytesIO() as file:
        _ByName(file, buffer_callback=take).dump(value)
        return file.getvalue()


def block_of(storage: Any) -> Any:
    """The memory of a storage (`torch.UntypedStorage`, in main memory), as a buffer that keeps the storage alive."""
    block = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    block.storage = storage
    return block


def dumps_call(fn: Callable[..., Any], args: tuple[Any, ...], first: Any = None) -> bytes:
    """Pickle a call for a process without the contents of this `__main__`; `first` is rebuilt before it."""
    with io.BytesIO() as file:
        # One pickler for both dumps: its memo keeps shared objects shared.
        pickler = _ByValue(file)
        pickler.dump(first)
        # The last two are filled while the ones before are pickled.
        pickler.dump((fn, args, pickler.names, pickler.lines))
        return file.getvalue()


def loads_call(data: bytes, take_first: Callable[[Any], object]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Rebuild the function and the arguments given to `dumps_call`, and define the names that were sent with them in
    this process's `__main__`. `take_first` is called with `first`, before the modules that they need are imported."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    take_first(unpickler.load())
    fn, args, names, lines = unpickler.load()
    main = sys.modules["__main__"].__dict__
    for name, each in names.items():
        if isinstance(each, type):
            each.__qualname__ = name  # cloudpickle keeps its last part only
        if "." not in name:
            main[name] = each
    for file, text in lines.items():
        linecache.cache[file] = (sum(map(len, text)), None, text, file)  # None: not checked against the disk
    return fn, args


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no annotations
    """The part common to pickling by name and by value."""

    dispatch_table: ClassVar = ChainMap(BETWEEN_RANKS, *cloudpickle.Pickler.dispatch_table.maps)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr, sys.stdin):
            # cloudpickle would silently send its current contents, in memory.
            raise TypeError(f"cannot pickle the open file {obj.name!r}; pass its path")
        torch = sys.modules.get("torch")  # importing it takes seconds: if there is a tensor, it is imported
        if isinstance(obj, getattr(torch, "Tensor", ())):
            return _reduce_tensor(obj)
        if torch is not None and type(obj) in (torch.storage.TypedStorage, torch.storage.UntypedStorage):
            return _reduced_storage(obj)
        if path := _importable_path(obj):
            return pkgutil.resolve_name, (path,)
        if isinstance(obj, CodeType):
            _, values = self.dispatch_table[CodeType](obj)
            return _code_from, (obj.co_filename, *values)
        return super().reducer_override(obj)


def _code_from(file: str, *values: Any) -> CodeType:
    """Rebuild a code object with its file, which tracebacks show and cloudpickle, from 3.1.3 on, does not send."""
    return CodeType(*values).replace(co_filename=file)


class _ByName(_Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return NotImplemented if _is_named_in_main(obj) else super().reducer_override(obj)


class _ByValue(_Pickler):
    """Pickles the definitions of `__main__` by value. `names` are the definitions that it has met, by qualified name;
    `lines`, the source of code that is in no file, by the code's file name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: dict[str, Any] = {}
        self.lines: dict[str, list[str]] = {}
        self._main = sys.modules["__main__"].__dict__
        self._globals = _MainGlobals()
        if self._main["__name__"] == _MAIN[1]:
            cloudpickle.register_pickle_by_value(sys.modules["__main__"])

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _MainGlobals:
            return _main_globals, (self._main.get("__package__"),)
        if _is_named_in_main(obj):
            self.names[obj.__qualname__] = obj
        if isinstance(obj, FunctionType):
            if obj.__globals__ is self._main or obj.__module__ == _MAIN[1]:  # whose globals multiprocessing has copied
                # cloudpickle looks up here, by id, the dict that stands for a function's globals.
                self.globals_ref[id(obj.__globals__)] = self._globals
            file = obj.__code__.co_filename
            if file not in self.lines and not os.path.exists(file) and (lines := linecache.getlines(file)):
                self.lines[file] = lines
        return super().reducer_override(obj)


class _MainGlobals(dict[str, Any]):
    """Stands for the globals of `__main__` of the process that unpickles it."""


def _main_globals(package: str | None) -> dict[str, Any]:
    found = sys.modules["__main__"].__dict__
    found["__package__"] = package  # the base of relative imports, after `python -m`
    return found


def _importable_path(obj: Any) -> str | None:
    """The dotted name of an object of torch that serves as a module, or of an operator, if it resolves to the object.

    cloudpickle handles plain modules; `torch.backends.cudnn` and others are instances of subclasses of `ModuleType`.
    """
    torch = sys.modules.get("torch")
    if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
        path = obj.__name__
    elif torch is not None and type(obj).__module__ == type(torch.ops).__module__:  # its `str` is `aten.add`, or so
        path = f"torch.ops.{obj}"
    else:
        return None
    try:
        return path if pkgutil.resolve_name(path) is obj else None
    except (ImportError, AttributeError, ValueError):
        return None


def _reduced_storage(storage: Any) -> Any:
    """Reduce a storage to its buffer. Tensors that share a storage still do when they are unpickled."""
    from unisono.torch_private import UNTYPED_STORAGE, typed_storage

    if hasattr(storage, UNTYPED_STORAGE):
        return typed_storage, (getattr(storage, UNTYPED_STORAGE), storage.dtype)
    storage = storage.cpu()  # the same object if it is in main memory
    # An empty storage has no address to take a buffer from.
    return _storage_over, (pickle.PickleBuffer(block_of(storage) if storage.nbytes() else bytearray()),)


def _storage_over(buffer: Any) -> Any:
    """The storage whose memory the buffer is; if there is none, a new one with a copy."""
    import torch

    if hasattr(buffer, "storage"):
        return buffer.storage
    storage = torch.UntypedStorage(len(buffer))
    if len(buffer):
        memoryview(block_of(storage)).cast("B")[:] = buffer
    return storage


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor as torch does; to its copy in main memory alone, if torch would send the device with it."""
    from unisono.torch_private import REBUILD_FROM_CPU

    rebuild, args, *rest = tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    if rebuild.__name__ == REBUILD_FROM_CPU:
        return args[0].requires_grad_(tensor.requires_grad).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return (rebuild, args, *rest)


def _is_named_in_main(obj: Any) -> bool:
    if not isinstance(obj, type | FunctionType) or obj.__module__ not in _MAIN:
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


# Calls, and what in them cannot be pickled. A pickler does not report where it failed: it was at the last object that
# it met: the open file, the lock, the generator. What it met before may name that.


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], settings: Any) -> bytes:
    """Pickle the call, and before it the settings. UnpicklableError: names what cannot be sent."""
    try:
        return dumps_call(fn, args, settings)
    except Exception as error:
        named = [("fn", fn), *((f"args[{place}]", arg) for place, arg in enumerate(args))]
        name, part = next((each for each in named if not is_picklable(each[1])), named[0])
        raise UnpicklableError(
            f"{name}, a {type(part).__name__}, cannot be sent to the workers ({type(error).__name__}: "
            f"{error}){describe_unpicklable(part)}; create it inside fn, or pass what it is created from"
        ) from error


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


def pickled_before_failure(value: Any) -> list[Any]:
    """The objects that pickling by value has met, in order, up to the one that it cannot pickle; empty if it can."""
    met: list[Any] = []

    class Tracing(_ByValue):
        def reducer_override(self, obj: Any) -> Any:
            met.append(obj)
            return super().reducer_override(obj)

    try:
        Tracing(io.BytesIO()).dump(value)
    except Exception:
        return met
    return []
