"""What is known of a tensor by the memory that it lies in: so also of its views, for as long as that memory lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")

_SWEEP_FROM = 64  # entries, before the first look for memory that is gone
_STRETCHES = 1024  # of one storage: the latest are known


_Stretch = tuple[int, int]  # the bytes of a storage from the first on, up to the second


class StorageMap(Generic[T]):
    """Holds neither tensors nor their memory.

    What was noted last holds where tensors overlap, but for a tensor of which something was noted that is kept. Tensors
    without memory of their own kind (a lazy device's before they are computed, some subclasses) are not known.

    Args:
        is_kept: whether a value stays, where a larger tensor in the same memory is noted.
    """

    def __init__(self, is_kept: Callable[[T], bool] = lambda value: False) -> None:
        self._is_kept = is_kept
        self._held: dict[int, tuple[StorageWeakRef, dict[_Stretch, T]]] = {}  # of each storage the latest note last
        self._sweep_at = _SWEEP_FROM

    def note(self, tensor: torch.Tensor, value: T) -> T | None:
        """That is known from now on of this tensor, and of what shares its memory.

        Returns:
            What was known of just its bytes before.
        """
        storage = _storage(tensor)
        if storage is None:
            return None
        begin, end = stretch = _bytes_of(tensor)
        # A weak reference keeps the address taken, so that no other storage is found under it.
        held = self._held.get(storage._cdata)
        if held is None:
            self._sweep()
            held = self._held[storage._cdata] = (StorageWeakRef(storage), {})
        notes = held[1]
        before = notes.pop(stretch, None)
        if not notes:
            notes[stretch] = value
            return before
        for each in [each for each in notes if begin <= each[0] and each[1] <= end]:
            if not self._is_kept(notes[each]):
                del notes[each]
        if len(notes) >= _STRETCHES:
            del notes[next(iter(notes))]
        notes[stretch] = value
        return before

    def find(self, tensor: torch.Tensor) -> T | None:
        """What was noted of this tensor; else of one that it lies in; else of one that it overlaps."""
        storage = _storage(tensor)
        held = self._held.get(storage._cdata) if storage is not None else None
        if held is None:
            return None
        begin, end = stretch = _bytes_of(tensor)
        if stretch in held[1]:
            return held[1][stretch]
        overlapping = None
        for (first, last), value in reversed(held[1].items()):
            if first <= begin and end <= last:
                return value
            if overlapping is None and first < end and begin < last:
                overlapping = value
        return overlapping

    def __len__(self) -> int:
        """How many storages are known, those included that are gone and were not swept out yet."""
        return len(self._held)

    def _sweep(self) -> None:
        """Forget what is gone, whenever twice as much is held as was left the last time."""
        if len(self._held) >= self._sweep_at:
            self._held = {at: held for at, held in self._held.items() if not held[0].expired()}
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self._held))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage() if tensor.numel() else None
    except (RuntimeError, NotImplementedError):  # sparse tensors and some subclasses have none
        return None


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """From the first byte of the tensor in its storage to after the last one."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin, begin + int(extent) * tensor.itemsize
