"""Objects as bytes, and back: tensors, modules by their states, and containers of them. No pickle: no code is run.

    magic "UNISONO", version, CRC-32 of all after it, lengths of all that follows and of the description, the
    description in JSON, tensors' bytes

The description is the object with each container's type; the tensors follow it, each aligned to 64 bytes. An object
that occurs in two places is stored once, and is restored as one object.

*Threads:* any.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.backends import CPU
from unisono.errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError
from unisono.parallel.prepared.model import PreparedModel

_MAGIC, _VERSION = b"UNISONO", 1
_HEAD = struct.Struct("<7sBIQQ")
_CHECKED = 12  # the offset after the CRC-32, from which on it is computed
_ALIGNED = 64
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict}


def serialize(obj: Any) -> bytes:
    """Convert an object to bytes, for `deserialize`.

    Args:
        obj: None, numbers, strings, bytes, tensors, modules, and lists, tuples, named tuples, sets and dicts of these.
            A module is stored as its `state_dict()`; a tensor as values, dtype, shape, `requires_grad` and device,
            without its graph, and without the fact that it shares memory with another.

    Returns:
        The bytes.

    Raises:
        TypeError: `obj` contains something else; the message says where.
    """
    writer = _Description()
    text = json.dumps(writer.describe(obj, "the object")).encode()
    start = _align(_HEAD.size + len(text))
    parts = [text, bytes(start - _HEAD.size - len(text)), *writer.data]
    length = sum(map(len, parts))
    crc = zlib.crc32(_HEAD.pack(_MAGIC, _VERSION, 0, length, len(text))[_CHECKED:])
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([_HEAD.pack(_MAGIC, _VERSION, crc, length, len(text)), *parts])


def deserialize(data: bytes | bytearray | memoryview, device: str | int | torch.device | None = CPU) -> Any:
    """Restore the object that `serialize` was given; for a module its state, for `load_state_dict`.

    Args:
        data: the bytes that `serialize` returned.
        device: where to create tensors; None uses the device that each was on.

    Returns:
        The object.

    Raises:
        TypeError: `data` is not bytes.
        DamagedCheckpointError: the bytes are not what `serialize` returned.
        CheckpointVersionError: they were made by a newer version.
        CheckpointError: a named tuple's class is not imported here, or has other fields; or a tensor's device is
            missing.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data={data!r:.80} is of type {type(data).__name__}; pass the bytes that serialize() returned")
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size or view[: len(_MAGIC)] != _MAGIC:
        raise DamagedCheckpointError(
            f"these {len(view)} bytes were not returned by serialize(): they do not begin with {_MAGIC.decode()}"
        )
    _, number, crc, length, described = _HEAD.unpack(view[: _HEAD.size])
    if number != _VERSION:
        raise CheckpointVersionError(
            f"the bytes have version {number} of the format, and this version of unisono reads version {_VERSION}; "
            "read them with the version that wrote them"
        )
    rest = view[_HEAD.size :]
    if len(rest) != length:
        raise DamagedCheckpointError(f"serialize() returned {_HEAD.size + length} bytes, and these are {len(view)}")
    if zlib.crc32(view[_CHECKED:]) != crc:
        raise DamagedCheckpointError("these bytes were changed after serialize() returned them: their checksum differs")
    start = _align(_HEAD.size + described)
    try:
        return _Reader(view[start:], device).read(json.loads(bytes(rest[:described])))
    # the checksum is correct, so the bytes were forged
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DamagedCheckpointError(f"these bytes describe nothing that serialize() writes: {error}") from error


def _align(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class _Description:
    """Describes an object.

    Attributes:
        data: the tensors' bytes, in order, each padded.
    """

    def __init__(self) -> None:
        self.data: list[bytes | memoryview] = []
        self._size = 0
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps ids from being reused for other objects
        self._within: set[int] = set()

    def describe(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            # Exact, and JSON has neither infinities nor NaN.
            return ["float", value.hex()]
        if kind is complex:
            return ["complex", value.real.hex(), value.imag.hex()]
        if kind in (bytes, bytearray):
            return [kind.__name__, base64.b85encode(value).decode()]
        if kind in (torch.dtype, torch.device, torch.Size):
            return [kind.__name__, list(value) if kind is torch.Size else str(value).removeprefix("torch.")]
        if id(value) in self._known:
            return ["again", self._known[id(value)]]
        if id(value) in self._within:
            raise TypeError(f"{where} contains itself")
        self._within.add(id(value))
        found = self._container(value, where)
        self._within.discard(id(value))
        # Numbered when it is complete, which is the order in which the reader completes objects.
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        return found

    def _container(self, value: Any, where: str) -> Any:
        kind = type(value)
        if isinstance(value, nn.Module):
            module = value.module if isinstance(value, PreparedModel) else value
            return ["module", type(module).__name__, self.describe(dict(module.state_dict()), f"{where}.state_dict()")]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if kind.__name__ in _SEQUENCES and kind.__module__ == "builtins":
            return [kind.__name__, [self.describe(each, f"{where}[{n}]") for n, each in enumerate(value)]]
        if kind in (dict, OrderedDict):
            pairs = [
                [self.describe(key, f"a key of {where}"), self.describe(each, f"{where}[{key!r}]")]
                for key, each in value.items()
            ]
            return [kind.__name__, pairs]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            each = [self.describe(part, f"{where}.{name}") for name, part in zip(kind._fields, value, strict=True)]
            return ["named", kind.__module__, kind.__qualname__, each]
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}; serialize takes None, numbers, strings, bytes, "
            "tensors, modules, and lists, tuples, named tuples, sets and dicts of these"
        )

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            raise TypeError(
                f"{where} is a {type(tensor).__name__} of layout {tensor.layout}; serialize takes dense tensors: call "
                "to_dense() or full_tensor() first"
            )
        if tensor.is_quantized:
            raise TypeError(f"{where} is quantized; call dequantize() first")
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # By way of bytes, because numpy has no bfloat16.
        raw = memoryview(host.reshape(-1).view(torch.uint8).numpy().data).cast("B") if host.numel() else memoryview(b"")
        place, size = self._size, len(raw)
        self.data += [raw, bytes(_align(size) - size)]
        self._size += _align(size)
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [kind, dtype, list(tensor.shape), tensor.requires_grad, str(tensor.device), place, size]


class _Reader:
    """Rebuilds the object."""

    def __init__(self, data: memoryview, device: str | int | torch.device | None) -> None:
        self._data, self._device = data, device
        self._made: list[Any] = []

    def read(self, described: Any) -> Any:
        if not isinstance(described, list):
            return described
        kind, *rest = described
        if kind == "float":
            return float.fromhex(rest[0])
        if kind == "complex":
            return complex(*map(float.fromhex, rest))
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(base64.b85decode(rest[0]))
        if kind == "dtype":
            return _dtype_of(rest[0])
        if kind in ("device", "Size"):
            return torch.device(rest[0]) if kind == "device" else torch.Size(rest[0])
        if kind == "again":
            return self._made[rest[0]]
        value = self._container(kind, rest)
        self._made.append(value)
        return value

    def _container(self, kind: str, rest: list[Any]) -> Any:
        if kind in ("tensor", "parameter"):
            return self._tensor(kind, *rest)
        if kind == "module":
            return OrderedDict(self.read(rest[1]))
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.read(each) for each in rest[0]])
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]([(self.read(key), self.read(each)) for key, each in rest[0]])
        if kind != "named":
            raise ValueError(f"there is no {kind}")
        made, values = _class_of(rest[0], rest[1]), [self.read(each) for each in rest[2]]
        if len(values) != len(made._fields):
            raise CheckpointError(
                f"the named tuple {rest[0]}.{rest[1]} has the fields {', '.join(made._fields)} here, and "
                f"{len(values)} were given"
            )
        return made(*values)

    def _tensor(
        self, kind: str, dtype: str, shape: list[int], requires_grad: bool, device: str, place: int, size: int
    ) -> torch.Tensor:
        found = _dtype_of(dtype)
        if math.prod(shape) * found.itemsize != size or len(self._data) < place + size:
            raise ValueError(f"a tensor of shape {shape} has not {size} bytes at {place}")
        host = torch.empty(shape, dtype=found)
        if size:
            # A writable copy, because `frombuffer` warns about read-only memory.
            raw = torch.frombuffer(bytearray(self._data[place : place + size]), dtype=torch.uint8)
            host.reshape(-1).view(torch.uint8).copy_(raw)
        try:
            tensor = host.to(device if self._device is None else self._device)
        # A torch without CUDA raises AssertionError.
        except (RuntimeError, AssertionError) as error:
            wanted = device if self._device is None else self._device
            raise CheckpointError(
                f"a tensor cannot be made on {wanted} ({error}); pass a device= that exists here"
            ) from error
        return nn.Parameter(tensor, requires_grad) if kind == "parameter" else tensor.requires_grad_(requires_grad)


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _class_of(module: str, name: str) -> Any:
    """Return a named tuple's class, which must already be imported: nothing is imported here."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise CheckpointError(f"the named tuple {module}.{name} is not defined here; import it first")
    return found
