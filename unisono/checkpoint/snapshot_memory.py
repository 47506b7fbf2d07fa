"""The memory that snapshots are in: a file without a name, which the launcher holds, so that it outlives the workers.

It is sparse, and has a region for each slot of each rank of a machine, in each attempt (restart) of the run; only what
was written takes memory. A region begins with a page, its header; then come tensors, and after them everything else,
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
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.comm.operations import HOST
from unisono.launch.held_memory import MOST_RANKS, SIZE, create_memory
from unisono.world import World

ALL = range(1 << 62)
"""All attempts."""

_REGION = 1 << 38  # bytes
SLOTS = 16
"""At most, of a rank."""
_OF_RANK = _REGION * SLOTS
_ATTEMPT = _OF_RANK * 2 * MOST_RANKS  # after a machine's own ranks come the copies that they have received
_ATTEMPTS = SIZE // _ATTEMPT  # then their regions are used again
_PAGE = 4096
_ALIGNED = 64  # bytes: tensors that begin there are copied fast
_HEADER = struct.Struct("<8sqqqqqqdqqqq")  # the word, then the fields of `Snapshot` and `_Ends`
_WORD = b"unisnap1"
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class Snapshot(NamedTuple):
    """One rank's part of a snapshot.

    Attributes:
        attempt: the number of groups that the launcher had started before the one that took it.
        number: counts those of an attempt, alike on all ranks.
        step: the optimizer steps taken.
        rank, world_size: the rank that has taken it, and their number.
        needed: the number of parts that are the whole state: those of all ranks, or of the ranks of any one machine.
        created: seconds since 1970.
    """

    attempt: int
    number: int
    step: int
    rank: int
    world_size: int
    needed: int
    created: float


class Part(NamedTuple):
    """One rank's part of a snapshot in this machine's memory, and where its region begins."""

    snapshot: Snapshot
    at: int


class Content(NamedTuple):
    """What a rank leaves: dense tensors, with what they are, which hardly ever changes; and the rest, tensors nested in
    anything that can be pickled."""

    keys: Any
    tensors: list[torch.Tensor]
    rest: Any


class _Ends(NamedTuple):
    """Where the tensors, the keys and the rest end, and the checksum of the last two. One of tensors would take half as
    long as the copy; they are whole, since they are written before."""

    tensors: int
    keys: int
    rest: int
    checksum: int


class _Layout:
    """Where tensors go, one after another; and what they are, pickled."""

    def __init__(self, keys: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.keys = keys
        self.places, self.end = list[tuple[int, torch.dtype, torch.Size]](), 0
        for each in tensors:
            self.places.append((self.end, each.dtype, each.shape))
            self.end += -(-each.nbytes // _ALIGNED) * _ALIGNED
        self.pickled = pickle.dumps((keys, self.places), pickle.HIGHEST_PROTOCOL)

    def fits(self, keys: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it is the layout of these tensors."""
        alike = zip(self.places, tensors, strict=False)
        is_alike = len(self.places) == len(tensors) and self.keys == keys
        return is_alike and all(place[1] is each.dtype and place[2] == each.shape for place, each in alike)


class _Pickler(pickle.Pickler):
    """Pickles everything but plain dense tensors; in their place it leaves their numbers in a list."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, each: Any) -> Any:
        if type(each) not in _PLAIN or each.layout is not torch.strided or each.is_quantized:
            return None
        self._tensors.append(each)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Reads what a `_Pickler` has written."""

    def __init__(self, data: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        # Its keeper may write to it; a generator takes no view; and pickled, a view is the whole region.
        return self._tensors[number].clone()


class SlotWriter:
    """Writes the snapshots of one rank, in one attempt, into its slots in turn.

    Args:
        file: a descriptor of the memory.
        local_rank: the rank's number on its machine.
        are_guests: whether it writes the copies that the rank receives from another machine.
    """

    def __init__(self, file: int, attempt: int, local_rank: int, slots: int, are_guests: bool = False) -> None:
        self._file, self._slots, self._attempt = file, slots, attempt
        self._at = _ATTEMPT * (attempt % _ATTEMPTS) + _OF_RANK * (local_rank + MOST_RANKS * are_guests)
        self._layout = _Layout(None, [])
        self._memory: list[mmap.mmap | None] = [None] * slots
        self._views: list[tuple[_Layout | None, list[torch.Tensor]]] = [(None, [])] * slots

    def write(
        self, number: int, step: int, rank: int, world_size: int, content: Content, needed: int | None = None
    ) -> None:
        """Copy the content. `needed` is that of `Snapshot`; None: the parts of all ranks."""
        tensors, rest = _pickle(content)
        if not self._layout.fits(content.keys, tensors):
            self._layout = _Layout(content.keys, tensors)
        slot, layout = number % self._slots, self._layout
        begin = _PAGE + layout.end
        middle, end = begin + len(layout.pickled), begin + len(layout.pickled) + len(rest)
        memory = self._reserved(slot, end)
        memory[: len(_WORD)] = bytes(len(_WORD))  # no snapshot, until the end of this function
        if self._views[slot][0] is not layout:
            words = _tensor_of(memory)[_PAGE:]
            self._views[slot] = layout, [_view(words, *place) for place in layout.places]
        with torch.no_grad():
            for view, each in zip(self._views[slot][1], tensors, strict=True):
                view.copy_(each)
        memory[begin:end] = layout.pickled + rest
        snapshot = Snapshot(self._attempt, number, step, rank, world_size, needed or world_size, time.time())
        fields = _HEADER.pack(_WORD, *snapshot, *_Ends(begin, middle, end, zlib.crc32(memory[begin:end])))
        memory[len(_WORD) : len(fields)] = fields[len(_WORD) :]
        self.commit(number)

    def written(self, number: int) -> torch.Tensor:
        """The bytes after the word of the snapshot that was written as that number, while it is in its slot."""
        memory = self._memory[number % self._slots]
        assert memory is not None
        return _tensor_of(memory)[len(_WORD) : _unpacked(memory[: _HEADER.size])[1].rest]

    def begin(self, number: int, size: int) -> torch.Tensor:
        """Where to put that many bytes after the word of a snapshot; it becomes one at `commit`."""
        memory = self._reserved(number % self._slots, len(_WORD) + size)
        memory[: len(_WORD)] = bytes(len(_WORD))
        return _tensor_of(memory)[len(_WORD) :][:size]

    def commit(self, number: int) -> None:
        """What was begun as that number is whole."""
        memory = self._memory[number % self._slots]
        assert memory is not None
        memory[: len(_WORD)] = _WORD

    def drop_after(self, step: int) -> int:
        """Drop this rank's snapshots of later steps; returns the number of the last one that is left."""
        left = -1
        for memory in filter(None, self._memory):
            snapshot, _ = _unpacked(memory[: _HEADER.size])
            if snapshot.step > step:
                memory[: len(_WORD)] = bytes(len(_WORD))
            elif memory[: len(_WORD)] == _WORD:
                left = max(left, snapshot.number)
        return left

    def _reserved(self, slot: int, size: int) -> mmap.mmap:
        """The memory of a slot, of at least that size."""
        memory = self._memory[slot]
        if memory is None or len(memory) < size:
            self._views[slot] = None, []
            memory = self._memory[slot] = mmap.mmap(self._file, size + size // 8, offset=self._at + _REGION * slot)
        return memory


def size_of(content: Content) -> int:
    """The bytes that a snapshot of the content takes."""
    tensors, rest = _pickle(content)
    layout = _Layout(content.keys, tensors)
    return _PAGE + layout.end + len(layout.pickled) + len(rest)


def find_parts(file: int, attempts: Container[int] = ALL) -> list[list[Part]]:
    """The parts of these attempts' snapshots that are in this memory: for each, those of its ranks; the newest
    first."""
    found: dict[tuple[int, int], list[Part]] = {}
    for at in _regions(file):
        header = os.pread(file, _HEADER.size, at)
        if header.startswith(_WORD):
            snapshot, ends = _unpacked(header)
            words = os.pread(file, ends.rest - ends.tensors, at + ends.tensors)
            if snapshot.attempt in attempts and zlib.crc32(words) == ends.checksum:
                found.setdefault(snapshot[:2], []).append(Part(snapshot, at))
    return [sorted(parts) for _, parts in sorted(found.items(), reverse=True)]


def describe_missing(parts: Sequence[Snapshot]) -> str:
    """A sentence on the newest snapshot, if only these parts of it are there, not the whole state."""
    missing = sorted({*range(parts[0].world_size)} - {part.rank for part in parts})
    step = parts[0].step
    return f"no snapshot is complete: of the newest, of step {step}, the parts of ranks {missing} are in no memory here"


def read_part(file: int, part: Part) -> Content:
    """What is in a part. Its own tensors are views of the memory, except for scalars, which an optimizer may keep."""
    ends = _unpacked(os.pread(file, _HEADER.size, part.at))[1]
    memory = mmap.mmap(file, ends.rest, offset=part.at)
    words, (of, places) = _tensor_of(memory)[_PAGE:], pickle.loads(memory[ends.tensors : ends.keys])
    views = [_view(words, *place) for place in places]
    found = [each.clone() if each.ndim == 0 else each for each in views]
    count, others = _Unpickler(memory[ends.keys : ends.rest], found).load()
    return Content(of, found[:count], others)


def read_snapshots(file: int, attempts: Container[int] = ALL) -> Iterator[list[tuple[Snapshot, Content]]]:
    """The snapshots of these attempts that are complete in this memory, the newest first: each rank's part."""
    for parts in find_parts(file, attempts):
        if len(parts) == parts[0].snapshot.needed:
            yield [(part.snapshot, read_part(file, part)) for part in parts]


def free_others(file: int, attempt: int) -> None:
    """Give back the memory of all other attempts."""
    for at in _regions(file):
        if at // _ATTEMPT != attempt % _ATTEMPTS:
            with mmap.mmap(file, max(os.lseek(file, at, os.SEEK_HOLE) - at, _PAGE), offset=at) as region:
                region.madvise(mmap.MADV_REMOVE)


def _pickle(content: Content) -> tuple[list[torch.Tensor], bytes]:
    """All tensors of the content, its own first; and the rest without them."""
    file, tensors = io.BytesIO(), [*content.tensors]
    _Pickler(file, tensors).dump((len(tensors), content.rest))
    return tensors, file.getvalue()


def _unpacked(header: bytes) -> tuple[Snapshot, _Ends]:
    fields = _HEADER.unpack(header)[1:]
    return Snapshot(*fields[:7]), _Ends(*fields[7:])


def _regions(file: int) -> list[int]:
    """Where the regions begin that were written to."""
    found, at = [], 0
    with suppress(OSError):  # there is no more
        while (at := os.lseek(file, at, os.SEEK_DATA)) < SIZE:
            found.append(at - at % _REGION)
            at = found[-1] + _REGION
    return found


def _tensor_of(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _view(memory: torch.Tensor, at: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    size = shape.numel() * dtype.itemsize
    return memory[at : at + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype, device=HOST)


def open_memory(world: World) -> int:
    """A descriptor of the launcher's memory; of this process's own, if nothing started it that would start it again."""
    place = world.state.held_memory
    if place:
        return os.open(place, os.O_RDWR | os.O_CLOEXEC)
    made = create_memory() if world.world_size == 1 else None
    if made is None:
        raise ValueError(
            "snapshot_every is for the ranks that `unisono run` or spawn() has started on Linux, as processes: their "
            "launcher holds the memory that outlives them; leave it out here"
        )
    return made
