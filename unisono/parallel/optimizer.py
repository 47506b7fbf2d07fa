"""`optimizer_step`: reduce the gradients over all ranks, then step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from unisono.parallel.agreement import check_agreement
from unisono.parallel.gradients import part_of, reduce_gradients
from unisono.parallel.names import trained_parameters
from unisono.parallel.weights import share_of, tally_of
from unisono.timeline import REDUCE, STEP
from unisono.window import Share, window_of
from unisono.world import World, current_world

logger = logging.getLogger(__name__)

_agreed: WeakKeyDictionary[World, WeakSet[Optimizer]] = WeakKeyDictionary()
"""The optimizers whose parameters have been compared, by the rank that did."""

_with_foreign_batches: WeakSet[World] = WeakSet()

prepared: WeakSet[Optimizer] = WeakSet()
"""The optimizers that an Accelerator has prepared: their steps reduce by themselves."""


def optimizer_step(
    optimizer: Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    *,
    weight: float | torch.Tensor | None = None,
    world: World | None = None,
) -> Any:
    """Reduce the gradients of the optimizer's parameters over all ranks and call `optimizer.step(**optimizer_args)`.

    The gradient that is applied is that of the mean loss over all samples that the ranks received from a loader of this
    package, however unevenly they were dealt; batches from elsewhere count equally per rank. Gradients that several
    plain `loss.backward()` have added up stay a sum of such means, as on one device; several
    `unisono.backward(loss)` make the mean over all of their samples. The learning rate is never scaled.

    Args:
        optimizer: over the same parameters, in the same order, on each rank.
        barrier: wait until the device has done the step. A lazy one begins with it in any case.
        optimizer_args: keyword arguments of `optimizer.step`. A "closure" is called by it, on every rank, and its
            gradients and its loss are reduced each time.
        weight: what this rank's loss is the mean over, where that is not its samples: the tokens that count, say. For
            gradients of one plain `loss.backward()`; for several there is `unisono.backward(loss, weight)`.
        world: None takes the current one.

    Returns:
        What `optimizer.step` returned.

    Raises:
        TypeError: `optimizer` is none, or a gradient is sparse.
        RuntimeError: no parameter has a gradient.
        ValueError: a weight is no weight, or all are zero.
        CollectiveMismatchError: the ranks' models differ, or the ranks took different numbers of batches.
        BrokenWorldError: a peer failed or departed.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    world = world or current_world()
    arguments = dict(optimizer_args or {})
    if optimizer in prepared:
        if weight is not None:
            raise ValueError("a prepared optimizer's gradients have their weights; pass backward(loss, weight=...)")
        return optimizer.step(**arguments)
    try:
        return _step(optimizer, barrier, arguments, weight, world)
    finally:  # a step that has failed is over, too
        tally_of(world).close(optimizer)


def _step(
    optimizer: Optimizer, barrier: bool, arguments: dict[str, Any], weight: float | torch.Tensor | None, world: World
) -> Any:
    share, factor = _share(optimizer, weight, world)
    parameters = trained_parameters(optimizer)
    track = world.timeline.loop()
    with track.span(REDUCE):
        check_once(optimizer, parameters, world)
        if arguments.get("closure") is not None:
            arguments["closure"] = _reducing(optimizer, arguments["closure"], share, world)
        else:
            reduce_gradients(parameters, world, share, factor)
    with track.span(STEP):
        result = optimizer.step(**arguments)
        world.backend.mark_step(world.device)
        if barrier:
            world.backend.synchronize(world.device)
    track.count("steps")
    return result


def _share(
    optimizer: Optimizer, weight: float | torch.Tensor | None, world: World
) -> tuple[Share | None, float | None]:
    """This rank's share of the step, and the factor of its gradients where that is another number."""
    tally, window = tally_of(world), window_of(world)
    if not tally.is_held(optimizer):
        if weight is None:
            return window.share_for(optimizer), None
        window.take(optimizer)
        return share_of(weight, world)
    if weight is not None:
        raise ValueError("backward() has weighted these gradients; give the weight to backward(loss, weight=...) alone")
    window.take(optimizer)
    return tally.share()


def check_once(optimizer: Optimizer, parameters: Sequence[torch.Tensor], world: World) -> None:
    """Before an optimizer's first step: do all ranks have the same model?

    Raises:
        CollectiveMismatchError: they do not.
    """
    agreed = _agreed.setdefault(world, WeakSet())
    if world.comm.size == 1 or optimizer in agreed:
        return
    check_agreement(parameters, world)
    agreed.add(optimizer)
    if optimizer not in prepared:
        warn_of_foreign_batches(world, "optimizer_step", "DeviceLoader(loader) cuts it")


def expect_foreign_batches(world: World) -> None:
    """In this world each rank brings batches of its own, as PyTorch/XLA's scripts do by a DistributedSampler."""
    _with_foreign_batches.add(world)


def warn_of_foreign_batches(world: World, called: str, way_out: str) -> None:
    """On rank zero of several, where no loader of this package has delivered a batch.

    Args:
        called: what the user did.
        way_out: what gives each rank a part.
    """
    if world.rank == 0 and world.world_size > 1 and window_of(world).is_unused and world not in _with_foreign_batches:
        logger.warning(
            "%s in a world of %d ranks, whose batches come from no loader of this package: they count equally, and a "
            "plain DataLoader gives each rank all of the data; %s",
            called,
            world.world_size,
            way_out,
        )


def _reducing(optimizer: Optimizer, closure: Callable[[], Any], share: Share | None, world: World) -> Callable[[], Any]:
    """A closure for `optimizer`, where each call is a step of its own; `share` is that of plain `loss.backward()`."""
    tally, parameters = tally_of(world), trained_parameters(optimizer)

    def begin() -> None:
        tally.clear()

    def reduce() -> Share | None:
        own, factor = tally.share() if tally.is_held(optimizer) else (share, None)
        reduce_gradients(parameters, world, own, factor)
        return own

    return reducing(closure, begin, reduce, world)


def forget_agreement(worlds: Iterable[World]) -> None:
    """Something went wrong in these worlds: compare the models again before the next step."""
    for world in worlds:
        _agreed.pop(world, None)


def reducing(
    closure: Callable[[], Any], begin: Callable[[], None], reduce: Callable[[], Share | None], world: World
) -> Callable[[], Any]:
    """A closure whose gradients, and whose loss, are those of the global batch: the optimizer decides by them, and all
    ranks must decide alike.

    Args:
        begin: comes before the closure.
        reduce: reduces the gradients that it has left, and tells this rank's share.
    """

    def reduced() -> Any:
        begin()
        loss = torch.as_tensor(closure(), device=world.device).detach()
        with world.timeline.loop().span(REDUCE):
            part = part_of(reduce(), world)
            return world.comm.all_reduce(loss * part if part else torch.zeros_like(loss))

    return reduced
