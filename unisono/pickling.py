"""Pickling for other processes: definitions of a script or a notebook are sent along, and keep their identity.

The script is `__main__` in the calling process only; a worker cannot import it. So a call is sent by value: its
functions, its classes under their names in `__main__`, and the globals that the code names. All of them are put into
the worker's `__main__`. From then on they are pickled by name, as with plain pickle: between workers, and back to the
caller, where the names resolve to the caller's own objects. (By value, cloudpickle would find the caller's class and
replace its methods by copies.)

Code that looks up globals at run time (`globals()`, `eval`, `import __main__`) may need any of them, so everything in
`__main__` that can be pickled is sent with it. The lines of a notebook's cells, which are in no file, are sent with
their code.

Objects without a name in `__main__`, a lambda or a class defined in a function, are always pickled by value; modules
always by name.

The contents of tensors and arrays need not be copied into the pickle: `dumps_apart` returns them separately, to be
written directly from memory, and `loads_apart` uses the buffers into which they were read.

Tensors of accelerators arrive in main memory: their device may not exist in the other process, or belong to another
rank, and using it would start a runtime and occupy memory of that device.
"""

from __future__ import annotations

import ctypes
import io
import linecache
import os
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

_LARGE = 1 << 16  # bytes: copying anything smaller is faster than sending it separately
_LOOKING_UP = {
    "globals",
    "eval",
    "exec",
    "__main__",
}  # names in code by which it may find any global


@dataclass(frozen=True)
class Call:
    """A call, as rebuilt by `loads_call`.

    Attributes:
        fn, args: the function to call, and its arguments.
        carried: the object that was sent along.
        left_out: names of the caller's `__main__` that `fn` might look up and that could not be pickled, with reasons.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    carried: Any
    left_out: dict[str, str]


def dumps(value: Any) -> bytes:
    """Pickle for this process or one whose `__main__` has the same names."""
    with io.BytesIO() as file:
        _ByName(file).dump(value)
        return file.getvalue()


def dumps_apart(value: Any) -> tuple[bytes, list[memoryview]]:
    """As `dumps`, with large contents separate: their memory itself, which must not change until it is sent."""
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether it is copied into the pickle."""
        raw = buffer.raw()
        if raw.nbytes >= _LARGE:
            buffers.append(raw)
        return raw.nbytes < _LARGE

    with io.BytesIO() as file:
        _ByName(file, buffer_callback=keep).dump(value)
        return file.getvalue(), buffers


def loads_apart(data: bytes, buffers: Sequence[Any] = ()) -> Any:
    """The object given to `dumps_apart`; its tensors and arrays use the memory of the buffers."""
    return pickle.loads(data, buffers=buffers)


def block_of(storage: Any) -> Any:
    """The memory of a storage (`torch.UntypedStorage`, in main memory), as a buffer that keeps it alive."""
    block = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    block.storage = storage
    return block


def dumps_call(fn: Callable[..., Any], args: tuple[Any, ...], first: Any = None, carried: Any = None) -> bytes:
    """Pickle a call for a process that has nothing of our `__main__`.

    Args:
        first: is available before the call is rebuilt.
        carried: an object to send along, which may share objects with the call.
    """
    with io.BytesIO() as file:
        pickler = _ByValue(file)
        pickler.dump(first)
        # Whatever pickling the call has collected comes last, when it is complete.
        pickler.dump((fn, args, carried, pickler.looked_up, pickler.names, pickler.left_out, pickler.lines))
        return file.getvalue()


def loads_call(data: bytes, take_first: Callable[[Any], object] = lambda first: None) -> Call:
    """The call given to `dumps_call`; the names that came along are put into this process's `__main__`.

    Args:
        take_first: called with `first`, before the modules that the call needs are imported.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    take_first(unpickler.load())
    fn, args, carried, looked_up, names, left_out, lines = unpickler.load()
    main = sys.modules["__main__"].__dict__
    main.update(looked_up)
    for name, each in names.items():
        if isinstance(each, type):
            each.__qualname__ = name  # cloudpickle keeps only its last part
        if "." not in name:
            main[name] = each
    for file, text in lines.items():
        linecache.cache[file] = (sum(map(len, text)), None, text, file)  # None: not to be looked up on disk
    return Call(fn, args, carried, left_out)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no annotations
    """The common part of both picklers."""

    def reducer_override(self, obj: Any) -> Any:
        _refuse_file(obj)
        if _is_tensor(obj):
            return _reduce_tensor(obj)
        if _is_storage(obj):
            return _reduced_storage(obj)
        if path := _importable_path(obj):
            return pkgutil.resolve_name, (path,)
        return super().reducer_override(obj)


class _ByName(_Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return NotImplemented if _is_named_in_main(obj) else super().reducer_override(obj)


class _ByValue(_Pickler):
    """Pickles what `__main__` defines by value.

    Attributes:
        names: the classes and functions of `__main__` that were pickled, by their qualified names.
        looked_up, left_out: all of `__main__`, if some code may look up any of it; and why some names are missing.
        lines: the lines of pickled code that is in no file, by the code's name for its file.
    """

    def __init__(self, file: io.BytesIO, carries_all: bool = True) -> None:
        super().__init__(file)
        self.names: dict[str, Any] = {}
        self.looked_up: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self.lines: dict[str, list[str]] = {}
        self._carries_all = carries_all
        self._main = sys.modules["__main__"].__dict__
        self.globals_ref[id(self._main)] = _MainGlobals()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _MainGlobals:
            return _main_globals, (self._main.get("__package__"),)
        if _is_named_in_main(obj):
            self.names[obj.__qualname__] = obj
        if isinstance(obj, FunctionType):
            self._note_code(obj)
        return super().reducer_override(obj)

    def _note_code(self, function: FunctionType) -> None:
        file = function.__code__.co_filename
        if file not in self.lines and not os.path.exists(file) and (lines := linecache.getlines(file)):
            self.lines[file] = lines
        if self._carries_all and function.__globals__ is self._main and _looks_up_globals(function.__code__):
            self._carries_all = False
            for name, value in list(self._main.items()):
                if name.startswith("_") or name in _OF_NOTEBOOKS:
                    continue
                try:
                    _ByValue(io.BytesIO(), carries_all=False).dump(value)
                except Exception as error:
                    self.left_out[name] = f"{type(error).__name__}: {error}"
                else:
                    self.looked_up[name] = value


_OF_NOTEBOOKS = {"In", "Out", "exit", "quit", "open", "get_ipython"}  # put there by IPython


class _MainGlobals(dict[str, Any]):
    """Represents the globals of `__main__` of the process in which it is unpickled."""


def _main_globals(package: str | None) -> dict[str, Any]:
    found = sys.modules["__main__"].__dict__
    found["__package__"] = package  # the base of relative imports after `python -m`
    return found


def _looks_up_globals(code: CodeType) -> bool:
    return any(_LOOKING_UP.intersection((*each.co_names, *_texts(each))) for each in codes_in(code))


def _texts(code: CodeType) -> Iterator[str]:
    return (each for each in code.co_consts if isinstance(each, str))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions and classes that it defines."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def _importable_path(obj: Any) -> str | None:
    """The dotted name under which a module, or torch's substitute for one, is found in any process.

    cloudpickle handles plain modules. `torch.backends.cudnn` and others are objects of classes derived from ModuleType.
    """
    if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
        path = obj.__name__
    elif type(obj).__module__ == "torch._ops":  # an operator: it is `aten.add` to `str`
        path = f"torch.ops.{obj}"
    else:
        return None
    try:
        return path if pkgutil.resolve_name(path) is obj else None
    except (ImportError, AttributeError, ValueError):
        return None


def _refuse_file(obj: Any) -> None:
    """cloudpickle would silently send the current contents of an open text file, as a file in memory."""
    if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr, sys.stdin):
        raise TypeError(f"cannot pickle the open file {obj.name!r}; pass its path")


def _is_tensor(obj: Any) -> bool:
    """Without importing torch, which takes seconds and may not be needed: if there is a tensor, it is imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, getattr(torch, "Tensor", ()))


def _is_storage(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) in (torch.storage.TypedStorage, torch.storage.UntypedStorage)


def _reduced_storage(storage: Any) -> Any:
    """Pickle a storage as a buffer. Tensors that share one still share it in the other process."""
    if hasattr(storage, "_untyped_storage"):
        return _typed_storage, (storage._untyped_storage, storage.dtype)
    storage = storage.cpu()  # itself, if it exists there
    return _storage_over, (pickle.PickleBuffer(block_of(storage) if storage.nbytes() else bytearray()),)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _storage_over(buffer: Any) -> Any:
    """The storage whose memory the buffer is, otherwise one with a copy."""
    import torch

    if hasattr(buffer, "storage"):
        return buffer.storage
    storage = torch.UntypedStorage(len(buffer))
    if len(buffer):
        storage.copy_(torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage())
    return storage


def _reduce_tensor(tensor: Any) -> Any:
    """Pickle a tensor, as its copy in main memory if torch would pickle it together with its device."""
    rebuild, args, *rest = tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    if rebuild.__name__ == "_rebuild_device_tensor_from_cpu_tensor":
        return args[0].requires_grad_(tensor.requires_grad).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return (rebuild, args, *rest)


def _is_named_in_main(obj: Any) -> bool:
    if not isinstance(obj, type | FunctionType) or obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj
