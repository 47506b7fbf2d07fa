"""What a loader worker sends to its parent: a batch, or the complete exception that was raised instead.

torch sends an error as text, and rebuilds it only if its class takes one argument; it drops a batch that cannot be
pickled or shared, in a thread of its own, and waits for it forever. So values are pickled in the worker's main thread,
where a failure can be reported. Their tensors go through /dev/shm, of which containers often have 64 MB. To send a
descriptor for each tensor of a small batch takes longer than to copy it, so these go through the worker's `Ring`.

*Threads:* the reader's, in the parent; `Packed` is made in the loader workers.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from unisono.comm.outcome import Outcome, add_note_once, chain_of, text_of
from unisono.errors import UnpicklableError
from unisono.tree import measured

SHM = Path("/dev/shm")

_Slot = tuple[int, int, torch.dtype, tuple[int, ...]]
"""The place of a tensor in a merged one: its start, its bytes, its type and its shape."""

_MANY = 16  # tensors of a batch: each takes a descriptor in the worker, one in the parent, and more in transit
_ALIGNED = 64  # bytes; torch's own alignment on the CPU
_SMALL = 1 << 18  # bytes of a batch
_RING = 1 << 24  # bytes of a ring, at most
_RINGS = 16  # the free shared memory has room for this number, or there is none
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
                found, nbytes = measured(value)
                is_small = _ring is not None and bool(found) and nbytes <= _SMALL
                is_merged = is_small or len({*map(id, found)}) > _MANY
                sent = _Merged(value) if is_merged else value
                # The pickler of torch's queues, for which tensors are registered to go through shared memory.
                ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(sent)
                if _ring is not None and is_merged and sent.is_in_ring:
                    _ring.is_known = True  # only now: what fails before is not sent
                self._data = stream.getvalue()
                return
            except Exception as reason:
                error = reason
                if _FULL not in text_of(reason):
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


class Ring:
    """Memory for the small batches of a loader worker, one slot after another. Its parent copies a batch out when it
    receives it, and never asks for as many more as there are slots. So a slot is free when its turn comes.

    Attributes:
        is_known: whether the parent has the memory; until then each batch brings it.
    """

    def __init__(self, slots: int) -> None:
        self.is_known = False
        self._slots, self._size, self._turn = slots, 0, 0
        self._memory: torch.Tensor | Any = None

    def take(self, nbytes: int) -> tuple[torch.Tensor, int] | None:
        """The memory, and where the next slot begins in it; None if there is no room for that many slots."""
        if nbytes > self._size and not self._grow(nbytes + nbytes // 4):
            return None
        self._turn = (self._turn + 1) % self._slots
        return self._memory, self._turn * self._size

    def _grow(self, nbytes: int) -> bool:
        size = -(-nbytes // _ALIGNED) * _ALIGNED
        found = _free_and_size()
        if self._slots * size > _RING or (found is not None and self._slots * size > found[0] // _RINGS):
            return False
        try:
            self._memory = _shared(self._slots * size)
        except RuntimeError:  # others were faster
            return False
        self._size, self.is_known = size, False
        return True


_ring: Ring | None = None  # in a loader worker
_rings: dict[int, torch.Tensor] = {}  # in the parent: their memory, by the worker's pid


def use_ring(slots: int) -> None:
    """Send small batches of this loader worker through a ring of `slots` from now on; 0: through none, as where
    shared memory is tight."""
    global _ring
    _ring = Ring(slots) if slots and not is_tight() else None
    _rings.clear()  # which a fork has inherited


def forget_rings(pids: Iterable[int]) -> None:
    """Free the memory of the rings of these loader workers."""
    for each in pids:
        _rings.pop(each, None)


def _shared(nbytes: int) -> torch.Tensor:
    # On the CPU even if the user has set another default device.
    made: torch.Tensor = torch.empty(nbytes, dtype=torch.uint8, device=torch.default_generator.device).share_memory_()
    return made


class _Merged:
    """A batch whose tensors are merged into one for transit: many, which needs one descriptor; or those of a small
    batch, in the ring."""

    is_in_ring = False

    def __init__(self, batch: Any) -> None:
        stream = io.BytesIO()
        pickler = _MergingPickler(stream, pickle.HIGHEST_PROTOCOL)
        pickler.dump(batch)
        data, end = stream.getvalue(), pickler.end
        if not end:  # none that could be merged
            self._reduced: tuple[Any, ...] = pickle.loads, (data,)
            return
        taken = _ring.take(end) if _ring is not None and end <= 2 * _SMALL else None
        if _ring is not None and taken is not None:
            self.is_in_ring = True
            memory, start = taken
            whole = memory[start : start + end]
            place = os.getpid(), start, end, len(pickler.found) > _MANY, None if _ring.is_known else memory
            self._reduced = _out_of_ring, (data, *place)
        else:
            whole = _shared(end)
            self._reduced = _apart, (data, whole)
        for slot, tensor in pickler.found.values():
            _tensor_in(whole, *slot).copy_(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _MergingPickler(ForkingPickler):
    """Pickles, of each plain tensor, its place in a merged one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: dict[int, tuple[_Slot, torch.Tensor]] = {}  # by the tensor's id
        self.end = 0

    def persistent_id(self, node: Any) -> _Slot | None:
        # Of strides, devices, quantisation and gradients nothing would be sent.
        if type(node) is not torch.Tensor or node.layout is not torch.strided or not node.is_cpu:
            return None
        if node.requires_grad or node.is_quantized or node.is_nested or not node.is_contiguous():
            return None
        if id(node) not in self.found:
            self.found[id(node)] = (self.end, node.nbytes, node.dtype, tuple(node.shape)), node
            self.end += max(-(-node.nbytes // _ALIGNED), 1) * _ALIGNED
        return self.found[id(node)][0]


class _MergedUnpickler(pickle.Unpickler):
    """A class, since Python 3.13.0 lets nobody set `persistent_load` of an object."""

    def __init__(self, data: bytes, whole: torch.Tensor, copies: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        # A tensor that occurs twice stays one.
        self._tensor = cache(lambda slot: _tensor_in(whole, *slot).clone() if copies else _tensor_in(whole, *slot))

    def persistent_load(self, slot: _Slot) -> Any:
        return self._tensor(slot)


def _apart(data: bytes, whole: torch.Tensor) -> Any:
    return _MergedUnpickler(data, whole).load()


def _out_of_ring(data: bytes, pid: int, start: int, nbytes: int, is_one: bool, memory: torch.Tensor | None) -> Any:
    """The batch in a slot, copied: at once if `is_one`, since it has many tensors. `memory` is the ring's, if new."""
    if memory is not None:
        _rings[pid] = memory
    slot = _rings[pid][start : start + nbytes]
    return _MergedUnpickler(data, slot.clone() if is_one else slot, copies=not is_one).load()


def _tensor_in(whole: torch.Tensor, start: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    return whole[start : start + nbytes].view(dtype).view(shape)


def is_tight() -> bool:
    """Whether batches that wait should be copied out of shared memory: there is little, as in containers."""
    return (found := _free_and_size()) is not None and found[1] < _LITTLE


def explain(error: BaseException) -> None:
    """Add a note to torch's error about missing shared memory: how much there is, and what to do."""
    if any(_FULL in text_of(each) for each in chain_of(error)):
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
