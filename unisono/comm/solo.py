"""The world of one rank: the same law, nobody to wait for."""

from __future__ import annotations

from typing import Any

import torch

from unisono.comm.operations import check_reduction, check_root, check_scatter, check_tensor, pack, unpack
from unisono.errors import BrokenWorldError
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
        self._check()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        check_tensor(tensor, "all_gather")
        self._check()
        return [tensor.detach().clone()]

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op, "reduce_scatter")
        check_scatter(tensor, self.size)
        self._check()
        return tensor.detach().clone()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_tensor(tensor, "broadcast")
        check_root(root, self.size)
        self._check()
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        self._check()
        return [unpack(pack(value))]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        self._check()
        return unpack(pack(value))

    def barrier(self) -> None:
        self._check()

    def abort(self, cause: BaseException) -> None:
        self._failure = self._failure or cause

    def leave(self) -> None:
        self._has_left = True

    def _check(self) -> None:
        if self._failure is not None:
            raise BrokenWorldError("this world of one was aborted") from self._failure
        if self._has_left:
            raise BrokenWorldError("rank 0 has left this world of one")
