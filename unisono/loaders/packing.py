"""What a loader worker sends to its parent: a batch, or the complete exception that was raised instead.

torch sends an error as text, and rebuilds it only if its class takes one argument; it drops a batch that cannot be
pickled or shared, in a thread of its own, and waits for it forever. So values are pickled in the worker's main thread,
where a failure can be reported. Their tensors go through /dev/shm, of which containers often have 64 MB.

*Threads:* the reader's, in the parent; `Packed` is made in the loader workers.
"""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from unisono.errors import UnpicklableError
from unisono.outcome import Outcome, add_note_once, chain_of
from unisono.tree import map_objects, tensors

SHM = Path("/dev/shm")

_MANY = 16  # tensors of a batch: each takes a descriptor in the worker, one in the parent, and more in transit
_ALIGNED = 64  # bytes; torch's own alignment on the CPU
_FULL = "unable to allocate shared memory"  # torch's words
_LITTLE = 1 << 30  # bytes


class Packed:
    """A batch of `whose`, or the exception raised instead, already pickled; it arrives in the parent as an `Outcome`.
    The shared memory ends with the loader worker, so it is unpacked as soon as it is received, even out of order."""

    def __init__(self, value: Any = None, whose: str = "", error: Exception | None = None) -> None:
        if error is None:
            try:
                stream = io.BytesIO(b"=")  # says what follows: a pickled batch
                stream.seek(1)
                is_merged = len({*map(id, tensors(value))}) > _MANY
                # The pickler of torch's queues, for which tensors are registered to go through shared memory.
                ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(_Merged(value) if is_merged else value)
                self._data = stream.getvalue()
                return
            except Exception as reason:
                error = reason
                if _FULL not in str(reason):
                    error = UnpicklableError(
                        f"a batch of {whose} cannot be sent from a loader worker ({type(reason).__name__}: {reason}); "
                        "return tensors, arrays, numbers or other picklable data, or pass num_workers=0"
                    )
                    error.__cause__ = reason
        self._data = b"!" + Outcome.failure(error).to_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._data,)


def _unpack(data: bytes) -> Outcome[Any]:
    content = memoryview(data)[1:]
    return Outcome(pickle.loads(content)) if data[:1] == b"=" else Outcome.from_bytes(bytes(content))


class _Slot:
    """The place of a tensor in a merged one: its start in bytes."""

    def __init__(self, start: int, tensor: torch.Tensor) -> None:
        self._place = start, start + tensor.nbytes, tensor.dtype, tuple(tensor.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        start, stop, dtype, shape = self._place
        return whole[start:stop].view(dtype).view(shape)


class _Merged:
    """A batch whose many tensors are merged into one for transit, which needs one descriptor."""

    def __init__(self, batch: Any) -> None:
        self._found: list[tuple[_Slot, torch.Tensor]] = []
        self._end = 0
        slots = map_objects(self._place, batch)  # a tensor that occurs twice stays one
        # On the CPU even if the user has set another default device.
        device = torch.default_generator.device
        self._parts = slots, torch.empty(self._end, dtype=torch.uint8, device=device).share_memory_()
        for slot, tensor in self._found:
            slot.of(self._parts[1]).copy_(tensor)

    def _place(self, leaf: Any) -> Any:
        # Of strides, devices, quantisation and gradients nothing would be sent.
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or not leaf.is_cpu:
            return leaf
        if leaf.requires_grad or leaf.is_quantized or leaf.is_nested or not leaf.is_contiguous():
            return leaf
        self._found.append((_Slot(self._end, leaf), leaf))
        self._end += max(-(-leaf.nbytes // _ALIGNED), 1) * _ALIGNED
        return self._found[-1][0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _apart, self._parts


def _apart(slots: Any, whole: torch.Tensor) -> Any:
    return map_objects(lambda leaf: leaf.of(whole) if type(leaf) is _Slot else leaf, slots)


def is_tight() -> bool:
    """Whether batches that wait should be copied out of shared memory: there is little, as in containers."""
    return (found := _free_and_size()) is not None and found[1] < _LITTLE


def explain(error: BaseException) -> None:
    """Add a note to torch's error about missing shared memory: how much there is, and what to do."""
    if any(_FULL in str(each) for each in chain_of(error)):
        add_note_once(error, why_full())


def why_full() -> str:
    """Describe the size of shared memory, its free part, and what to do."""
    found = _free_and_size()
    sizes = f", of {found[1] / 1e6:,.1f} MB with {found[0] / 1e6:,.1f} MB free now," if found else ""
    return (
        f"{SHM}{sizes} had no room for the batches that loader workers send; enlarge it (docker run --shm-size=8g or "
        "--ipc=host; in Kubernetes an emptyDir with medium: Memory mounted there), or pass fewer num_workers, a "
        "smaller prefetch_factor or a smaller batch_size"
    )


def _free_and_size() -> tuple[int, int] | None:
    """The free and the total shared memory, in bytes; None if there is no such file system."""
    try:
        status = os.statvfs(SHM)
    except (OSError, AttributeError):
        return None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
