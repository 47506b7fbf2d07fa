"""Find the first parameter whose gradient is not finite, and its rank.

The norm of what each rank adds to the sum is computed where the gradients are flat already, for a bucket at once. If
the sum of these over the ranks is small, all gradients are finite; only otherwise they are searched. (Not the largest
value: the maximum of XLA passes over NaN.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch.nn.utils import get_total_norm

from unisono.comm.operations import HOST, name_ranks
from unisono.errors import NonFiniteGradientError
from unisono.parallel.gradients import is_sparse, values_of
from unisono.parallel.parameter_names import name_of
from unisono.parallel.strategies.sharded import is_distributed
from unisono.world import World

_SAFE = 1e4  # a sum below it has not overflowed anywhere, not even in a hook that sends float16


def check_finite(parameters: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], world: World) -> None:
    """Raise on every rank if a gradient is not finite on one. A collective; waits for the device once.

    Args:
        parameters: the parameters, with reduced gradients.
        norms: those of this rank's part of all these gradients, before the reduction; empty if they were reduced
            otherwise, or not at all.

    Raises:
        NonFiniteGradientError: a gradient is not finite.
    """
    held = [(each, each.grad) for each in parameters if each.grad is not None]
    has_all = bool(norms) and not any(is_sparse(gradient) for _, gradient in held)
    if not has_all:
        parts = [values_of(gradient.to_local() if is_distributed(gradient) else gradient) for _, gradient in held]
        norms = [*norms, get_total_norm([each for each in parts if each.numel()])]
    own = _norm(norms, world)
    if world.comm.all_reduce(torch.tensor(own, dtype=torch.float64, device=HOST)).item() < _SAFE:
        return
    bad = next((each for each, gradient in reversed(held) if not _is_finite(gradient)), None)  # as backward passes go
    seen = world.comm.all_gather_object((not math.isfinite(own), "" if bad is None else name_of(bad, parameters)))
    if not (name := next((name for _, name in seen if name), "")):
        return
    ranks = [rank for rank, (is_bad, _) in enumerate(seen) if is_bad]
    if not has_all and world.comm.size > 1:  # of fsdp, for example, which reduces within the backward pass
        where = f"{name} is not finite in the sum over the ranks; no step was taken; look at the batch of each rank"
    elif ranks:
        where = f"{name} is not finite on {name_ranks(ranks)}; no step was taken; look at its batch"
    else:
        where = f"{name} is finite on each rank, and not in the sum over them; no step was taken; look at the loss"
    raise NonFiniteGradientError(
        f"the gradient of {where} and at the learning rate, or find the operation with torch.autograd.detect_anomaly()"
    )


def _norm(norms: Sequence[torch.Tensor], world: World) -> float:
    dtype = reduce(torch.promote_types, [each.dtype for each in norms])
    # Those of offloaded gradients are on another device.
    together = torch.stack([each.to(world.device, dtype, non_blocking=True) for each in norms])
    return float(torch.linalg.vector_norm(together))


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(values_of(gradient.to_local() if is_distributed(gradient) else gradient)).all())
