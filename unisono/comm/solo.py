"""The world of one rank: the same rules, but no peers to wait for."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from unisono.comm.operations import (
    Announcement,
    Call,
    Entry,
    broken,
    check_reduction,
    check_root,
    check_scatter,
    check_tensor,
    left,
)
from unisono.pickling import dumps
from unisono.protocols import ReduceOp


class SoloCommunicator:
    """A communicator of size 1."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self._has_left = False

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op)
        self._check(Call.on("all_reduce", tensor, op))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_gather")
        self._check(Call.on("all_gather", tensor))
        return [tensor.detach().clone()]

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op, "reduce_scatter")
        check_scatter(tensor, self.size)
        self._check(Call.on("reduce_scatter", tensor, op))
        return tensor.detach().clone()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_tensor(tensor, "broadcast")
        check_root(root, self.size)
        self._check(Call.on("broadcast", tensor, root))
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        data = dumps(value)
        self._check(Call("all_gather_object"))
        return [pickle.loads(data)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        data = dumps(value)
        self._check(Call("broadcast_object", argument=root))
        return pickle.loads(data)

    def barrier(self) -> None:
        self._check(Call("barrier"))

    def announce(self, purpose: str) -> None:
        self._check(Announcement(purpose))

    def abort(self, cause: BaseException) -> None:
        if self._failure is None:
            self._failure = cause

    def leave(self) -> None:
        self._has_left = True

    def _check(self, call: Entry) -> None:
        if self._has_left:
            raise left(self.rank, call)
        if self._failure is not None:
            message = f"rank 0 failed with {type(self._failure).__name__}: {self._failure}"
            raise broken(self.rank, call, message) from self._failure
