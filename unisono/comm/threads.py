"""Ranks as threads of one process: collectives through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch

from unisono.comm.meeting import Meeting
from unisono.comm.operations import Call, check_reduction, check_root, check_scatter, check_tensor, pack, unpack
from unisono.protocols import ReduceOp

_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda total, other: torch.minimum(total, other, out=total),
    "max": lambda total, other: torch.maximum(total, other, out=total),
}


class ThreadCommunicator:
    """One replica thread's seat at a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    @classmethod
    def group(cls, size: int, timeout: timedelta = timedelta(minutes=30)) -> list[ThreadCommunicator]:
        """A new meeting and the communicators of its ranks."""
        meeting = Meeting(size, timeout)
        return [cls(meeting, rank) for rank in range(size)]

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op)
        total = self._exchange(Call.on("all_reduce", tensor, op), tensor, lambda all_: _fold(all_, op))
        return tensor.copy_(total)

    @torch.no_grad()
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_gather")
        copies = self._exchange(Call.on("all_gather", tensor), tensor, lambda all_: [each.clone() for each in all_])
        return [each.to(tensor.device, copy=True) for each in copies]

    @torch.no_grad()
    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op, "reduce_scatter")
        check_scatter(tensor, self.size)
        total = self._exchange(Call.on("reduce_scatter", tensor, op), tensor, lambda all_: _fold(all_, op))
        part: torch.Tensor = total.chunk(self.size)[self.rank]
        return part.to(tensor.device, copy=True)

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_tensor(tensor, "broadcast")
        check_root(root, self.size)
        source = self._exchange(Call.on("broadcast", tensor, root), tensor, lambda all_: all_[root].clone())
        return tensor.copy_(source)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [unpack(data) for data in self._exchange(Call("all_gather_object"), pack(value), list)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        data = pack(value) if self.rank == root else None
        return unpack(self._exchange(Call("broadcast_object", argument=root), data, lambda all_: all_[root]))

    def barrier(self) -> None:
        self._exchange(Call("barrier"), None, lambda all_: None)

    def abort(self, cause: BaseException) -> None:
        self._meeting.abort(cause, self.rank)

    def leave(self) -> None:
        self._meeting.leave(self.rank)

    def _exchange(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        return self._meeting.exchange(self.rank, call, value, combine)


def _fold(tensors: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce in rank order, so that a repeated run gives the same bits."""
    first = tensors[0].detach().clone()
    total = reduce(lambda total, other: _FOLDS[op](total, other.to(total.device)), tensors[1:], first)
    return total.div_(len(tensors)) if op == "mean" else total
