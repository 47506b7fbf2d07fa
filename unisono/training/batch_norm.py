"""Batch normalisation over the samples of all ranks: the layer computes what one device would, on the global batch.

The layer of a rank sees n_r of the N values of a channel. Its mean and its sum of squared deviations M_r are combined
as Chan, Golub and LeVeque do, which subtracts no large numbers:

    mean  =  sum over r of (n_r / N) mean_r        M  =  sum over r of M_r + n_r (mean_r - mean)^2

A mean is sent as two numbers, the rounded value and the rounding error, so that the difference of two large means is
accurate.

After this layer each sample influences the outputs of all ranks. The optimizer step scales a rank's gradients by its
weight s_r *after* the backward pass, so that the gradient of the global loss is the sum over r of s_r g_r. A rank must
hold dx_r with s_r dx_r = d(global loss) / dx_r. With y = weight * z + bias, z the normalised input, and dy_r the
gradient of the rank's own loss, that is

    dx_r  =  weight / std * (dy_r - (A + z B) / (N s_r))
    A  =  sum over r of s_r sum(dy_r)              B  =  sum over r of s_r sum(dy_r z)

The samples of a rank with weight 0 in the forward pass only repeat others: they add nothing to the statistics, its
outputs use the statistics of the others, and its input has no gradient. If the user gives the loss the weight 0 only
afterwards, the samples are in the statistics, and s_r is a tiny number instead (`Passes.weight`). The gradients of
weight and bias are the rank's own and scaled like all others.

*Threads:* the rank's own, and the autograd thread that works for it. Backward does not use the ambient world.

Invariants:
1. In training there is one collective in the forward pass and one in the backward pass, if the input needs a gradient.
2. All ranks end with the same running statistics, bit by bit, since they compute them from the same numbers.
3. A rank with too few samples learns the global count before it raises an error, so all ranks raise or none does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from unisono.protocols import Communicator
from unisono.torch_private import CHECK_INPUT_DIM, BatchNorm, disable_dynamo
from unisono.training.claims import NEGLIGIBLE
from unisono.world import World


class _Statistics(NamedTuple):
    """Statistics of all ranks' values, per channel: their number, the mean, the sum of squared deviations."""

    number: torch.Tensor
    mean: torch.Tensor
    deviations: torch.Tensor


class SyncBatchNorm(BatchNorm):
    """The mixin that `synchronize_batch_norm` adds to a BatchNorm; there is one class for each kind of BatchNorm.

    In evaluation, alone in its world, copied or unpickled, the layer behaves as the original BatchNorm.

    Attributes:
        ranks: those over whose samples it normalises, and what weighs them; None for the rank's own alone.
    """

    ranks: tuple[Communicator, Callable[[], float]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ranks": None}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.ranks is None:
            return super().forward(input)
        getattr(self, CHECK_INPUT_DIM)(input)
        return _normalize(self, *self.ranks, input)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d): ...


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d): ...


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d): ...


_SYNCHRONIZED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def synchronize_batch_norm(module: nn.Module, world: World, weigh: Callable[[], float]) -> nn.Module:
    """Make every BatchNorm1d, 2d and 3d of a module normalise over the samples of all ranks.

    Each layer remains the same object, with its parameters, buffers, hooks and settings, and an instance of its class.
    A layer that is already synchronised is reassigned to `world`. Other kinds of normalisation are left unchanged. One
    that has not received its first batch (LazyBatchNorm), or has a user-defined class, is a TypeError.

    Args:
        world: the ranks whose layers communicate; in training, every rank must call the layers in the same order.
        weigh: returns the factor that will scale this rank's gradients, up to a factor common to all ranks. Called in
            each forward pass in training, where 0 means that the rank's samples only repeat others, and in its backward
            pass.
    """
    layers = {name: each for name, each in module.named_modules() if isinstance(each, BatchNorm)}
    # All layers are checked before the first is changed.
    for name, layer in layers.items():
        if type(layer) not in _SYNCHRONIZED and not isinstance(layer, SyncBatchNorm):
            raise TypeError(
                f"synchronize_batch_norm converts {', '.join(each.__name__ for each in _SYNCHRONIZED)}, but {name!r} "
                f"is a {type(layer).__module__}.{type(layer).__name__}; use a plain one there (a lazy one becomes "
                "plain when the model is called with a batch)"
            )
    for layer in layers.values():
        layer.__class__ = _SYNCHRONIZED.get(type(layer), type(layer))
        assert isinstance(layer, SyncBatchNorm)
        layer.ranks = (world.comm, weigh) if world.comm.size > 1 else None
    return module


@disable_dynamo
def _normalize(
    layer: SyncBatchNorm, comm: Communicator, weigh: Callable[[], float], input: torch.Tensor
) -> torch.Tensor:
    """The layer's output in training. Not traced by torch.compile, since it contains collectives."""
    share = float(weigh())
    found = _gather_statistics(input.detach(), comm, share)
    _update_running(layer, found)
    # The weight may change until the backward pass. Whether the batch counts may not: its statistics are left out
    # already.
    weigh = weigh if share else float
    output: torch.Tensor = _Normalize.apply(input, layer.weight, layer.bias, found, layer.eps, comm, weigh)
    return output


@torch.no_grad()
def _gather_statistics(input: torch.Tensor, comm: Communicator, share: float) -> _Statistics:
    """Exchange statistics with the other ranks; ValueError if all together have fewer than two values per channel."""
    own = input.numel() // max(input.shape[1], 1) if share else 0
    # A rank whose samples do not count sends zeros: it has to take part, and NaN would spoil the statistics of all.
    wide = input.dtype if input.dtype == torch.float64 else torch.float32  # for sums
    sent = torch.zeros(4, input.shape[1], dtype=wide, device=input.device)
    if own:
        sent[0] = own
        sent[1:] = _describe(input.to(sent.dtype), own)
    table = torch.stack(comm.all_gather(sent))
    numbers, means, rests, deviations = table.unbind(1)
    number = numbers[:, :1].sum()  # equal in all channels
    # `own` first: a rank with two values knows the answer, and reading `number` would wait for the device.
    if own < 2 and number < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(number)} on all {comm.size} ranks "
            f"together, input size {list(input.shape)} on rank {comm.rank}"
        )
    parts = numbers / number
    # Relative to a rough mean the ranks' means are small numbers, whose sum is accurate.
    rough = (parts * means).sum(0)
    offsets = (means - rough) + rests
    offset = (parts * offsets).sum(0)
    return _Statistics(number, rough + offset, (deviations + numbers * (offsets - offset).square()).sum(0))


def _describe(input: torch.Tensor, number: int) -> torch.Tensor:
    """Per channel: the mean, its rounding error, and the sum of squared deviations from their total."""
    over = [dim for dim in range(input.ndim) if dim != 1]
    mean = input.mean(over)
    centred = input - _per_channel(mean, input)
    rest = centred.mean(over)
    return torch.stack([mean, rest, centred.square_().sum(over) - number * rest.square()])


@torch.no_grad()
def _update_running(layer: SyncBatchNorm, found: _Statistics) -> None:
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    layer.num_batches_tracked.add_(1)
    step = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(found.mean.to(layer.running_mean.dtype), step)
    # Unbiased, as in torch.
    layer.running_var.lerp_((found.deviations / (found.number - 1)).to(layer.running_var.dtype), step)


class _Normalize(torch.autograd.Function):
    """The output from the statistics of all ranks, with its gradients; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        found: _Statistics,
        eps: float,
        comm: Communicator,
        weigh: Callable[[], float],
    ) -> torch.Tensor:
        variance = found.deviations / found.number
        ctx.save_for_backward(input, weight, found.number, found.mean, variance)
        ctx.eps, ctx.comm, ctx.weigh = eps, comm, weigh
        weight, bias = (None if each is None else each.to(variance.dtype) for each in (weight, bias))
        return F.batch_norm(input, found.mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, number, mean, variance = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a gradient with a graph of its own (create_graph=True) goes through BatchNorm over all ranks, which "
                "has no second derivative; use GroupNorm or InstanceNorm there, or leave out sync_batchnorm=True"
            )
        scale = torch.rsqrt(variance + ctx.eps)
        both = (each.to(scale.dtype) for each in (gradient, input))  # not every device family supports mixed types here
        # Computed even if weight and bias are frozen, since the input's gradient is made from these sums.
        _, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            *both, None, None, None, mean, scale, True, ctx.eps, [False, True, True]
        )  # the sums of dy z and of dy
        for_input = None
        if ctx.needs_input_grad[0]:
            share = float(ctx.weigh())  # called now, since the weight of a batch may come with its loss
            is_divisor = share > (NEGLIGIBLE if input.dtype is torch.float16 else 0)
            if not is_divisor and ctx.weigh is not float:
                raise ValueError(
                    "this rank's loss has weight=0, but its rows are in BatchNorm's statistics over all ranks, and the "
                    f"other ranks' losses send gradients through them that {input.dtype} cannot hold, or that no "
                    "output of the model shows; use mixed_precision='bf16', or leave out sync_batchnorm=True"
                )
            sums = torch.stack([for_bias, for_weight])
            sums = sums * share if share else torch.zeros_like(sums)  # zeros, regardless of the loss
            ctx.comm.all_reduce(sums)
            gain = scale if weight is None else scale * weight
            for_input = _input_gradient(gradient, input, mean, scale, gain, sums / number, share)
        # The gradients of weight and bias stay the rank's own: like all others, they are weighted and summed in the
        # step.
        own = for_weight if ctx.needs_input_grad[1] else None, for_bias if ctx.needs_input_grad[2] else None
        return for_input, *own, None, None, None, None


def _input_gradient(
    gradient: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    gain: torch.Tensor,
    means: torch.Tensor,
    share: float,
) -> torch.Tensor:
    """`gain * (gradient - (A + z B) / (N s))` with `means` A / N and B / N, and z the input, shifted and scaled."""
    if not share:
        return torch.zeros_like(input)
    shift, slope = gain * means / share
    slope = slope * scale
    found = torch.addcmul(_per_channel(slope * mean - shift, input), input, _per_channel(-slope, input))
    return found.addcmul_(gradient, _per_channel(gain, input)).to(input.dtype)


def _per_channel(channels: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A value per channel, in a shape that broadcasts with the input."""
    return channels.view(1, -1, *(1 for _ in input.shape[2:]))
