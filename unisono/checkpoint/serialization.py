"""Plain data and tensors, which load without running any code: all that a checkpoint may contain; and such objects as
bytes: what `torch.save` writes, and its checksum.

*Threads:* any.
"""

from __future__ import annotations

import io
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from unisono.arguments import check_type
from unisono.devices import CPU
from unisono.errors import DamagedCheckpointError
from unisono.tree import tree_map

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_CRC_BYTES = 4


def as_plain(value: Any, where: str, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value, `where` in words, with copies of its tensors; containers keep their types. TypeError if it contains
    something that is not plain data; the message says where."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in _TENSORS:
        return copy(value)
    if kind in (list, tuple, set):
        return kind(as_plain(each, f"{where}[{place}]", copy) for place, each in enumerate(value))
    if kind is Counter:
        return Counter(value)
    if (isinstance(value, Mapping) and kind in (dict, OrderedDict)) or hasattr(value, "default_factory"):
        pairs = [(as_plain(key, f"a key of {where}", copy), value[key]) for key in value]
        made = OrderedDict if kind is OrderedDict else dict
        return made((key, as_plain(each, f"{where}[{key!r}]", copy)) for key, each in pairs)
    if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return as_plain(value.item(), where, copy)
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which could not be loaded safely; convert it to "
        "plain data: numbers, strings, tensors, and lists, tuples, sets and dicts of these"
    )


def serialize(obj: Any) -> bytes:
    """Convert an object to bytes, for `deserialize`.

    `obj` may be None, numbers, strings, bytes, tensors, modules, and lists, tuples, sets and dicts of these; otherwise
    a TypeError says where something else is. A module is stored as its `state_dict()`; a tensor without its graph, and
    without the fact that it shares memory with another.
    """
    file = io.BytesIO()
    torch.save(as_plain(tree_map(_as_stored, obj), "the object", lambda tensor: tensor), file)
    data = file.getvalue()
    return data + zlib.crc32(data).to_bytes(_CRC_BYTES)


def deserialize(data: bytes | bytearray | memoryview, device: str | int | torch.device | None = CPU) -> Any:
    """Restore the object that `serialize` was given; for a module its state, for `load_state_dict`.

    Tensors are created on `device`; with None, on the one that each was on. For a missing device, torch raises its own
    error.

    Raises:
        TypeError: `data` is not bytes.
        DamagedCheckpointError: the bytes are not what `serialize` returned.
    """
    check_type(data, "data", "pass the bytes that serialize() returned", bytes, bytearray, memoryview)
    view = memoryview(data).cast("B")
    saved, crc = view[:-_CRC_BYTES], view[-_CRC_BYTES:]
    if not saved or zlib.crc32(saved).to_bytes(_CRC_BYTES) != crc:  # of nothing it is 0
        raise DamagedCheckpointError(f"serialize() did not return these {len(view)} bytes: their checksum differs")
    target = None if device is None else torch.device(device)
    return torch.load(io.BytesIO(saved), map_location=target, weights_only=True)


def _as_stored(leaf: Any) -> Any:
    """A module's state; a tensor without its graph, and without the rest of the memory that it is a part of."""
    if isinstance(leaf, nn.Module):
        return tree_map(_as_stored, dict(leaf.state_dict()))
    if type(leaf) not in _TENSORS:
        return leaf
    alone = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return nn.Parameter(alone, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else alone
