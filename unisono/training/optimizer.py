"""Training by hand, without an Accelerator: `backward` weights a loss, `optimizer_step` reduces and steps.

The forward pass of a plain module is not observed, so a loss is attributed to the batch that the innermost loop
delivered last. If it may belong to another batch (an earlier one was not used) that counts differently, it is an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.arguments import check_type
from unisono.report.timeline import REDUCE, STEP
from unisono.training.agreement import check_agreement
from unisono.training.claims import Crossings, Origin, check_counts, claim_of, find_origin, named_origin, refuse_crossed
from unisono.training.finiteness import LOSS, Finiteness
from unisono.training.gradients import check_presence, reduce_gradients, scaled
from unisono.training.losses import LEAF, graph_nodes
from unisono.training.machine import name_batches
from unisono.training.parameter_names import describe_rates, trained_parameters
from unisono.training.passes import Passes
from unisono.training.steps import Steps
from unisono.training.strategies.sharded import holds_any
from unisono.world import World, current_world

logger = logging.getLogger(__name__)

prepared: WeakSet[Optimizer] = WeakSet()
"""The optimizers that an Accelerator has prepared, whose steps include the reduction."""

unreduced = WeakTensorKeyDictionary()
"""The parameters with gradients from `backward` that `optimizer_step` has not reduced yet."""


class ByHand:
    """The state of a rank that trains without an Accelerator."""

    def __init__(self) -> None:
        self.agreed: WeakSet[Optimizer] = WeakSet()  # whose parameters have been compared with those of the other ranks
        # Of optimizers whose parameters belong to no prepared model: the number of their steps, and which of them was
        # the first to step a parameter.
        self.foreign: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.compared = WeakTensorKeyDictionary()
        # The passes through prepared models. Weak: a dropped Accelerator must not claim the losses of its models.
        self.trainers: WeakSet[Passes] = WeakSet()
        self.steps: Steps | None = None  # those that `backward` has counted for

    def steps_of(self, world: World) -> Steps:
        if self.steps is None:
            self.steps = Steps(world, math.inf)
        return self.steps

    def restart(self) -> None:
        """Start the rank's loop again; what an earlier loop has left belongs to no step."""
        self.steps = None
        for each in list(self.trainers):
            each.steps.restart()


def backward(
    loss: torch.Tensor,
    weight: float | torch.Tensor | None = None,
    batch: Any = None,
    *,
    world: World | None = None,
) -> None:
    """Run `loss.backward()` for a microbatch, so that the next `optimizer_step` applies the gradient of the mean over
    all microbatches since the last step, on all ranks, each weighted exactly.

    The loss must be the mean over the microbatch; do not divide it by the number of microbatches. To skip a batch,
    do so before this call: zeroing its gradients afterwards is not detected.

    Args:
        loss: a tensor of one element.
        weight: the number of terms in the mean, if these are not the samples: unmasked tokens, for example. None uses
            the samples that the loader has delivered to this rank; without a loader of this package each microbatch
            counts the same. In a step, all ranks pass weights or none does. Several losses of one batch share one
            weight. A batch that only repeats others weighs 0 in any case. Costs a small collective.
        batch: tensors of the batch that the loss was computed from, as a loader of this package delivered them, or
            views of them; `()` says that the data comes from no loader. None uses the batch that was delivered last;
            after a prepared model's forward pass, the one that its inputs came from.

    Raises:
        TypeError: the loss is not a tensor.
        ValueError: the weight is negative or not finite, or conflicts with those given before in this step; or `batch`
            was delivered by no loader; or the loss may belong to several batches that count differently; or gradients
            came through `unisono.functional`, and the ranks' weights differ.
    """
    if type(loss) is not torch.Tensor:  # saves the call
        check_type(loss, "loss", "pass the tensor that the loss function returned", torch.Tensor)
    world = world or current_world()
    hand = world.state.part(ByHand)
    trainers = list(hand.trainers)
    # A prepared model has its own hooks at its parameters: those below would scale its gradients a second time.
    trained = set(_leaves(loss)) if trainers else set()
    if (trainer := next((each for each in trainers if each.has(trained)), None)) is not None:
        trainer.backward(loss, weight, batch)
        trainer.look(loss)
        return
    steps = hand.steps_of(world)
    origin = find_origin(world) if batch is None else named_origin(batch, world)
    # Data of no loader cannot be distinguished, so each backward pass on it counts as a new microbatch.
    visit = steps.count(origin, weight, elsewhere=object())
    part, crossings = visit.claim.part(world.comm.size), world.state.part(Crossings)
    factor, before = part * steps.step.scale(visit), crossings.number
    left_at = _leaves(loss) if factor != 1 or world.comm.size > 1 else []
    if world.comm.size > 1:  # before the pass: one that fails halfway leaves gradients, too
        unreduced.update((each, True) for each in left_at)
    # At the leaves, not by scaling the loss: the mean over no samples is NaN, and NaN times 0 stays NaN.
    hooks = [each.register_hook(partial(scaled, factor)) for each in left_at if factor != 1]
    try:
        loss.backward()
    finally:
        for hook in hooks:  # one that stayed would also scale the next backward pass
            hook.remove()
    world.state.part(Finiteness).look(loss, LOSS, steps, lambda: _leaves(loss))
    # Only now is it known whether the pass went through `unisono.functional`.
    if crossings.number != before:
        refuse_crossed(part)


def optimizer_step(
    optimizer: Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
) -> Any:
    """Reduce the gradients of the optimizer's parameters over all ranks; return `optimizer.step(**optimizer_args)`.

    The gradient is that of the mean loss over all samples that the ranks received from a loader of this package,
    however unevenly they were split; batches from elsewhere count equally per rank. Several plain `loss.backward()`
    leave a sum of such means, as on one device; several `unisono.backward(loss)` give the mean over all of their
    samples. The learning rate is never scaled.

    Args:
        optimizer: with the same parameters, in the same order, on each rank.
        barrier: wait until the device has finished the step. A lazy device starts it in any case.
        optimizer_args: keyword arguments of `optimizer.step`. A "closure" is called by it, on every rank, and its
            gradients and its loss are reduced each time.
        world: None uses the current one.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        RuntimeError: no parameter has a gradient.
        ValueError: plain `loss.backward()` has accumulated batches that were split differently.
        CollectiveMismatchError: the ranks' models differ, or the ranks took different numbers of batches.
        BrokenWorldError: a peer failed or left.
    """
    check_type(optimizer, "optimizer", "pass a torch.optim.Optimizer", Optimizer)
    world = world or current_world()
    arguments = dict(optimizer_args or {})
    if optimizer in prepared:
        return optimizer.step(**arguments)
    hand, track = world.state.part(ByHand), world.timeline.loop()
    steps = hand.steps_of(world)
    steps.request(optimizer)
    try:
        with track.span(REDUCE):
            check_once(optimizer, trained_parameters(optimizer), world)
            if arguments.get("closure") is not None:
                arguments["closure"] = _reducing_closure(optimizer, arguments["closure"], world)
            else:
                # All ranks skip the step, or none does: the totals are equal on all of them.
                is_empty = _is_counted(optimizer, hand) and steps.step.is_empty()
                if is_empty and not holds_any(trained_parameters(optimizer), world):
                    return track.count("skipped steps")
                reduce_held(optimizer, world)
        with track.span(STEP):
            result = optimizer.step(**arguments)
            world.backend.mark_step(world.device)
            if barrier:
                world.backend.synchronize(world.device)
        track.count("steps")
        if world.timeline.at_step is not None:
            world.timeline.at_step(track.counts["steps"], None)
        return result
    finally:  # a step that has failed is over, too
        steps.take_step(optimizer)
        world.state.part(Crossings).is_held = False


def reduce_by_hand(optimizer: Optimizer, world: World) -> None:
    """Reduce the gradients of an optimizer that is not prepared, without a step: to clip them before
    `optimizer.step()`, for example. A collective."""
    if world.world_size > 1:
        with world.timeline.loop().span(REDUCE):
            check_once(optimizer, trained_parameters(optimizer), world)
            reduce_held(optimizer, world)


def reduce_held(optimizer: Optimizer, world: World, origin: Origin | None = None) -> float:
    """Reduce the gradients of an optimizer that is not prepared; returns this rank's part of the step. `origin` is
    that of what plain `loss.backward()` has left; None finds it. A collective."""
    hand = world.state.part(ByHand)
    steps = hand.steps_of(world)
    if _is_counted(optimizer, hand):
        part, factor, place = steps.fraction(), steps.factor(), steps.step.place()
    else:
        origin = origin or find_origin(world)
        world.state.deliveries.learn(origin.batch)
        # A sum of plain backward passes: the batches need not be of one size, but one number weighs them all.
        check_counts(origin.candidates, world, is_mean=False)
        claim = claim_of(origin.batch, None, world)
        if world.state.part(Crossings).is_held:
            refuse_crossed(claim.part(world.comm.size))
        # n / N without the factor R: the ranks' gradients are added, not averaged.
        part = factor = claim.part(1)
        place = "a step" if origin.batch is None else f"a step on {name_batches([origin.batch])}"
    parameters = trained_parameters(optimizer)
    reduce_gradients(parameters, world, factor, place + describe_rates(optimizer.param_groups))
    check_presence(parameters)
    for each in parameters:
        unreduced.pop(each, None)
    return part


def _is_counted(optimizer: Optimizer, hand: ByHand) -> bool:
    """Whether the gradients that the optimizer is about to apply come from `backward`."""
    return hand.steps is not None and bool(hand.steps.step.visits) and not hand.steps.has_stepped(optimizer)


def check_once(optimizer: Optimizer, parameters: Sequence[torch.Tensor], world: World) -> None:
    """Check before an optimizer's first step that all ranks have the same model."""
    agreed = world.state.part(ByHand).agreed
    if world.comm.size == 1 or optimizer in agreed:
        return
    check_agreement(parameters, world)
    # Only after the comparison has succeeded: after an error the next step compares again.
    agreed.add(optimizer)
    if optimizer not in prepared:
        warn_of_foreign_batches(world)


def warn_of_foreign_batches(world: World) -> None:
    """Warn on rank zero of several if no loader of this package has delivered a batch."""
    is_expected = world.state.brings_batches or bool(world.state.deliveries.recent())
    if world.rank == 0 and world.world_size > 1 and not is_expected:
        logger.warning(
            "a step on %d ranks without batches of a prepared loader: a plain DataLoader gives each rank all data; "
            "loop over what prepare(loader) returns, which cuts it, or by hand over DeviceLoader(loader)",
            world.world_size,
        )


def _reducing_closure(optimizer: Optimizer, closure: Callable[[], Any], world: World) -> Callable[[], Any]:
    """A closure for `optimizer`: each call is a separate step."""
    hand = world.state.part(ByHand)
    origin = find_origin(world)

    def compute() -> Any:
        hand.steps_of(world).drop_step()
        return closure()

    return reducing(compute, lambda: reduce_held(optimizer, world, origin), world)


def reducing(closure: Callable[[], Any], reduce: Callable[[], float], world: World) -> Callable[[], Any]:
    """A closure with the gradients and the loss of the global batch, since the optimizer's decisions depend on them and
    must be equal on all ranks. `reduce` reduces the gradients, and returns this rank's part of the step."""

    def reduced() -> Any:
        loss = torch.as_tensor(closure(), device=world.device).detach()
        with world.timeline.loop().span(REDUCE):
            part = reduce()
            # The loss of a rank without samples may be NaN, which a product with 0 would not clear.
            return world.comm.all_reduce(loss * part if part else torch.zeros_like(loss))

    return reduced


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in which the backward pass of the loss accumulates gradients."""
    nodes = () if loss.grad_fn is None else graph_nodes(loss.grad_fn)
    # By the name: the node of a user's Function may have its own attribute `variable`.
    return [node.variable for node in nodes if node.name() == LEAF]
