"""Compares what the ranks are about to do, where they have no shared memory for it.

*Threads:* the rank's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.operations import digest_of, mismatch_error
from unisono.comm.pickling import dumps
from unisono.comm.stacks import describe_call, own_frames


class Comparison:
    """Compares by a small reduction; `gather` returns the bytes of all ranks, a collective."""

    def __init__(self, gather: Callable[[bytes], list[bytes]]) -> None:
        self._gather = gather
        self._begun: tuple[str, str, torch.Tensor, Any] | None = None  # action, place, bounds, work

    def begin(self, action: str, place: str, device: torch.device) -> None:
        digest = digest_of(action)
        # One reduction yields both bounds: the least of the negated digests is the negated greatest.
        bounds = torch.tensor([digest, -digest], device=device)
        self._begun = action, place, bounds, dist.all_reduce(bounds, dist.ReduceOp.MIN, async_op=True)

    def finish(self) -> None:
        """CollectiveMismatchError, on all ranks, if they do not agree on what has begun."""
        if self._begun is None:
            return
        (action, place, bounds, work), self._begun = self._begun, None
        work.wait()
        least, negated_greatest = bounds.tolist()
        if least != -negated_greatest:
            # All ranks see the same bounds, so all of them enter this gather.
            found = self._gather(dumps((action, place or describe_call(own_frames()))))
            actions, places = zip(*map(pickle.loads, found), strict=True)
            raise mismatch_error(dict(enumerate(actions)), dict(enumerate(places)))
