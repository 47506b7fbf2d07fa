"""Collectives with gradients: for losses that compare the samples of one rank with those of others.

Let L_s be the loss of rank s. The gradient that arrives at x on rank r is that of the *sum* of the ranks' losses,

    G_r  =  d (L_0 + ... + L_{R-1}) / d x_r

as in `torch.distributed.nn.functional`. So the backward pass of an `all_gather` is a `reduce_scatter` of the
gradients, and that of `all_reduce` an `all_reduce`. They are composed of the same functions, so gradients of gradients
are exact, too.

A prepared model, and `optimizer_step`, average the ranks' gradients. With x_r = f(theta, batch r) that gives

    1/R sum_r G_r dx_r/dtheta  =  d/dtheta (L_0 + ... + L_{R-1}) / R

the gradient of the mean of the ranks' losses. For CLIP's local loss (a rank's rows against all columns) this mean is
the loss of the global batch. If each rank computes the loss of the global batch, as for SimCLR, the mean is that loss:

    first, second = functional.all_gather_samples((model(x), model(augmented)))  # the ranks' rows, in rank order
    loss = nt_xent(first, second)  # the same on each rank
    accelerator.backward(loss)

This holds if the ranks' gradients count equally. If a batch is split unevenly, as the last one of an epoch may be, a
prepared model weights those of rank r by its fraction of the samples: right for a mean over the rank's own samples, but
not for gradients of all ranks' losses, so it is a ValueError. Then compute the loss of the global batch on each rank,
from the valid samples, and pass the same weight on all ranks:

    first, second = functional.all_gather_samples((model(x), model(augmented)), loader.valid_samples)
    accelerator.backward(nt_xent(first, second), weight=len(first) / world_size())

A backward pass is a collective: each rank must run it, for the same calls. Whether a tensor requires grad is compared
between the ranks in the forward pass, and an error names a rank that runs another backward pass.

*Threads:* a backward pass may run in a thread without a world; so the forward pass stores the communicator.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch

from unisono.comm.operations import Call, check_reduction, check_tensor
from unisono.protocols import Communicator
from unisono.report.timeline import REDUCE
from unisono.torch_private import disable_dynamo
from unisono.training.claims import Crossings
from unisono.training.collectives import announce_structure, check_samples, gather_samples
from unisono.tree import leaves
from unisono.world import World, current_world

LinearOp = Literal["sum", "mean"]
"""The reductions that have the same gradient on each rank."""


@disable_dynamo
def all_gather(x: torch.Tensor, dim: int = 0, world: World | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks along `dim`, as `unisono.all_gather`; differentiable.

    Args:
        x: of the same shape on each rank; without dimensions, it becomes a vector.

    Returns:
        A new tensor, `world_size` times as large along `dim`. The gradient of `x` is the sum over the ranks of their
        gradients for its part.

    Raises:
        TypeError: `x` is not a dense tensor.
        IndexError: it has no such dimension.
        CollectiveMismatchError: the ranks' shapes or types differ (`all_gather_samples` takes other numbers of rows),
            or `x` requires grad on some ranks only, or a peer called something else.
        BrokenWorldError: a peer failed or departed.
    """
    check_tensor(x, "functional.all_gather")
    call = Call.on("functional.all_gather", x, dim)
    # The communicator's parts are joined along dim 0, so `dim` is moved there and back.
    rows = x.movedim(dim, 0) if x.ndim else x.reshape(1)
    return _forward(_AllGather, call, world, rows).movedim(0, dim if x.ndim else 0)


@disable_dynamo
def all_gather_samples(batch: Any, valid_samples: int | None = None, dim: int = 0, world: World | None = None) -> Any:
    """Gather the samples of all ranks, as `unisono.all_gather_samples`; differentiable.

    Args:
        batch: a tensor, or any nesting of tensors, with samples along `dim`; their number may differ between the ranks.
        valid_samples: how many of them count, from the front; None takes all. The others get a gradient of zero.

    Returns:
        The same nesting; each tensor has all ranks' samples along `dim`.

    Raises:
        TypeError: something in the batch is not a tensor, or `valid_samples` is not an integer.
        ValueError: a tensor has fewer samples than that, or no such dimension; or their numbers differ and
            `valid_samples` is None.
        BrokenWorldError, CollectiveMismatchError: as for `all_gather`.
    """
    world = world or current_world()
    count = _num_samples(batch, dim) if valid_samples is None else valid_samples
    check_samples(batch, count, dim)

    def gather(padded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return all_gather(padded, dim, world).chunk(world.world_size, dim)

    announce_structure(f"all_gather_samples along {dim}", batch, world)
    return gather_samples(batch, count, dim, gather, world)


@disable_dynamo
def all_reduce(x: torch.Tensor, op: LinearOp = "sum", world: World | None = None) -> torch.Tensor:
    """Return the sum or mean over all ranks, a new tensor; differentiable.

    Args:
        x: any shape, the same on each rank.

    Returns:
        The reduced tensor. The gradient of `x` is the sum, or mean, of the ranks' gradients.

    Raises:
        ValueError: `op` is neither "sum" nor "mean".
        TypeError: `x` is not a dense tensor, or its type does not support the operation.
        BrokenWorldError, CollectiveMismatchError: as for `all_gather`.
    """
    if op not in get_args(LinearOp):
        raise ValueError(
            f"functional.all_reduce op={op!r} has no gradient here; choose 'sum' or 'mean', or reduce the value by "
            f"unisono.all_reduce(x.detach().clone(), {op!r})"
        )
    check_reduction(x, op, "functional.all_reduce")
    return _forward(_AllReduce, Call.on("functional.all_reduce", x, op), world, x, op)


def _num_samples(batch: Any, dim: int) -> int:
    """The number of samples of each tensor in the batch; 0 if none has the dimension, which `check_samples` refuses."""
    counts = {
        leaf.shape[dim] for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and -leaf.ndim <= dim < leaf.ndim
    }
    if len(counts) > 1:
        raise ValueError(f"the tensors have {sorted(counts)} samples along dim {dim}; pass valid_samples")
    return counts.pop() if counts else 0


class _Context(NamedTuple):
    """The communicator of a call, the rank's record of backward passes through such calls, and the call in words."""

    comm: Communicator
    crossings: Crossings
    call: str


def _forward(function: Any, call: Call, world: World | None, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    world = world or current_world()
    with world.timeline.loop().span(REDUCE):
        return _meet(function, _Context(world.comm, world.state.part(Crossings), str(call)), x, *arguments)


def _backward(function: Any, context: _Context, gradient: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Run a backward pass; without a timeline span, since this may be autograd's thread."""
    context.crossings.note()
    return _meet(function, context._replace(call=f"the gradient of {context.call}"), gradient, *arguments)


def _meet(function: Any, context: _Context, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Apply `function`, after the ranks have compared their calls: a backward pass of some ranks only would hang."""
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    context.comm.announce(f"{context.call} {'with' if is_recorded else 'without'} a gradient")
    found: torch.Tensor = function.apply(x, *arguments, context)
    return found


class _AllGather(torch.autograd.Function):
    """[n, ...] to [size n, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: _Context) -> torch.Tensor:
        ctx.context = context
        return torch.cat(context.comm.all_gather(x))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # The sum, since the gradient is that of the sum of the ranks' losses.
        return _backward(_ReduceScatter, ctx.context, gradient), None


class _ReduceScatter(torch.autograd.Function):
    """The sum, [size n, ...] to [n, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: _Context) -> torch.Tensor:
        ctx.context = context
        return context.comm.reduce_scatter(x, "sum")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _backward(_AllGather, ctx.context, gradient), None


class _AllReduce(torch.autograd.Function):
    """Any shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: LinearOp, context: _Context) -> torch.Tensor:
        ctx.op, ctx.context = op, context
        # A writable copy, since it works in place, and a gradient may be an expanded tensor.
        return context.comm.all_reduce(x.detach().clone(memory_format=torch.contiguous_format), op)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _backward(_AllReduce, ctx.context, gradient, ctx.op), None, None
