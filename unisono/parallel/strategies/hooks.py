"""torch's communication hooks for DistributedDataParallel, by name, applied to weighted gradients.

torch's hooks compute the mean over the ranks. If rank r's gradient is first multiplied by scale_r * size, the result is
the sum over r of scale_r g_r, in each of the formats:

    None              unchanged
    "fp16", "bf16"    in half the bytes; fp16 overflows above 65504, to an infinite gradient on every rank
    "powersgd"        as low-rank factors; their error is added in the next step
    "post_local_sgd"  unchanged for the first steps; then only within each machine, and the parameters are averaged
                      every n steps

*Threads:* a backward pass runs the hook in its own thread, one bucket after the other.

Invariants:
1. All buckets of a backward pass are multiplied by the same factor, which is computed for the first one: DDP sends
   buckets in the order of their indices, from 0.
2. With post-local SGD each rank, or machine, steps on its weighted gradients: after one step of plain SGD, the mean of
   the parameters equals the result of a step on the weighted sum.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the classes themselves.

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel.gradients import scale_in_place
from unisono.torch_private import GradBucket
from unisono.world import World, current_world

POST_LOCAL_SGD = "post_local_sgd"

Sent = torch.futures.Future[torch.Tensor]


class _Sending(NamedTuple):
    """One of torch's hooks, its state, and the averager to call after each step, or None."""

    hook: Callable[[Any, GradBucket], Sent]
    state: Any
    averager: PeriodicModelAverager | None = None


def attach_hook(
    ddp: DistributedDataParallel,
    name: str | None,
    scale: Callable[[], float],
    options: Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
    finish: Callable[[], None] | None = None,
) -> PeriodicModelAverager | None:
    """Make this DDP reduce gradients to the sum over the ranks of `scale() * gradient`, in the named format.

    Args:
        ddp: without a hook yet.
        name: one of `hook_names()`.
        scale: returns this rank's factor; called once in each reducing backward pass.
        options: "powersgd" has those of torch's PowerSGDState, "post_local_sgd" has `start_localSGD_iter` (100: steps
            before it is local), `period` (4: steps between averages) and `post_local_gradient_allreduce` (within each
            machine; None does so if there are several machines, with several ranks each).
        world: None uses the current one.
        finish: called when the last bucket of a backward pass is sent.

    Returns:
        For "post_local_sgd" the averager, whose `average_parameters` is to be called after each step; otherwise None.

    Raises:
        ValueError: the hook or option does not exist, or an option's value or the model is unsuitable. In a backward
            pass: the hooks of this torch do not support complex gradients.
    """
    if name not in _HOOKS:
        raise ValueError(f"comm_hook={name!r} does not exist; choose one of {', '.join(map(repr, _HOOKS))}")
    make, allowed = _HOOKS[name]
    options = dict(options or {})
    _check_options(name, options, allowed)
    if name == "powersgd":
        _check_real(ddp)
    group = ddp.process_group  # `weighted` must not reference the DDP, whose C++ part references it
    size: int = group.size()
    hook, state, averager = make(group, world or current_world(), **options)
    factor = 1.0

    def weighted(_: None, bucket: GradBucket) -> Sent:
        nonlocal factor
        if bucket.index() == 0:
            factor = scale() * size
        gradients = bucket.buffer()
        if gradients.is_complex():
            _refuse_complex()
        # Before the hook: the NaN of a rank without samples must be zero when the ranks' gradients are added.
        scale_in_place(gradients, factor)
        # Half precision and low ranks support only dense gradients; a sparse one is sent uncompressed.
        is_dense = gradients.layout is torch.strided or name == "post_local_sgd"
        sent = hook(state, bucket) if is_dense else allreduce_hook(group, bucket)
        # Sent, not reduced: DDP waits for the results when the backward pass ends.
        if finish is not None and bucket.is_last():
            finish()
        return sent

    ddp.register_comm_hook(None, weighted)
    return averager


def hook_names() -> list[str | None]:
    """The names that `attach_hook` supports."""
    return list(_HOOKS)


def _check_options(name: str | None, options: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
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


def _refuse_complex() -> NoReturn:
    """Refuse a complex bucket; newer versions of torch put pairs of real numbers into it instead."""
    raise ValueError(
        f"torch {torch.__version__} reduces complex gradients wrongly after a communication hook; use a newer one, or "
        "real parameters and torch.view_as_complex in forward()"
    )


def _simple(hook: Callable[[Any, GradBucket], Sent], group: dist.ProcessGroup, world: World) -> _Sending:
    return _Sending(hook, group)


def _power_sgd(group: dist.ProcessGroup, world: World, **options: Any) -> _Sending:
    return _Sending(_power_sgd_in_order, PowerSGDState(group, **options))


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


def _post_local_sgd(
    group: dist.ProcessGroup,
    world: World,
    start_localSGD_iter: int = 100,  # noqa: N803 - as torch calls it
    period: int = 4,
    post_local_gradient_allreduce: bool | None = None,
) -> _Sending:
    sizes = world.comm.all_gather_object(world.local_world_size)
    local = max(sizes)
    if post_local_gradient_allreduce is None:
        # On a single machine the subgroup would be the whole world, and nothing would be local.
        post_local_gradient_allreduce = 1 < local < world.world_size
    subgroup = None
    if post_local_gradient_allreduce:
        if min(sizes) < local:
            raise ValueError(
                "post_local_gradient_allreduce needs machines with equally many ranks, and the ranks' machines have "
                f"{sizes}; pass post_local_gradient_allreduce=False"
            )
        # A collective: each rank creates all groups. They are of consecutive ranks, as those of a machine are.
        subgroup, _ = dist.new_subgroups(local)
    averager = PeriodicModelAverager(period, start_localSGD_iter, group)
    state = PostLocalSGDState(group, subgroup, start_localSGD_iter, post_local_gradient_allreduce)
    return _Sending(post_localSGD_hook, state, averager)


def _options_of(function: Callable[..., Any], *own: str) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name not in own)


_HOOKS: dict[str | None, tuple[Callable[..., _Sending], tuple[str, ...]]] = {
    None: (partial(_simple, allreduce_hook), ()),
    "fp16": (partial(_simple, fp16_compress_hook), ()),
    "bf16": (partial(_simple, bf16_compress_hook), ()),
    "powersgd": (_power_sgd, _options_of(PowerSGDState, "process_group")),
    POST_LOCAL_SGD: (_post_local_sgd, _options_of(_post_local_sgd, "group", "world")),
}
