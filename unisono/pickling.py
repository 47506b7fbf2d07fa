"""Pickling for other processes: what a script or a notebook defines travels, and keeps its identity.

The script is `__main__` in the calling process only; a worker cannot import it. So a call goes down by value, together
with the names that its classes and functions have in `__main__`, and the worker's `__main__` gets them under the same
names. From then on they go by name, as with plain pickle: between workers, and back to the caller, where they are the
caller's own again. (By value, cloudpickle would find the caller's class and put copies in the place of its methods.)

What has no name in `__main__`, a lambda or a class made in a function, always goes by value.

Tensors of devices that only this process has, XLA's, arrive in main memory: their like may not exist over there, and to
ask for it would start a runtime.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickle for this process or one whose `__main__` has the same names."""
    with io.BytesIO() as file:
        _ByName(file).dump(value)
        return file.getvalue()


def dumps_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a call for a process that knows nothing of our `__main__`."""
    with io.BytesIO() as file:
        pickler = _ByValue(file)
        pickler.dump((fn, args, pickler.names))  # the names come last, when all are found
        return file.getvalue()


def loads_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call that `dumps_call` was given; this process's `__main__` gets the names that came along."""
    fn, args, names = pickle.loads(data)
    for name, each in names.items():
        if isinstance(each, type):
            each.__qualname__ = name  # cloudpickle keeps its last part only
        if "." not in name:
            setattr(sys.modules["__main__"], name, each)
    return fn, args


class _ByName(cloudpickle.Pickler):  # type: ignore[misc] # it has no annotations
    def reducer_override(self, obj: Any) -> Any:
        _refuse_file(obj)
        if _is_tensor(obj):
            return _reduced(obj)
        return NotImplemented if _is_named_in_main(obj) else super().reducer_override(obj)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        _refuse_file(obj)
        if _is_named_in_main(obj):
            self.names[obj.__qualname__] = obj
        if _is_tensor(obj):
            return _reduced(obj)
        return super().reducer_override(obj)


def _refuse_file(obj: Any) -> None:
    """cloudpickle would send what an open text file holds now, in memory, and nobody would notice."""
    if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr, sys.stdin):
        raise TypeError(f"cannot pickle the open file {obj.name!r}; pass its path")


def _is_tensor(obj: Any) -> bool:
    """Without importing torch, which takes seconds and may not be needed: whoever has a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, getattr(torch, "Tensor", ()))


def _reduced(tensor: Any) -> Any:
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
