"""Collectives on copies in main memory, for tensors that a transport does not support.

A process group does not support XLA tensors: gloo leaves them unchanged, without an error. And no thread may touch what
another records. So a rank's tensor is copied to main memory, and the result is copied back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from unisono.comm.operations import check_tensor
from unisono.protocols import Communicator, ReduceOp

C = TypeVar("C", bound=Communicator)


class ThroughHostCommunicator(Generic[C]):
    """A communicator for tensors anywhere, by way of `inner`, one for tensors in main memory. `settle` makes the rank's
    device execute what it has recorded, so that nothing is computed twice for the copy."""

    def __init__(self, inner: C, settle: Callable[[], None]) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self._settle = settle
        self.all_gather_object, self.broadcast_object = inner.all_gather_object, inner.broadcast_object
        self.barrier, self.announce = inner.barrier, inner.announce
        self.abort, self.leave = inner.abort, inner.leave

    @property
    def current(self) -> str | None:
        """The collective that this rank is in, if the inner communicator knows it."""
        return getattr(self.inner, "current", None)

    @property
    def progress(self) -> int:
        """The progress of this rank, if the inner communicator counts it."""
        return getattr(self.inner, "progress", 0)

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        host = self._copy_to_host(tensor, "all_reduce")
        return tensor.copy_(self.inner.all_reduce(host, op))

    @torch.no_grad()
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [each.to(tensor.device) for each in self.inner.all_gather(self._copy_to_host(tensor, "all_gather"))]

    @torch.no_grad()
    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        return self.inner.reduce_scatter(self._copy_to_host(tensor, "reduce_scatter"), op).to(tensor.device)

    @torch.no_grad()
    def all_to_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [each.to(tensor.device) for each in self.inner.all_to_all(self._copy_to_host(tensor, "all_to_all"))]

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        host = self._copy_to_host(tensor, "broadcast")
        return tensor.copy_(self.inner.broadcast(host, root))

    def _copy_to_host(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A copy in main memory; never the tensor itself, which must not change before the collective has succeeded."""
        check_tensor(tensor, name)
        if tensor.is_cpu:
            return tensor.detach().clone()
        self._settle()
        return tensor.detach().cpu()
