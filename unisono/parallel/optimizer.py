"""`optimizer_step`: reduce the gradients over all ranks, then step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from unisono.parallel.agreement import check_agreement
from unisono.parallel.gradients import part_of, reduce_gradients
from unisono.timeline import REDUCE, STEP
from unisono.window import Share, window_of
from unisono.world import World, current_world

logger = logging.getLogger(__name__)

_agreed: WeakKeyDictionary[World, WeakSet[Optimizer]] = WeakKeyDictionary()
"""The optimizers whose parameters have been compared, by the rank that did."""


def optimizer_step(
    optimizer: Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
) -> Any:
    """Reduce the gradients of the optimizer's parameters over all ranks and call `optimizer.step(**optimizer_args)`.

    The gradient that is applied is that of the mean loss over all samples that the ranks received from a loader of this
    package since their last step, however unevenly they were dealt. Batches from elsewhere count equally per rank. The
    learning rate is never scaled.

    Args:
        optimizer: over the same parameters, in the same order, on each rank.
        barrier: end the device's step here; lazy devices need it where no loader of this package does it.
        optimizer_args: keyword arguments of `optimizer.step`. A "closure" is called by it, on every rank, and its
            gradients and its loss are reduced each time.
        world: None takes the current one.

    Returns:
        What `optimizer.step` returned.

    Raises:
        TypeError: `optimizer` is none, or a gradient is sparse.
        CollectiveMismatchError: the ranks' models differ, or the ranks took different numbers of batches.
        BrokenWorldError: a peer failed or departed.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    world = world or current_world()
    arguments = dict(optimizer_args or {})
    share = window_of(world).share_for(optimizer)
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    track = world.timeline.loop()
    with track.span(REDUCE):
        agreed = _agreed.setdefault(world, WeakSet())
        if world.comm.size > 1 and optimizer not in agreed:
            check_agreement(parameters, world)
            agreed.add(optimizer)
            if world.rank == 0 and window_of(world).is_unused:
                logger.warning(
                    "optimizer_step in a world of %d ranks, whose batches come from no loader of this package: they "
                    "count equally, and a plain DataLoader gives each rank all of the data; DeviceLoader cuts it",
                    world.world_size,
                )
        if arguments.get("closure") is not None:
            arguments["closure"] = _reducing(arguments["closure"], parameters, world, share)
        else:
            reduce_gradients(parameters, world, share)
    with track.span(STEP):
        result = optimizer.step(**arguments)
        if barrier:
            world.backend.mark_step(world.device)
    track.count("steps")
    return result


def _reducing(
    closure: Callable[[], Any], parameters: list[torch.Tensor], world: World, share: Share | None
) -> Callable[[], Any]:
    """A closure whose gradients, and whose loss, are those of the global batch: the optimizer decides by them, and all
    ranks must decide alike."""

    def reduced() -> Any:
        loss = closure()
        with world.timeline.loop().span(REDUCE):
            reduce_gradients(parameters, world, share)
            return world.comm.all_reduce(torch.as_tensor(loss, device=world.device).detach() * part_of(share, world))

    return reduced
