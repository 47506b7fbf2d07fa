"""Ranks as threads of one process, or a plain process, which is one such rank: collectives through shared memory.

Tensors are combined by the last thread to arrive. In an all_reduce of large ones each thread does its part on the
tensors of all ranks, between two meetings: until the second no rank may modify its own.

An accelerator's tensors are combined by work that the last thread submits, on its own streams. So each rank provides a
mark after its work; the combining follows all marks, and each rank's later work follows the combining. No thread waits
on the host. A thread that fails between the two meetings breaks the world, so no rank has a partial result.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch

from unisono.comm.folding import SharedFold, all_reduction, fold
from unisono.comm.meeting import Meeting
from unisono.comm.operations import Call, check_reduction, check_root, check_scatter, check_tensor
from unisono.comm.pickling import dumps
from unisono.protocols import Backend, ReduceOp

R = TypeVar("R")


class ThreadCommunicator:
    """One replica thread's place at a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._purpose = ""  # of the next call
        self._num_begun = 0
        self._streams: tuple[Backend, torch.device] | None = None

    @classmethod
    def group(cls, size: int, timeout: timedelta = timedelta(minutes=30)) -> list[ThreadCommunicator]:
        """Create a new meeting and the communicators of its ranks."""
        meeting = Meeting(size, timeout)
        return [cls(meeting, rank) for rank in range(size)]

    @staticmethod
    def meet_anew(group: Sequence[ThreadCommunicator], timeout: timedelta = timedelta(minutes=30)) -> None:
        """Give a group that is not in use a new meeting, which no rank has left and which is not broken."""
        meeting = Meeting(len(group), timeout)
        for each in group:
            each._meeting = meeting

    def follow_streams(self, backend: Backend, device: torch.device) -> None:
        """Preserve the order of work on the rank's device, whichever streams the threads use."""
        self._streams = backend, device

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op)
        call = Call.on("all_reduce", tensor, op)
        begun = self.meet(call, tensor, lambda all_: all_reduction(all_, op))
        if isinstance(begun, SharedFold):
            try:
                begun.work()
            except BaseException as error:
                self.abort(error)
                raise
            self.meet(call, None, lambda all_: None)  # when all have done their part
        elif begun is not None:
            tensor.copy_(begun)
        return tensor

    @torch.no_grad()
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_gather")
        # Clones, because after this meeting the ranks may modify their own tensors.
        shown = self.meet(Call.on("all_gather", tensor), tensor, lambda all_: [each.clone() for each in all_])
        # All ranks get the same clones, so each copies again.
        return [each.to(tensor.device, copy=True) for each in shown]

    @torch.no_grad()
    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op, "reduce_scatter")
        check_scatter(tensor, self.size)
        found = self.meet(Call.on("reduce_scatter", tensor, op), tensor, lambda all_: fold(all_, op))
        # The result is one object for all ranks, so each copies its part.
        part: torch.Tensor = found.chunk(self.size)[self.rank]
        return part.to(tensor.device, copy=True)

    @torch.no_grad()
    def all_to_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_to_all")
        check_scatter(tensor, self.size, "all_to_all")
        shown = self.meet(Call.on("all_to_all", tensor), tensor, lambda all_: [each.clone() for each in all_])
        # As in `all_gather`.
        return [each.chunk(self.size)[self.rank].to(tensor.device, copy=True) for each in shown]

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_tensor(tensor, "broadcast")
        check_root(root, self.size)
        # As in `all_gather`: after this meeting the root may modify its tensor.
        return tensor.copy_(self.meet(Call.on("broadcast", tensor, root), tensor, lambda all_: all_[root].clone()))

    def all_gather_object(self, value: Any) -> list[Any]:
        return [pickle.loads(data) for data in self.meet(Call("all_gather_object"), dumps(value), list)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        data = dumps(value) if self.rank == root else None
        return pickle.loads(self.meet(Call("broadcast_object", argument=root), data, lambda all_: all_[root]))

    def barrier(self) -> None:
        self.meet(Call("barrier"), None, lambda all_: None)

    def announce(self, purpose: str) -> None:
        self._purpose = purpose

    def num_begun(self) -> int:
        """How many collectives this rank has begun."""
        return self._num_begun

    def abort(self, cause: BaseException) -> None:
        self._meeting.abort(cause, self.rank)

    def leave(self) -> None:
        announced, self._purpose = self._purpose, ""
        self._meeting.leave(self.rank, announced)

    def meet(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Contribute `value`, and return the last thread's combination of all values: see `Meeting.exchange`."""
        self._num_begun += 1
        if self._purpose:
            call, self._purpose = replace(call, purpose=self._purpose), ""
        marked = None
        if self._streams is not None and isinstance(value, torch.Tensor):
            backend, device = self._streams
            marked = backend, device, backend.mark(device)  # after what this thread has submitted to the rank's device
        result, marks = self._meeting.exchange(self.rank, call, (value, marked), partial(_combine_with_marks, combine))
        for backend, mark in marks:
            backend.wait_ready(mark)
        return result


def _combine_with_marks(combine: Callable[[list[Any]], R], given: list[Any]) -> tuple[R, list[tuple[Backend, Any]]]:
    """Return the combined values, and marks after the combining: one per device, for every rank, which may use all of
    them. There are none where a family has nothing to follow."""
    marked = [marked for _, marked in given if marked is not None and marked[-1] is not None]
    for backend, _, mark in marked:
        backend.wait_ready(mark)
    result = combine([value for value, _ in given])
    # On streams, the mark carries the result, so that `wait_ready` records each rank's use of its memory.
    return result, [(backend, backend.mark(device, result)) for backend, device, _ in marked]
