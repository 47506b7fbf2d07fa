"""Folding: how a reduction is computed from the ranks' tensors when all of them are in one process's memory.

A small reduction is folded by one thread. For a large one, a single thread would take as long as memory needs for all
tensors, while the others wait; so the threads fold together, block by block, in place. A block of every tensor fits
into a core's cache: each byte is read from memory once and written back once.

Invariants:

1. Ranks are folded in rank order, whichever thread folds a block, so a repeated run gives the same bits.
2. All tensors end with the same bits: they get copies of one result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from unisono.protocols import ReduceOp

SHARED_BYTES = 2**20  # from this size on threads work together; below it, a second meeting costs more (measured)
BLOCK_BYTES = 2**20  # of each tensor, folded at once: several fit into the cache, and the cost of a call is negligible

_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}

# Values of ncclRedOp_t, as torch.cuda.nccl passes them on.
_NCCL_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "mean": 4}
# NCCL has no 16-bit integers, bool or complex numbers.
_NCCL_TYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


class SharedFold:
    """A reduction of tensors in place that several threads carry out together. Each calls `work`, which takes one block
    after another until none is left. The results are complete when every thread has returned."""

    def __init__(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._op: ReduceOp = op
        first = self._flat[0]
        self._length = len(first)
        share = -(-self._length // len(tensors))
        # At most a thread's share, so that each has a block to fold.
        self._block = min(share, BLOCK_BYTES // first.itemsize)
        self._start = 0
        self._taking = threading.Lock()

    def work(self) -> None:
        """Fold blocks until all are taken."""
        while True:
            with self._taking:
                start, self._start = self._start, self._start + self._block
            if start >= self._length:
                return
            parts = [flat[start : start + self._block] for flat in self._flat]
            fold_into(parts[0], parts, self._op)
            for other in parts[1:]:
                other.copy_(parts[0])


def all_reduction(tensors: Sequence[torch.Tensor], op: ReduceOp) -> SharedFold | torch.Tensor | None:
    """Begin the reduction of the ranks' tensors into each of them; return what is left to do: a fold for all threads,
    a result that every rank must copy into its tensor, or None."""
    if len(tensors) == 1 or _reduced_by_nccl(tensors, op):
        return None
    # On an accelerator, the device does the work.
    if tensors[0].nbytes >= SHARED_BYTES and all(tensor.is_cpu for tensor in tensors) and _are_flat(tensors):
        return SharedFold(tensors, op)
    return fold(tensors, op)


def fold(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce into a new tensor on the first one's device."""
    total = tensors[0].detach().clone()
    fold_into(total, [total, *(other.to(total.device) for other in tensors[1:])], op)
    return total


def fold_into(total: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
    """Reduce the parts, of equal shapes, in their order, into `total`, which may be the first of them."""
    first, *others = parts
    if not others and total is not first:
        total.copy_(first)
    for other in others:
        _FOLDS[op](first, other, out=total)
        first = total
    if op == "mean":
        total.div_(len(parts))


def _are_flat(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each is contiguous and shares its memory with no other, with no conjugation left to apply."""
    if not all(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() for tensor in tensors):
        return False
    # Folded in place, memory that two tensors share would count twice.
    stretches = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    return all(before[1] <= after[0] for before, after in pairwise(stretches))


def _reduced_by_nccl(tensors: Sequence[torch.Tensor], op: ReduceOp) -> bool:
    """Let NCCL reduce in place, if torch has an NCCL module for the tensors' family and each has a separate device."""
    nccl = getattr(getattr(torch, tensors[0].device.type, None), "nccl", None)
    devices = {tensor.device for tensor in tensors}
    if nccl is None or not 1 < len(devices) == len(tensors) or tensors[0].dtype not in _NCCL_TYPES:
        return False
    if not nccl.is_available(tensors):
        return False
    nccl.all_reduce([tensor.detach() for tensor in tensors], op=_NCCL_OPS[op])
    return True
