"""Objects as bytes, and back: what `torch.save` writes of plain data, with a version and a checksum. No code is run.

*Threads:* any.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

import torch
from torch import nn

from unisono.backends import CPU
from unisono.checkpoint.plain_data import as_plain
from unisono.errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError
from unisono.parallel.prepared.model import PreparedModel
from unisono.tree import tree_map

_MAGIC, _VERSION = b"UNISONO", 2
_HEAD = struct.Struct("<7sBI")  # the magic, the version, the CRC-32 of all that follows


def serialize(obj: Any) -> bytes:
    """Convert an object to bytes, for `deserialize`.

    Args:
        obj: None, numbers, strings, bytes, tensors, modules, and lists, tuples, sets and dicts of these. A module is
            stored as its `state_dict()`; a tensor without its graph, and without the fact that it shares memory with
            another.

    Returns:
        The bytes.

    Raises:
        TypeError: `obj` contains something else; the message says where.
        RecursionError: a container contains itself.
    """
    plain = as_plain(tree_map(_as_stored, obj), "the object", lambda tensor: tensor)
    file = io.BytesIO()
    torch.save(plain, file)
    data = file.getvalue()
    return _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(data)) + data


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
        CheckpointVersionError: they were made by another version.
        CheckpointError: a tensor's device is missing.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data={data!r:.80} is of type {type(data).__name__}; pass the bytes that serialize() returned")
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size or view[: len(_MAGIC)] != _MAGIC:
        raise DamagedCheckpointError(
            f"these {len(view)} bytes were not returned by serialize(): they do not begin with {_MAGIC.decode()}"
        )
    _, number, crc = _HEAD.unpack(view[: _HEAD.size])
    if number != _VERSION:
        raise CheckpointVersionError(
            f"the bytes have version {number} of the format, and this version of unisono reads version {_VERSION}; "
            "read them with the version that wrote them"
        )
    if zlib.crc32(view[_HEAD.size :]) != crc:
        raise DamagedCheckpointError("these bytes were changed after serialize() returned them: their checksum differs")
    try:
        target = None if device is None else torch.device(device)
        return torch.load(io.BytesIO(view[_HEAD.size :]), map_location=target, weights_only=True)
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"these bytes hold what serialize() does not write: {error}") from error
    # A torch without CUDA raises AssertionError.
    except (RuntimeError, AssertionError) as error:
        place = "the devices where they were" if device is None else device
        raise CheckpointError(
            f"tensors cannot be made on {place} ({error}); pass a device= that exists here"
        ) from error


def _as_stored(leaf: Any) -> Any:
    """A module's state; a tensor without its graph, and without the rest of the memory of which it is a part."""
    if isinstance(leaf, nn.Module):
        module = leaf.module if isinstance(leaf, PreparedModel) else leaf
        return tree_map(_as_stored, dict(module.state_dict()))
    if type(leaf) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return leaf
    alone = leaf.detach().clone()
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(alone, leaf.requires_grad)
    return alone.requires_grad_(leaf.requires_grad)
