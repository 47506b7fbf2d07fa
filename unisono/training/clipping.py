"""Clip gradients by their norm over all parameters and ranks, also where each rank has a shard of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.training.gradients import is_sparse, values_of
from unisono.training.strategies.sharded import gathered, is_distributed
from unisono.world import World


def clip_grad_norm(
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    world: World,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients so that their norm, over all parameters and ranks, is at most `max_norm`.

    Like torch's `clip_grad_norm_`, for reduced gradients, whole or sharded. For sharded or sparse ones it is a
    collective: each rank calls it, with the same parameters.

    Args:
        norm_type: the order of the norm, which may be infinity.
        error_if_nonfinite: raise RuntimeError, on all ranks and before anything is scaled, if the norm is not finite.
        foreach: as for torch's, of whole gradients.

    Returns:
        The norm before clipping, a plain tensor, equal on all ranks.
    """
    for parameter in parameters:
        if parameter.grad is not None and is_sparse(parameter.grad):  # each row once; torch has no norm for these
            parameter.grad = parameter.grad.coalesce()
    if not any(is_distributed(parameter) or is_sparse(parameter.grad) for parameter in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() for gradient in gradients if is_distributed(gradient)]
    whole = [gradient for gradient in gradients if not is_distributed(gradient)]
    total: torch.Tensor
    if world.state.seeds_batches:  # in an order that does not depend on the ranks, as torch adds them on one
        of_each = [torch.linalg.vector_norm(gathered(each), norm_type) for each in gradients]
        total = torch.linalg.vector_norm(torch.stack(of_each), norm_type)
    else:
        # Norms are gathered instead of summing powers: no overflow, NaN stays NaN, and every norm type is correct.
        of_whole = _norm([values_of(gradient) for gradient in whole], norm_type, world)
        norms = world.comm.all_gather(_norm(shards, norm_type, world))
        sharing = max((each.device_mesh.size(-1) for each in gradients if is_distributed(each)), default=0)
        norms = [*norms[:sharing], of_whole]  # the norms of one replica: all replicas have the same shards
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; find "
            "what is not finite in the loss, or pass error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as in torch
    for each in (*shards, *whole):
        each.mul_(factor.to(each.device))  # with offload the shards are in main memory
    return total


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, world: World) -> torch.Tensor:
    """The norm of all tensors together; 0 if all of them are empty, as a rank's shards may be."""
    # torch's infinity norm of an empty shard raises, on that rank alone.
    found = [each for each in tensors if each.numel()]
    if not found:  # torch would copy its zero from main memory, with a sync
        return torch.zeros((), dtype=torch.float64, device=world.device)
    return torch.nn.utils.get_total_norm(found, norm_type).to(world.device, torch.float64)
