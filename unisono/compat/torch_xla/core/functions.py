"""`torch_xla.core.functions`: collectives with gradients.

*Threads:* a backward pass may run in a thread without a world, so what it needs is stored in the forward pass; only the
gradients of its own replica pass through it.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono import current_world
from unisono.building_blocks import SyncBatchNorm as NativeBatchNorm
from unisono.building_blocks import check_choice
from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core import collectives
from unisono.compat.torch_xla.core.collectives import Groups

__getattr__ = left_out(__name__)


class AllReduce(torch.autograd.Function):
    """See `all_reduce`."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, reduce_type: str, scale: float, groups: Groups) -> torch.Tensor:
        ctx.scale = scale
        return collectives.all_reduce(reduce_type, value, scale, groups)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None, None, None


class AllGather(torch.autograd.Function):
    """See `all_gather`."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.rank, ctx.dim, ctx.is_scalar = current_world().rank, dim, value.ndim == 0
        ctx.size = 1 if ctx.is_scalar else value.shape[dim]
        return collectives.all_gather(value, dim)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        own = grad[ctx.rank] if ctx.is_scalar else grad.narrow(ctx.dim, ctx.rank * ctx.size, ctx.size)
        return own.clone(), None


def all_reduce(reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Groups = None) -> torch.Tensor:
    """`xla_model.all_reduce` of a tensor, for sums only (ValueError), with a gradient: that of this replica's own part,
    times `scale`; it is not reduced."""
    check_choice(reduce_type, "reduce_type", collectives.REDUCE_SUM)
    return AllReduce.apply(value, reduce_type, scale, groups)  # type: ignore[no-any-return]


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`xla_model.all_gather`, with a gradient: this replica's part of the result's gradient."""
    return AllGather.apply(value, dim)  # type: ignore[no-any-return]


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """`W @ x`, N x M, for a matrix `W` of which each replica has K columns, `w` (N x K), and an `x` of its own, (K *
    world size) x M; in `split` equal parts along M, which bounds the memory. ValueError if the shapes do not fit."""
    world = current_world()
    if x.shape[0] != w.shape[1] * world.world_size or x.shape[1] % split:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit w of shape {tuple(w.shape)} on {world.world_size} replicas with "
            f"split={split}; pass {w.shape[1] * world.world_size} rows, and columns that split divides"
        )
    results = []
    for part in torch.split(x, x.shape[1] // split, dim=1):
        everyone = all_gather(part, dim=1).narrow(0, world.rank * w.shape[1], w.shape[1])
        product = all_reduce(collectives.REDUCE_SUM, w @ everyone)
        results.append(product.narrow(1, world.rank * part.shape[1], part.shape[1]))
    return torch.cat(results, dim=1)


class SyncBatchNorm(NativeBatchNorm):
    """Batch normalisation over the samples of all replicas, for inputs of 2 to 5 dimensions; in evaluation, over none.

    Equivalent to one BatchNorm over all of them. All replicas must call it, in the forward and the backward pass.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        samples, comm = float(len(input)), current_world().comm
        self.ranks = (comm, lambda: samples) if comm.size > 1 else None
        return super().forward(input)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if not 2 <= input.ndim <= 5:
            raise ValueError(f"SyncBatchNorm got an input of {input.ndim} dimensions; pass one of 2 to 5")
