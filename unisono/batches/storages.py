"""Notes on tensors by the memory that they occupy: they also apply to views, for as long as that memory exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

from unisono.torch_private import STORAGE_ADDRESS, free_weak_storage, is_storage_expired, weak_storage
from unisono.tree import innermost

T = TypeVar("T")

_SWEEP_FROM = 64  # entries, before a note itself searches for expired storages
_STRETCHES = 1024  # of one storage: only the latest are kept


class _Notes(Generic[T]):
    """The notes on tensors that are parts of one storage: by first byte and the one after the last, the latest last."""

    def __init__(self) -> None:
        self.notes: dict[tuple[int, int], T] = {}
        self.end = 0  # the greatest end that one has had

    def add(self, begin: int, end: int, value: T, is_kept: Callable[[T], bool]) -> T | None:
        """As `StorageMap.note`."""
        notes, stretch = self.notes, (begin, end)
        before = notes.pop(stretch, None)
        # Thousands of tensors in one storage come one after another, and contain no other.
        for each in () if begin >= self.end else [each for each in notes if begin <= each[0] and each[1] <= end]:
            if not is_kept(notes[each]):
                del notes[each]
        # The first key is the oldest note.
        if len(notes) >= _STRETCHES:
            del notes[next(iter(notes))]
        notes[stretch] = value
        self.end = max(end, self.end)
        return before

    def find(self, begin: int, end: int) -> T | None:
        """As `StorageMap.find`."""
        if (begin, end) in self.notes:
            return self.notes[begin, end]
        overlapping = None
        for (first, last), value in reversed(self.notes.items()):
            if first <= begin and end <= last:
                return value
            if overlapping is None and first < end and begin < last:
                overlapping = value
        return overlapping


class StorageMap(Generic[T]):
    """A map from the memory of tensors to values, which are not None. It keeps neither tensors nor memory alive.

    If tensors overlap, the latest note applies, except to a tensor whose own note `is_kept` when a larger one is noted.
    Tensors without accessible memory (of a lazy device before they are computed, some subclasses) are never found.

    *Threads:* one at a time, except that `find` may run next to the others.
    """

    def __init__(self, is_kept: Callable[[T], bool] = lambda value: False) -> None:
        self._is_kept = is_kept
        # By address. A weak reference keeps it occupied, so no other storage can be found at it. The value itself
        # stands for a tensor that fills its storage: thousands of objects would occupy the garbage collector.
        self._held: dict[int, T | _Notes[T]] = {}
        self._num_left = 0  # entries, after the last search for expired storages

    def __del__(self, free: Callable[[int], None] = free_weak_storage) -> None:
        for address in self._held:
            free(address)

    def note(self, tensor: torch.Tensor, value: T) -> T | None:
        """Note a value for this tensor and for all that share its memory; returns the last one for the same bytes."""
        if (storage := _storage_of(tensor)) is None:
            return None
        address, whole = getattr(storage, STORAGE_ADDRESS), storage.nbytes()
        held = self._held.get(address)
        if held is None:
            if len(self._held) >= max(_SWEEP_FROM, 2 * self._num_left):
                self.sweep()
            weak_storage(storage)
        begin, end = _stretch_of(tensor, whole)
        if not isinstance(held, _Notes):
            if end - begin == whole:
                self._held[address] = value
                return held
            before, self._held[address] = held, (held := _Notes())
            if before is not None:
                held.add(0, whole, before, self._is_kept)
        return held.add(begin, end, value, self._is_kept)

    def note_all(self, tensors: Iterable[torch.Tensor], value: T) -> list[tuple[torch.Tensor, T]]:
        """`note` for each of them; returns those that had a value, with the last one."""
        held, known = self._held, []
        if len(held) >= max(_SWEEP_FROM, 2 * self._num_left):
            self.sweep()
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                address = getattr(storage, STORAGE_ADDRESS)
                # As nearly all do: a batch may have thousands.
                is_new = address not in held and 0 < tensor.nbytes == storage.nbytes() and tensor.is_contiguous()
            except (RuntimeError, NotImplementedError):
                continue
            if is_new:
                weak_storage(storage)
                held[address] = value
            elif (before := self.note(tensor, value)) is not None:
                known.append((tensor, before))
        return known

    def find(self, tensor: torch.Tensor) -> T | None:
        """The note for this tensor; else for one that contains it; else for one that overlaps it; else None."""
        if (storage := _storage_of(tensor := innermost(tensor))) is None:
            return None
        held = self._held.get(getattr(storage, STORAGE_ADDRESS))
        return held.find(*_stretch_of(tensor, storage.nbytes())) if isinstance(held, _Notes) else held

    def __len__(self) -> int:
        """The number of storages with notes, including expired ones that were not removed yet."""
        return len(self._held)

    def sweep(self) -> None:
        """Remove expired storages, unless few were noted since the last time. The earlier the better: torch's object
        for an expired storage lies amid free memory, which then serves no other batch."""
        if 4 * len(self._held) <= 5 * self._num_left:
            return
        expired = [*filter(is_storage_expired, self._held)]
        for address in expired:
            del self._held[address]
        for address in expired:
            free_weak_storage(address)
        self._num_left = len(self._held)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None if it has no accessible memory."""
    try:
        return tensor.untyped_storage() if tensor.nbytes else None
    except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
        return None


def _stretch_of(tensor: torch.Tensor, whole: int) -> tuple[int, int]:
    """The tensor's first byte in its storage of that many bytes, and the one after its last."""
    nbytes = tensor.nbytes
    if tensor.is_contiguous():
        begin = 0 if nbytes == whole else int(tensor.storage_offset()) * tensor.itemsize
        return begin, begin + nbytes
    begin = int(tensor.storage_offset()) * tensor.itemsize
    extent = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin, begin + int(extent) * tensor.itemsize
