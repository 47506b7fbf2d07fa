"""What a loader worker sends to its parent: a batch, or the complete exception that was raised instead.

torch sends an error as text, and rebuilds it only if its class takes one argument; it drops a batch that cannot be
pickled, and waits for it forever. So values that might not arrive are pickled in the worker's own thread, where a
failure can be reported.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from unisono.errors import UnpicklableError
from unisono.loaders.shm import share
from unisono.outcome import Outcome
from unisono.tree import tensors

_MANY = 16  # tensors of a batch: each takes a descriptor in the worker, one in the parent, and more in transit
# A view as another type must begin at a whole element; 64 is also torch's own alignment on the CPU.
_ALIGNED = 64  # bytes

_SENDABLE = frozenset((int, float, str, bytes, bool, type(None)))


def can_surely_be_sent(value: Any) -> bool:
    """Whether `value` consists of plain tensors, texts and numbers in plain containers, which torch sends unchanged."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.layout is torch.strided and not value.requires_grad
    if kind in (list, tuple):
        return _SENDABLE.issuperset(map(type, value)) or all(map(can_surely_be_sent, value))
    if kind is dict:
        return all(type(key) in _SENDABLE for key in value) and all(map(can_surely_be_sent, value.values()))
    return kind in _SENDABLE


class Merged:
    """A batch whose many tensors are merged into one for transit, so it needs one descriptor; unpickled as the batch.

    At the limit of descriptors (`ulimit -n`) torch drops a batch, in its own thread, and the receiver keeps waiting.
    """

    def __init__(self, batch: Any) -> None:
        found: list[tuple[_Slot, torch.Tensor]] = []
        self._batch = _slots_of(batch, found)
        size = found[-1][0].end if found else 0
        # On the CPU even if the user has set another default device.
        self._whole = torch.empty(size, dtype=torch.uint8, device=torch.default_generator.device).share_memory_()
        for slot, tensor in found:
            slot.of(self._whole).copy_(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _apart, (self._batch, self._whole)


class _Slot(NamedTuple):
    """The place of a tensor in a merged one."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        """The offset at which the next slot may begin."""
        return self.start + -(-self.nbytes // _ALIGNED) * _ALIGNED

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


def _slots_of(batch: Any, found: list[tuple[_Slot, torch.Tensor]]) -> Any:
    """Return the batch with each tensor replaced by a slot; append each slot and its tensor to `found`."""
    if isinstance(batch, torch.Tensor):
        slot = _Slot(found[-1][0].end if found else 0, batch.nbytes, batch.dtype, batch.shape)
        found.append((slot, batch))
        return slot
    if type(batch) in (list, tuple):
        return type(batch)(_slots_of(each, found) for each in batch)
    if type(batch) is dict:
        return {key: _slots_of(value, found) for key, value in batch.items()}
    return batch


def _apart(batch: Any, whole: torch.Tensor) -> Any:
    if type(batch) is _Slot:
        return batch.of(whole)
    if type(batch) in (list, tuple):
        return type(batch)(_apart(each, whole) for each in batch)
    if type(batch) is dict:
        return {key: _apart(value, whole) for key, value in batch.items()}
    return batch


def has_many(batch: Any) -> bool:
    """Whether the batch has so many tensors that it should be merged, if `can_surely_be_sent`; and they stay what they
    are: of their strides, devices and quantisation nothing is sent."""
    found = tensors(batch)
    return len({*map(id, found)}) > _MANY and all(
        each.is_cpu and each.is_contiguous() and not each.is_quantized for each in found
    )


def pack(batch: Any, whose: str) -> Any:
    """What a loader worker returns for a batch of `whose`: in a form that surely arrives, if it can be sent at all."""
    if not can_surely_be_sent(batch):
        return Packed(batch, whose)
    if has_many(batch):
        return Merged(batch)
    share(batch)
    return batch


class Packed:
    """A batch of `whose`, or the exception raised instead, already pickled; it arrives in the parent as an `Outcome`.

    Tensors go through shared memory that ends with the loader worker, so it is unpacked as soon as it is received, even
    if it is not the next batch in order.
    """

    def __init__(self, value: Any = None, whose: str = "", error: Exception | None = None) -> None:
        # The first byte says what follows: "=" a pickled batch, "!" an outcome with an error.
        self._data = b"" if error is not None else b"="
        try:
            if error is None:
                stream = io.BytesIO()
                # The pickler of torch's queues, for which tensors are registered to go through shared memory.
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
        return _unpack, (self._data,)


def _unpack(data: bytes) -> Outcome[Any]:
    content = memoryview(data)[1:]
    return Outcome(pickle.loads(content)) if data[:1] == b"=" else Outcome.from_bytes(bytes(content))
