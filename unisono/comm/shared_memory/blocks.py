"""Collectives on tensors in main memory, by way of blocks that all ranks map.

A tensor is sent in blocks. A rank copies its block into its slot, all ranks meet, and each takes what it needs from the
slots of all: everything, or its part of a reduction. Blocks stay in the cache on their way.

*Threads:* the rank's own thread.

Invariants:

1. What is shown at meeting n is in set n modulo 3 of the slots. It may be read until the reader arrives at meeting n +
   2; the slot is written again only after all have arrived at that one.
2. Ranks are folded in rank order, whichever rank does it, and all ranks copy one result or compute the same: all have
   the same bits, which are also those of threads (`folding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from unisono.comm.folding import fold_into
from unisono.comm.shared_memory.mapping import Mapping
from unisono.comm.shared_memory.meeting_point import MeetingPoint

_SETS = 3
_SLOT_BYTES = 2**20
_ALL_SLOTS_BYTES = 2**28
_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every itemsize
_KEPT_VIEWS = 256
_DIRECT_BYTES = 2**15  # up to this size each rank folds everything itself: one meeting instead of two


def slot_bytes(size: int) -> int:
    """The size of a slot in a group of that size: their total is bounded."""
    return min(_SLOT_BYTES, _ALL_SLOTS_BYTES // (_SETS * size) // _ALIGNMENT * _ALIGNMENT)


def bytes_of_blocks(size: int) -> int:
    """The bytes that a group of that size has to map for its slots."""
    return _SETS * size * slot_bytes(size)


class Blocks:
    """The slots of a group, and its collectives on flat tensors: contiguous, one-dimensional, in main memory."""

    def __init__(self, mapping: Mapping, here: MeetingPoint) -> None:
        self.rank, self.size = mapping.rank, mapping.size
        self._here = here
        self._mapping = mapping
        self._slot_bytes = slot_bytes(self.size)
        self._views: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}

    def all_reduce(self, action: str, flat: torch.Tensor, op: str) -> None:
        """Reduce into `flat`, on each rank."""
        if self.size > 2 and flat.nbytes > _DIRECT_BYTES:
            self._reduce_together(action, flat, op)
            return
        for block, slots in self._show(action, flat):
            fold_into(block, slots, op)

    def broadcast(self, action: str, flat: torch.Tensor, root: int) -> None:
        """Copy the root's `flat` into those of the others."""
        for block, slots in self._show(action, flat, is_shown=self.rank == root):
            if self.rank != root:
                block.copy_(slots[root])

    def all_gather(self, action: str, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Copy each rank's `flat` into the output with its number, if this rank has outputs."""
        start = 0
        for block, slots in self._show(action, flat):
            stop = start + block.shape[0]
            for output, slot in zip(outputs, slots, strict=False):
                output[start:stop].copy_(slot)
            start = stop

    def reduce_scatter(self, action: str, output: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
        """Reduce the parts with this rank's number, from all ranks, into `output`."""
        for start, pieces in self._exchange(action, parts):
            fold_into(output[start : start + pieces[0].shape[0]], pieces, op)

    def all_to_all(self, action: str, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Copy the parts with this rank's number, from all ranks, into `output`, one after another."""
        found = output.view(self.size, output.shape[0] // self.size)
        for start, pieces in self._exchange(action, parts):
            for own, piece in zip(found, pieces, strict=True):
                own[start : start + piece.shape[0]].copy_(piece)

    def barrier(self, action: str, timeout_s: float | None = None) -> None:
        """Wait for all ranks; None is the group's timeout."""
        try:
            self._here.enter(action, timeout_s)
        except BaseException:
            self._here.close(is_broken=True)
            raise

    def _reduce_together(self, action: str, flat: torch.Tensor, op: str) -> None:
        """Each rank folds its part of a block into the first slot; all copy from there after they have met again."""
        folded: tuple[torch.Tensor, torch.Tensor] | None = None
        for block, slots in self._show(action, flat):
            # Rounded up: the last ranks' parts may be shorter, or empty.
            share = -(-block.shape[0] // self.size)
            parts = [slot[self.rank * share : (self.rank + 1) * share] for slot in slots]
            # In place, in rank 0's slot: no other rank reads this part of it before the next meeting.
            fold_into(parts[0], parts, op)
            if folded is not None:  # all have arrived at this meeting, so their parts of the previous block are done
                folded[0].copy_(folded[1])
            folded = block, slots[0]
        # The last block has no following meeting in the loop.
        self._here.meet()
        assert folded is not None, "there is one block at least"
        folded[0].copy_(folded[1])

    def _show(
        self, action: str, flat: torch.Tensor, is_shown: bool = True
    ) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Yield each block of `flat`, once all ranks have shown theirs, with the blocks that the ranks have shown."""
        length, start = flat.shape[0], 0
        capacity = self._slot_bytes // flat.itemsize
        # An empty tensor has one empty block, because the ranks meet in any case to compare their calls.
        while start < length or not start:
            block = flat if length <= capacity else flat[start : start + capacity]
            slots = self._slots(flat.dtype, block.shape[0])
            if is_shown:
                slots[self.rank].copy_(block)
            if start:
                self._here.meet()
            else:  # the first block: compare what the ranks do
                self._here.enter(action)
            yield block, slots
            start += capacity

    def _exchange(self, action: str, parts: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield each block of the parts, one for each rank, once all ranks have shown theirs: where it begins, and what
        the ranks have shown for this one."""
        (length,), dtype, start = parts[0].shape, parts[0].dtype, 0
        # A slot holds a piece for each rank.
        capacity = self._slot_bytes // dtype.itemsize // self.size
        while start < length or not start:
            width = min(capacity, length - start)
            pieces = [slot.view(self.size, width) for slot in self._slots(dtype, self.size * width)]
            for part, piece in zip(parts, pieces[self.rank], strict=True):
                piece.copy_(part[start : start + width])
            if start:
                self._here.meet()
            else:  # the first block: compare what the ranks do
                self._here.enter(action)
            yield start, [each[self.rank] for each in pieces]
            start += capacity

    def _slots(self, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
        """For each rank, that many elements at the beginning of its slot for the next meeting."""
        which = (self._here.turn + 1) % _SETS
        views = self._views.get((dtype, length, which))
        if views is None:
            # Shapes that differ in every step would otherwise add views without end.
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            start = self._mapping.blocks_at + which * self.size * self._slot_bytes
            views = [
                torch.frombuffer(
                    self._mapping.memory, dtype=dtype, count=max(1, length), offset=start + rank * self._slot_bytes
                )[:length]  # `frombuffer` does not accept 0
                for rank in range(self.size)
            ]
            self._views[dtype, length, which] = views
        return views
