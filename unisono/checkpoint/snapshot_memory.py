"""The memory that snapshots are in: a file without a name, which the launcher holds, so that it outlives the workers.

It is sparse, and has a region for each slot of each rank of a machine, in each attempt (restart) of the run; only what
was written takes memory. A region begins with a page, its header; then come tensors, and behind them everything else,
pickled by the workers of the same run. The word that makes it a snapshot is written last. So a rank that dies while it
copies leaves the snapshots in its other slots; and what a dead process has stored is complete, and in order.

*Threads:* each rank writes its own regions. Nobody reads those of an attempt while its ranks write.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.launch.held_memory import SIZE

MOST_SLOTS = 7

_REGION = 1 << 38  # bytes
_OF_RANK = _REGION * (MOST_SLOTS + 1)  # the last one has the number of steps taken
_ATTEMPT = _OF_RANK * 256
_ATTEMPTS = SIZE // _ATTEMPT  # then their regions are used again
_PAGE = 4096
_ALIGNED = 64  # bytes: tensors that begin there are copied fast
_HEADER = struct.Struct("<8sqqqqqdqqq")  # the word, then the fields of `Snapshot` and `_Sizes`
_WORD = b"unisnap1"
_STEP = struct.Struct("<qq")
_SMALL = 1 << 16  # bytes
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class Snapshot(NamedTuple):
    """One rank's part of a snapshot.

    Attributes:
        attempt: the number of restarts before it was taken.
        number: counts those of an attempt, alike on all ranks.
        step: the optimizer steps taken.
        rank, world_size: the rank that has taken it, and their number.
        created: seconds since 1970.
    """

    attempt: int
    number: int
    step: int
    rank: int
    world_size: int
    created: float


class _Sizes(NamedTuple):
    """The bytes of the tensors, and of the rest; the checksum of both."""

    tensors: int
    rest: int
    checksum: int


class SlotWriter:
    """Writes the snapshots of one rank, in one attempt, into its slots in turn.

    Args:
        file: a descriptor of the memory.
        local_rank: the rank's number on its machine.
    """

    def __init__(self, file: int, attempt: int, local_rank: int, slots: int) -> None:
        self._file, self._slots, self._attempt = file, slots, attempt
        self._at = _ATTEMPT * (attempt % _ATTEMPTS) + _OF_RANK * local_rank
        self._memory: list[tuple[mmap.mmap, torch.Tensor] | None] = [None] * slots
        self._views: list[tuple[Sequence[Any], list[torch.Tensor]]] = [((), [])] * slots
        self._step = mmap.mmap(file, _PAGE, offset=self._at + _REGION * MOST_SLOTS)

    def note_step(self, step: int) -> None:
        """Note how many steps are taken."""
        _STEP.pack_into(self._step, 0, self._attempt, step)

    def write(self, number: int, step: int, rank: int, world_size: int, content: Any) -> int:
        """Copy the content: tensors, nested in anything that can be pickled. Returns the bytes that it takes."""
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(content)
        slot, rest = number % self._slots, file.getvalue()
        end = _PAGE + packer.end
        memory, words = self._reserved(slot, end + len(rest))
        memory[: len(_WORD)] = bytes(len(_WORD))  # no snapshot, until the end of this function
        tensors = words[_PAGE:end]
        if self._views[slot][0] != packer.places:
            self._views[slot] = packer.places, [_view(tensors, *place) for place in packer.places]
        with torch.no_grad():
            for view, each in zip(self._views[slot][1], packer.tensors, strict=True):
                view.copy_(each)
        memory[end : end + len(rest)] = rest
        snapshot = Snapshot(self._attempt, number, step, rank, world_size, time.time())
        fields = _HEADER.pack(_WORD, *snapshot, *_Sizes(packer.end, len(rest), _checksum(tensors, rest)))
        memory[len(_WORD) : len(fields)] = fields[len(_WORD) :]
        memory[: len(_WORD)] = _WORD
        return end + len(rest)

    def _reserved(self, slot: int, size: int) -> tuple[mmap.mmap, torch.Tensor]:
        """The memory of a slot, of at least that size."""
        memory = self._memory[slot]
        if memory is None or len(memory[0]) < size:
            self._views[slot] = (), []
            memory = self._memory[slot] = _map(self._file, self._at + _REGION * slot, size + size // 8)
        return memory


def packed_size(content: Any) -> int:
    """The bytes that a snapshot of the content takes."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(content)
    return _PAGE + packer.end + file.tell()


def read_snapshots(file: int, attempts: range) -> Iterator[list[tuple[Snapshot, Any]]]:
    """The complete snapshots of these attempts, the newest first: of each rank its part, and the content, whose tensors
    are views of the memory."""
    found: dict[tuple[int, int], dict[int, tuple[Snapshot, int]]] = {}
    for at in _regions(file):
        header = os.pread(file, _HEADER.size, at)
        if header.startswith(_WORD) and not _is_of_steps(at):
            snapshot = Snapshot(*_HEADER.unpack(header)[1:7])
            if snapshot.attempt in attempts:
                found.setdefault(snapshot[:2], {})[snapshot.rank] = snapshot, at
    for _, parts in sorted(found.items(), reverse=True):
        size = next(iter(parts.values()))[0].world_size
        if len(parts) == size:
            contents = [(parts[rank][0], _read(file, parts[rank][1])) for rank in range(size)]
            if all(content is not None for _, content in contents):
                yield contents


def last_step(file: int, attempts: range) -> int:
    """The last step that a rank has taken in these attempts; 0 if none has."""
    words = [os.pread(file, _STEP.size, at) for at in _regions(file) if _is_of_steps(at)]
    found: list[tuple[int, ...]] = [_STEP.unpack(each) for each in words]
    return max((pair for pair in found if pair[0] in attempts), default=(0, 0))[1]


def free_others(file: int, attempt: int) -> None:
    """Give back the memory of all attempts but that one."""
    for at in _regions(file):
        if at // _ATTEMPT != attempt % _ATTEMPTS:
            with mmap.mmap(file, max(os.lseek(file, at, os.SEEK_HOLE) - at, _PAGE), offset=at) as region:
                region.madvise(mmap.MADV_REMOVE)


class _Packer(pickle.Pickler):
    """Pickles everything but plain tensors, to which it gives places."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.places: list[tuple[int, torch.dtype, torch.Size]] = []
        self.end = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) not in _PLAIN or obj.layout is not torch.strided or obj.is_quantized:
            return None
        place = self.end, obj.dtype, obj.shape
        self.tensors.append(obj)
        self.places.append(place)
        self.end += -(-obj.numel() * obj.element_size() // _ALIGNED) * _ALIGNED
        return place


class _Unpacker(pickle.Unpickler):
    """Reads what a `_Packer` has written."""

    def __init__(self, data: bytes, tensors: torch.Tensor) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, place: Any) -> torch.Tensor:
        found = _view(self._tensors, *place)
        # A generator takes no state that is part of other memory.
        return found.clone() if found.nbytes <= _SMALL else found


def _read(file: int, at: int) -> Any:
    """The content of a region; None if its checksum differs."""
    sizes = _Sizes(*_HEADER.unpack(os.pread(file, _HEADER.size, at))[7:])
    end = _PAGE + sizes.tensors
    memory, words = _map(file, at, end + sizes.rest)
    rest = memory[end : end + sizes.rest]
    return _Unpacker(rest, words[_PAGE:end]).load() if _checksum(words[_PAGE:end], rest) == sizes.checksum else None


def _regions(file: int) -> list[int]:
    """Where the regions begin that were written to."""
    found, at = [], 0
    with suppress(OSError):  # there is no more
        while True:
            at = os.lseek(file, at, os.SEEK_DATA)
            found.append(at - at % _REGION)
            at = found[-1] + _REGION
    return found


def _is_of_steps(at: int) -> bool:
    return at % _OF_RANK == _REGION * MOST_SLOTS


def _map(file: int, at: int, size: int) -> tuple[mmap.mmap, torch.Tensor]:
    memory = mmap.mmap(file, size, offset=at)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


def _view(memory: torch.Tensor, at: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    size = shape.numel() * dtype.itemsize
    return memory[at : at + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def _checksum(tensors: torch.Tensor, rest: bytes) -> int:
    """A sum of words, which takes no longer than to read them: what was copied in part has another one."""
    words = int(tensors.view(torch.int64).sum()) if len(tensors) else 0
    return zlib.crc32(rest, words & 0xFFFFFFFF)
