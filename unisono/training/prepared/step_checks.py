"""Keeps optimizers, prepared or not, from stepping on gradients of one rank alone, or on parameters that do not train:
by a check before each step of any optimizer of the process, and by what a prepared one refuses when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.training import optimizer as by_hand
from unisono.training.agreement import check_same_step
from unisono.training.parameter_names import parameters_of
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import is_distributed
from unisono.world import given_world

if TYPE_CHECKING:
    from unisono.training.prepared.stepper import Stepper

K = TypeVar("K")

steppers: WeakKeyDictionary[Stepper, None] = WeakKeyDictionary()
"""Those of this process, for all ranks that are its threads."""

stepping: set[int] = set()
"""The ids of the optimizers whose steps run, by their steppers."""

# The engines of all prepared models of this process, each with the settings that only prepared optimizers apply.
_engines: WeakKeyDictionary[Engine, tuple[str, ...]] = WeakKeyDictionary()
_warned: WeakSet[Optimizer] = WeakSet()  # those already warned about
_COMPARED_AT = (1, 10, 100)  # a first step may be on zeros, which are equal


def alive(table: WeakKeyDictionary[K, Any]) -> list[K]:
    """The live keys. Threads of other ranks may add entries meanwhile; copying the references is atomic."""
    return [each for reference in table.keyrefs() if (each := reference()) is not None]


def watch(engine: Engine, done_in_steps: Sequence[str] = ()) -> None:
    """Keep every optimizer from stepping on gradients of this model that belong to one rank alone, and unprepared ones
    from stepping past these features, which only steps of prepared optimizers apply."""
    _engines[engine] = tuple(done_in_steps)


def engines_of(module: Any) -> list[Engine]:
    """The engine that runs this module, if it belongs to a prepared model."""
    return [each for each in alive(_engines) if each.module is module and not each.hooks.is_removed]


def release_engines_of(module: nn.Module) -> None:
    """Disable the hooks that an earlier `prepare` has attached to this module, or to a part of it."""
    own = set(module.parameters())
    for engine in alive(_engines):
        if not engine.hooks.is_removed and any(each in own for each in engine.module.parameters()):
            engine.hooks.remove()


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse to step on gradients that are not reduced, or not processed as the steps should."""
    if id(optimizer) in stepping:  # its stepper has reduced the gradients
        return
    own = parameters_of(optimizer)
    if by_hand.unreduced and any(each.grad is not None and each in by_hand.unreduced for each in own):
        raise RuntimeError(
            f"the {type(optimizer).__name__} steps on gradients that unisono.backward() has left and that are this "
            "rank's alone; call unisono.optimizer_step(optimizer), which reduces them first"
        )
    places = {id(each) for each in own}
    for engine in [each for each in alive(_engines) if not each.hooks.is_removed]:
        asked = _engines.get(engine, ())
        if len(engine.replaced) and any(each in engine.replaced for each in own):
            raise RuntimeError(
                f"the {type(optimizer).__name__} steps the parameters that the {engine.name} had before prepare(), "
                "which has put others in their place, so that the model would not change; prepare(optimizer), together "
                "with the model, or make it from the parameters of the model that prepare() returned"
            )
        # Among the engines are those of other ranks' threads, which have other parameters.
        if not any(id(each) in places for each in engine.module.parameters()):
            continue
        # A prepared optimizer's step may have called this one, as in SAM, and in ZeRO-1 for the rank's part.
        is_within = any(each.is_stepping(engine) for each in alive(steppers))
        is_plain = optimizer not in by_hand.prepared and not is_within
        if asked and is_plain and not engine.gradients.is_own:
            raise RuntimeError(
                f"the {type(optimizer).__name__} steps for the {engine.name} and was not prepared, so that "
                f"{' and '.join(asked)} would do nothing: an Accelerator acts in the steps of the optimizers that "
                "prepare() returns; prepare this one, too"
            )
        if engine.gradients.is_own:
            raise RuntimeError(
                f"the {type(optimizer).__name__}{', which was not prepared,' if is_plain else ''} steps on gradients "
                f"of the {engine.name} that are this rank's alone, in the middle of an accumulation or of a backward "
                "pass, or after no_sync(); step with the optimizer that prepare() returns, or after the backward pass "
                "that ends the step (accelerator.sync_gradients)"
            )
        if is_plain and engine.has_assigned(optimizer):
            raise RuntimeError(
                f"the {type(optimizer).__name__} steps on gradients of the {engine.name} that no backward pass has "
                "left since its last step: they were assigned, and are this rank's alone; prepare(optimizer), which "
                "reduces them"
            )
        if is_plain:
            # An optimizer that is not prepared has no stepper to note it.
            engine.add_trainer(optimizer).is_unprepared = True
            engine.step_unprepared(optimizer)
            if optimizer not in _warned and (world := given_world()) is not None:
                _warned.add(optimizer)
                by_hand.warn_of_foreign_batches(world)
            for stepper in alive(steppers):
                if any(id(each) in places for each in parameters_of(stepper.optimizer)):
                    stepper.note_step_within()
    _check_foreign(optimizer, own)


def _check_foreign(optimizer: Optimizer, own: Sequence[torch.Tensor]) -> None:
    """Refuse to step parameters that were left out of `prepare`, if the ranks would train them apart: they are equal if
    something else has reduced their gradients, or ranks compute the same. Compared in a few steps only."""
    world = given_world()  # a step of a plain script must neither need nor start one
    if world is None or world.comm.size == 1:
        return
    hand = world.state.part(by_hand.ByHand)
    if not hand.trainers or optimizer in hand.agreed:
        return
    # Within the step of a prepared one, as ZeRO-1's for the rank's part, whose parameters are others on each rank.
    if any(each.world is world and id(each.optimizer) in stepping for each in alive(steppers)):
        return
    count = hand.foreign[optimizer] = hand.foreign.get(optimizer, 0) + 1
    if count not in _COMPARED_AT:
        return
    engines = [each for each in alive(_engines) if not each.hooks.is_removed]
    prepared = {id(each) for engine in engines for each in engine.module.parameters()}
    left_out = [each for each in own if each.requires_grad and id(each) not in prepared and not is_distributed(each)]
    # An optimizer within another may have different parameters on each rank, as in torch's ZeroRedundancyOptimizer.
    mine = [each for each in left_out if hand.compared.setdefault(each, id(optimizer)) == id(optimizer)]
    if mine:
        check_same_step(type(optimizer).__name__, mine, world)


def check_added(optimizer: Optimizer, engines: Iterable[Engine], steps: Steps) -> None:
    """Refuse parameters that are trained on each rank alone, in a group that was added after `prepare`."""
    known = {id(each) for engine in engines for each in engine.module.parameters()}
    added = [each for each in parameters_of(optimizer) if id(each) not in known]
    if added and (steps.world.comm.size > 1 or steps.policy.is_mean):
        raise ValueError(
            f"a group was added to the {type(optimizer).__name__} with a parameter of shape {list(added[0].shape)} "
            "that belongs to no prepared model; before add_param_group(), call accelerator.prepare(model) with its "
            "model, or accelerator.prepare(parameter) if it has none"
        )


def check_closure(steps: Steps, has_scaler: bool) -> None:
    """Refuse a closure where it would compute the gradients of a part of the step."""
    if has_scaler:
        raise RuntimeError("mixed_precision='fp16' and a closure cannot be combined; use mixed_precision='bf16'")
    if (virtual := steps.virtual) is not None:
        raise RuntimeError(
            f"virtual_ranks={virtual.count} and a closure cannot be combined: it would compute the gradients of the "
            "last batch of a round; pass no closure"
        )
    if steps.step.policy.is_mean:
        raise RuntimeError(
            f"gradient_accumulation_steps={steps.step.policy.every} and a closure cannot be combined: it would compute "
            "only the last microbatch's gradients; pass gradient_accumulation_steps=1, and loop over the microbatches "
            "in the closure"
        )


def refuse_inside_backward(optimizer: Optimizer) -> NoReturn:
    """Refuse a step in a hook, where gradients are still those of one rank, or of a part of the step."""
    raise RuntimeError(
        f"the {type(optimizer).__name__} was asked to step during a backward pass, as in a hook of a parameter, where "
        "gradients are this rank's alone; step after the backward pass"
    )


def refuse_assigned(optimizer: Optimizer, steps: Steps) -> NoReturn:
    """Refuse gradients that no backward pass has left, where backward passes are counted."""
    if (virtual := steps.virtual) is not None:
        raise RuntimeError(
            f"virtual_ranks={virtual.count} add what backward passes leave, and the gradients that the "
            f"{type(optimizer).__name__} finds were assigned or changed by hand before it was asked to step; clip by "
            "accelerator.clip_grad_norm_ or clip_grad_value_, and change gradients in a hook of the parameter "
            "(register_hook)"
        )
    raise RuntimeError(
        f"gradient_accumulation_steps={steps.step.policy.every} counts backward passes, and the gradients that the "
        f"{type(optimizer).__name__} finds were assigned or changed by hand, for example to those of "
        "torch.autograd.grad; let accelerator.backward(loss) leave them in .grad, and accelerator.clip_grad_norm_ clip "
        "them, or pass gradient_accumulation_steps=1 and step on each batch"
    )


# Not a decorator, which would replace the function by a handle: an optimizer's class that is pickled by value includes
# the hooks of all steps, which are then pickled by name.
register_optimizer_step_pre_hook(_refuse_step)
