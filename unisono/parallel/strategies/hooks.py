"""torch's communication hooks for DistributedDataParallel, by name, applied to weighted gradients.

torch's hooks compute the mean over the ranks. If rank r's gradient is first multiplied by scale_r * size, the result is
the sum over r of scale_r g_r, in each of the formats:

    None              unchanged
    "fp16", "bf16"    in half the bytes; fp16 overflows above 65504, to an infinite gradient on every rank
    "powersgd"        as low-rank factors; their error is added in the next step

*Threads:* a backward pass runs the hook in its own thread, one bucket after the other.

Invariant: all buckets of a backward pass are multiplied by the same factor, which is computed for the first one: DDP
sends buckets in the order of their indices, from 0.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the classes themselves.

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.selection import begin_average
from unisono.parallel.gradients import scale_in_place
from unisono.torch_private import GradBucket

Sent = torch.futures.Future[torch.Tensor]


def attach_hook(
    ddp: DistributedDataParallel,
    name: str | None,
    scale: Callable[[], float],
    options: Mapping[str, Any] | None = None,
    *,
    finish: Callable[[], None] | None = None,
) -> None:
    """Make this DDP reduce gradients to the sum over the ranks of `scale() * gradient`, in the named format.

    Args:
        ddp: without a hook yet.
        name: see above.
        scale: returns this rank's factor; called once in each reducing backward pass.
        options: for "powersgd" those of torch's PowerSGDState.
        finish: called when the last bucket of a backward pass is sent.

    Raises:
        ValueError: the hook or option does not exist, or an option's value or the model is unsuitable. In a backward
            pass: the hooks of this torch do not support complex gradients.
    """
    check_hook(name)
    _check_options(name, options or {})
    group = ddp.process_group  # `weighted` must not reference the DDP, whose C++ part references it
    size: int = group.size()
    hook = _HOOKS[name]
    state: Any = group
    if name == "powersgd":
        _check_real(ddp)
        state = PowerSGDState(group, **(options or {}))
    factor = 1.0

    def weighted(_: None, bucket: GradBucket) -> Sent:
        nonlocal factor
        if bucket.index() == 0:
            factor = scale() * size
        gradients = bucket.buffer()
        if gradients.is_complex():
            raise ValueError(  # newer versions put pairs of real numbers into the bucket
                f"torch {torch.__version__} reduces complex gradients wrongly after a communication hook; use a newer "
                "one, or real parameters and torch.view_as_complex in forward()"
            )
        # Before the hook: the NaN of a rank without samples must be zero when the ranks' gradients are added.
        if factor != 1:
            scale_in_place(gradients, factor)
        is_dense = gradients.layout is torch.strided
        sent = begin_average(gradients, group) if is_dense and name is None else None
        if sent is None:
            # Half precision and low ranks support only dense gradients; a sparse one is sent uncompressed.
            sent = hook(state, bucket) if is_dense else allreduce_hook(group, bucket)
        # Sent, not reduced: DDP waits for the results when the backward pass ends.
        if finish is not None and bucket.is_last():
            finish()
        return sent

    ddp.register_comm_hook(None, weighted)


def check_hook(name: Any) -> None:
    """Check that the hook exists. Raises ValueError."""
    if name not in _HOOKS:
        raise ValueError(f"comm_hook={name!r} does not exist; choose one of {', '.join(map(repr, _HOOKS))}")


def _check_options(name: str | None, options: Mapping[str, Any]) -> None:
    allowed = list(inspect.signature(PowerSGDState).parameters)[1:] if name == "powersgd" else []  # without the group
    unknown = [option for option in options if option not in allowed]
    if unknown:
        has = f"has the options {', '.join(allowed)}" if allowed else "has no options"
        raise ValueError(f"comm_hook={name!r} got the option {unknown[0]!r}; it {has}")


def _check_real(ddp: DistributedDataParallel) -> None:
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"comm_hook='powersgd' supports real gradients only, and the parameter {name!r} is {parameter.dtype}; "
                "use comm_hook=None, 'fp16' or 'bf16', which send complex numbers as pairs of real ones"
            )


def _power_sgd_in_order(state: PowerSGDState, bucket: GradBucket) -> Sent:
    """Send one bucket at a time.

    torch's hook issues its second and third collective when the previous one has completed. With gloo a thread of the
    process group issues them, so the collectives of two buckets could interleave differently on different ranks. With
    NCCL, all of them are already enqueued on their stream.
    """
    sent: Sent = powerSGD_hook(state, bucket)
    if not sent.done():
        sent.wait()
    return sent


_HOOKS: dict[str | None, Callable[[Any, GradBucket], Sent]] = {
    None: allreduce_hook,
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
    "powersgd": _power_sgd_in_order,
}
