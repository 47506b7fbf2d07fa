"""What travels from a loader worker to its parent: a batch, or the error in its place, each told whole.

torch sends an error as text, and rebuilds it only if its class takes one argument; a batch that cannot be pickled it
drops, and waits for it for ever. So what is not certain to arrive is pickled in the worker's own thread, where whatever
fails can be told.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from unisono.errors import UnpicklableError
from unisono.outcome import Outcome

_SENDABLE = (int, float, str, bytes, bool, type(None))


def can_surely_be_sent(value: Any) -> bool:
    """Whether it is plain tensors, texts and numbers in plain containers, which torch can send as they are."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.layout is torch.strided and not value.requires_grad
    if kind in (list, tuple):
        return all(map(can_surely_be_sent, value))
    if kind is dict:
        return all(type(key) in _SENDABLE for key in value) and all(map(can_surely_be_sent, value.values()))
    return kind in _SENDABLE


class Packed:
    """A batch of `whose`, or what was raised instead, pickled already; it arrives in the parent as an `Outcome`.

    Tensors go through shared memory that ends with the loader worker, so it is unpacked as soon as it is received, also
    when other batches come before it.
    """

    def __init__(self, value: Any = None, whose: str = "", error: Exception | None = None) -> None:
        self._data = b"" if error is not None else b"="
        try:
            if error is None:
                stream = io.BytesIO()
                ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
                self._data += stream.getbuffer()
        except Exception as reason:
            error = UnpicklableError(
                f"a batch of {whose} cannot be sent from a loader worker ({type(reason).__name__}: {reason}); return "
                "tensors, arrays, numbers or other picklable data, or pass num_workers=0"
            )
            error.__cause__ = reason
        if error is not None:
            self._data = b"!" + Outcome.failure(error).to_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._data,)


def _unpacked(data: bytes) -> Outcome[Any]:
    content = memoryview(data)[1:]
    return Outcome(pickle.loads(content)) if data[:1] == b"=" else Outcome.from_bytes(bytes(content))
