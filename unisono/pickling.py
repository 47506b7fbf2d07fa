"""Pickling for other processes: what a script or a notebook defines travels, and keeps its identity.

The script is `__main__` in the calling process only; a worker cannot import it. So a call goes down by value: its
functions, its classes under the names that they have in `__main__`, and the globals that the code names. The worker's
`__main__` gets all of it. From then on they go by name, as with plain pickle: between workers, and back to the caller,
where they are the caller's own again. (By value, cloudpickle would find the caller's class and put copies in the place
of its methods.)

Code that looks its globals up at run time (`globals()`, `eval`, `import __main__`) may need any of them, so all of
`__main__` goes with it that can be pickled. The lines of a notebook's cells, which lie in no file, go with their code.

What has no name in `__main__`, a lambda or a class made in a function, always goes by value; a module always by name.

The contents of tensors and arrays need not be copied into the pickle: `dumps_apart` gives them apart, to be written as
they lie in memory, and `loads_apart` takes them from where they were read into.

Tensors of accelerators arrive in main memory: their device may not exist over there, or be another rank's, and to ask
for it would start a runtime, and take memory of that device.
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

_LARGE = 1 << 16  # bytes: what is smaller is copied sooner than sent apart
_LOOKING_UP = {"globals", "eval", "exec", "__main__"}  # in code: what finds a global that the code does not name


@dataclass(frozen=True)
class Call:
    """A call as `loads_call` has rebuilt it.

    Attributes:
        fn, args: what to call, and with what.
        carried: what came along.
        left_out: names of the caller's `__main__` that `fn` might look up and that could not be pickled, and why.
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
    """As `dumps`, with what is large in it apart: the memory itself, not to be changed until it is sent."""
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether it goes into the pickle."""
        raw = buffer.raw()
        if raw.nbytes >= _LARGE:
            buffers.append(raw)
        return raw.nbytes < _LARGE

    with io.BytesIO() as file:
        _ByName(file, buffer_callback=keep).dump(value)
        return file.getvalue(), buffers


def loads_apart(data: bytes, buffers: Sequence[Any] = ()) -> Any:
    """What `dumps_apart` was given; its tensors and arrays lie in the buffers."""
    return pickle.loads(data, buffers=buffers)


def block_of(storage: Any) -> Any:
    """The memory of a storage (`torch.UntypedStorage`, in main memory), as a buffer that keeps it alive."""
    block = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    block.storage = storage
    return block


def dumps_call(fn: Callable[..., Any], args: tuple[Any, ...], first: Any = None, carried: Any = None) -> bytes:
    """Pickle a call for a process that knows nothing of our `__main__`.

    Args:
        first: is there before the call is rebuilt.
        carried: what else is to arrive, sharing objects with it.
    """
    with io.BytesIO() as file:
        pickler = _ByValue(file)
        pickler.dump(first)
        # What is found on the way comes last, when all of it is found.
        pickler.dump((fn, args, carried, pickler.looked_up, pickler.names, pickler.left_out, pickler.lines))
        return file.getvalue()


def loads_call(data: bytes, take_first: Callable[[Any], object] = lambda first: None) -> Call:
    """The call that `dumps_call` was given; this process's `__main__` gets the names that came along.

    Args:
        take_first: called with `first`, before the modules are imported that the call needs.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    take_first(unpickler.load())
    fn, args, carried, looked_up, names, left_out, lines = unpickler.load()
    main = sys.modules["__main__"].__dict__
    main.update(looked_up)
    for name, each in names.items():
        if isinstance(each, type):
            each.__qualname__ = name  # cloudpickle keeps its last part only
        if "." not in name:
            main[name] = each
    for file, text in lines.items():
        linecache.cache[file] = (sum(map(len, text)), None, text, file)  # None: not to be looked for on the disk
    return Call(fn, args, carried, left_out)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no annotations
    """What both ways have in common."""

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
        names: the classes and functions of `__main__` that were met, by their qualified names.
        looked_up, left_out: all of `__main__`, where code was met that may look up any of it; why some is missing.
        lines: of the code that was met and lies in no file, by the name that the code has for its file.
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


_OF_NOTEBOOKS = {"In", "Out", "exit", "quit", "open", "get_ipython"}  # what IPython puts there


class _MainGlobals(dict[str, Any]):
    """Stands for the globals of `__main__`, wherever it is unpickled."""


def _main_globals(package: str | None) -> dict[str, Any]:
    found = sys.modules["__main__"].__dict__
    found["__package__"] = package  # what relative imports begin at, after `python -m`
    return found


def _looks_up_globals(code: CodeType) -> bool:
    return any(_LOOKING_UP.intersection((*each.co_names, *_texts(each))) for each in codes_in(code))


def _texts(code: CodeType) -> Iterator[str]:
    return (each for each in code.co_consts if isinstance(each, str))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions and classes that it defines."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def _importable_path(obj: Any) -> str | None:
    """The dotted name under which a module, or what torch has in the place of one, is found in any process.

    Plain modules are cloudpickle's. `torch.backends.cudnn` and others are objects of classes derived from it.
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
    """cloudpickle would send what an open text file holds now, in memory, and nobody would notice."""
    if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr, sys.stdin):
        raise TypeError(f"cannot pickle the open file {obj.name!r}; pass its path")


def _is_tensor(obj: Any) -> bool:
    """Without importing torch, which takes seconds and may not be needed: whoever has a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, getattr(torch, "Tensor", ()))


def _is_storage(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) in (torch.storage.TypedStorage, torch.storage.UntypedStorage)


def _reduced_storage(storage: Any) -> Any:
    """How a storage is pickled: as the buffer that it is. Tensors that share one still do, over there."""
    if hasattr(storage, "_untyped_storage"):
        return _typed_storage, (storage._untyped_storage, storage.dtype)
    storage = storage.cpu()  # itself, where it is there
    return _storage_over, (pickle.PickleBuffer(block_of(storage) if storage.nbytes() else bytearray()),)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _storage_over(buffer: Any) -> Any:
    """The storage that the buffer is the memory of, else one with a copy."""
    import torch

    if hasattr(buffer, "storage"):
        return buffer.storage
    storage = torch.UntypedStorage(len(buffer))
    if len(buffer):
        storage.copy_(torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage())
    return storage


def _reduce_tensor(tensor: Any) -> Any:
    """How a tensor is pickled; as its copy in main memory, where torch would send one together with its device."""
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
