"""Notes on tensors by the memory that they occupy: they also apply to views, for as long as that memory exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from unisono.torch_private import STORAGE_ADDRESS

T = TypeVar("T")

_SWEEP_FROM = 64  # entries, before the first search for expired storages
_STRETCHES = 1024  # of one storage: only the latest are kept


_Stretch = tuple[int, int]  # bytes of a storage: the first one, and the one after the last


class StorageMap(Generic[T]):
    """A map from the memory of tensors to values. It keeps neither tensors nor their memory alive.

    If tensors overlap, the latest note applies, except to a tensor whose own note was kept. Tensors without accessible
    memory (those of a lazy device before they are computed, some subclasses) are never found.

    Args:
        is_kept: whether a value stays when a larger tensor in the same memory is noted.
    """

    def __init__(self, is_kept: Callable[[T], bool] = lambda value: False) -> None:
        self._is_kept = is_kept
        # By address: the notes on a storage, the latest last, and the greatest end that one has had.
        self._held: dict[int, list[Any]] = {}
        self._sweep_at = _SWEEP_FROM

    def note(self, tensor: torch.Tensor, value: T) -> T | None:
        """Note a value for this tensor and for all tensors that share its memory.

        Returns:
            The previous note for exactly the same bytes, or None.
        """
        if (found := _place_of(tensor)) is None:
            return None
        storage, stretch = found
        begin, end = stretch
        # A weak reference keeps the address occupied, so no other storage can be found at it.
        address = getattr(storage, STORAGE_ADDRESS)
        held = self._held.get(address)
        if held is None:
            if len(self._held) >= self._sweep_at:
                self._sweep()
            self._held[address] = [StorageWeakRef(storage), {stretch: value}, end]
            return None
        notes: dict[_Stretch, T] = held[1]
        before = notes.pop(stretch, None)
        is_behind, held[2] = begin >= held[2], max(end, held[2])
        if not notes:
            notes[stretch] = value
            return before
        # Thousands of tensors in one storage come one behind the other, and contain no other.
        for each in () if is_behind else [each for each in notes if begin <= each[0] and each[1] <= end]:
            if not self._is_kept(notes[each]):
                del notes[each]
        # The first key is the oldest note.
        if len(notes) >= _STRETCHES:
            del notes[next(iter(notes))]
        notes[stretch] = value
        return before

    def find(self, tensor: torch.Tensor) -> T | None:
        """The note for this tensor; else for one that contains it; else for one that overlaps it; else None."""
        found = _place_of(tensor)
        held = self._held.get(getattr(found[0], STORAGE_ADDRESS)) if found is not None else None
        if found is None or held is None:
            return None
        begin, end = stretch = found[1]
        notes: dict[_Stretch, T] = held[1]
        if stretch in notes:
            return notes[stretch]
        overlapping = None
        for (first, last), value in reversed(notes.items()):
            if first <= begin and end <= last:
                return value
            if overlapping is None and first < end and begin < last:
                overlapping = value
        return overlapping

    def values(self) -> list[T]:
        """The notes on memory that exists."""
        return [each for held in self._held.values() if not held[0].expired() for each in held[1].values()]

    def __len__(self) -> int:
        """The number of storages with notes, including expired ones that were not removed yet."""
        return len(self._held)

    def _sweep(self) -> None:
        """Remove expired storages. Again when the number of entries is twice what is left."""
        self._held = {at: held for at, held in self._held.items() if not held[0].expired()}
        self._sweep_at = max(_SWEEP_FROM, 2 * len(self._held))


def _place_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, _Stretch] | None:
    """The tensor's storage; its first byte in it, and the one after its last. None if it has no accessible memory."""
    try:
        storage = tensor.untyped_storage() if tensor.numel() else None
    except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
        storage = None
    if storage is None:
        return None
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return storage, (begin, begin + tensor.nbytes)
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return storage, (begin, begin + int(extent) * tensor.itemsize)
