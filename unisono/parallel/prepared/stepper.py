"""`step` and `zero_grad` of a prepared optimizer. A step reduces the gradients that backward passes have not reduced,
then unscales, checks and clips them, and calls the optimizer's own step.

The optimizer stays the same object, so that objects that hold it, such as a scheduler, use the new methods.

Invariants:
1. While microbatches accumulate, `step` and `zero_grad` do nothing.
2. Either all ranks skip a step, or none does: the decision depends only on reduced gradients, and on numbers that are
   equal on all ranks.
3. No optimizer, prepared or not, steps on gradients of one rank alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.comm.selection import translate_errors
from unisono.deliveries import Loop
from unisono.parallel import optimizer as by_hand
from unisono.parallel.gradients import check_presence
from unisono.parallel.ledger import Ledger
from unisono.parallel.parameter_names import parameters_of, trained_parameters
from unisono.parallel.passes import Passes
from unisono.parallel.prepared.nan_guard import NanGuard
from unisono.parallel.prepared.scaler import LossScaler
from unisono.parallel.prepared.schedule_units import Taken
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.sharded import clip_grad_norm, is_distributed
from unisono.timeline import REDUCE, STEP
from unisono.world import World, current_world

logger = logging.getLogger(__name__)

K = TypeVar("K")

# The engines of all prepared models of this process, each with the settings that only prepared optimizers apply.
_engines: WeakKeyDictionary[Engine, tuple[str, ...]] = WeakKeyDictionary()
_steppers: WeakKeyDictionary[Stepper, None] = WeakKeyDictionary()
_told: WeakSet[Optimizer] = WeakSet()  # those that a warning was about


class Stepper:
    """The steps of one prepared optimizer.

    Args:
        optimizer: its `step` and `zero_grad` are replaced by those of this object.
        world: the rank's world.
        passes: records the passes through the models.
        max_grad_norm: the norm to which each step clips; None for no clipping.
        scaler: the scaler of the loss, or None.
        guard: the NanGuard, or None.

    Attributes:
        num_asked: the number of calls of `step`.
        checks: functions of the schedulers that follow it, called before each step.
        taken: the steps taken, without the calls that did not step: between microbatches, and after an overflow.
        was_skipped: whether the last due step was skipped, after an overflow or because no sample counted.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world: World,
        passes: Passes,
        max_grad_norm: float | None = None,
        scaler: LossScaler | None = None,
        guard: NanGuard | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.num_asked = 0
        self.taken = Taken()
        self.was_skipped = False
        self.checks: list[Callable[[], None]] = []
        self._engines: list[Engine] = []  # of the models that have some of the optimizer's parameters
        self.world = world
        self._passes, self._microbatches = passes, passes.microbatches
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._guard = guard
        self._is_unscaled = self._is_inside = False
        self._plain_step, self._plain_zero = optimizer.step, optimizer.zero_grad
        # What others have patched on the instance, such as a scheduler's counter of steps, for `release` to restore.
        self._own = {name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)}
        step, zero = _methods(self)
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a scheduler created earlier has marked it
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero, optimizer)  # type: ignore[method-assign]
        by_hand.prepared.add(optimizer)
        _steppers[self] = None

    def train(self, engine: Engine) -> None:
        """Record that a model with some of the optimizer's parameters is prepared."""
        self._engines.append(engine)
        engine.optimizers.append(ref(self.optimizer))

    def release(self) -> None:
        """Restore the optimizer's own methods."""
        # Methods of the class are not assigned as attributes: bound to the optimizer, they would keep it alive.
        for name in ("step", "zero_grad"):
            vars(self.optimizer).pop(name, None)
        for name, own in self._own.items():
            setattr(self.optimizer, name, own)
        by_hand.prepared.discard(self.optimizer)
        self._engines.clear()

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Run `optimizer.step` at the end of an accumulation; otherwise do nothing and return None."""
        if self._is_inside:  # called by the scaler, unless gradients have overflowed
            self._count_step()
            return self._plain_step(**arguments)
        self.num_asked += 1
        if not self._microbatches.ask_step():
            self._skip()
            return None
        track, before = self.world.timeline.loop(), self.taken.steps
        self.was_skipped = False
        try:
            # Before anything is changed: a scheduler that was stepped by hand has made this step's learning rate wrong.
            for check in self.checks:
                check()
            if closure is not None:
                self._check_closure()
                closure = self._reducing(closure)
            elif self._ledger.is_empty:
                track.count("skipped steps")
                self.was_skipped = True
                return None
            else:
                with track.span(REDUCE):
                    self.reduce()
            with track.span(STEP), translate_errors(self.world.comm):
                result = self._step(closure, arguments)
                self.world.backend.mark_step(self.world.device)
        finally:  # zero_grad() is next, whether the step succeeded or failed
            self._close()
        for engine in self._engines:
            engine.after_step(self.optimizer)
        track.count("steps")
        self.was_skipped = self.taken.steps == before
        return result

    def reduce(self) -> None:
        """Reduce and unscale the gradients of the whole step; repeated calls before the step do nothing.

        Raises:
            RuntimeError: none of the parameters has a gradient; or, with a scaler, a backward pass ran without it.
        """
        for engine in self._engines:
            if engine.is_held:
                engine.reduce()
            # With accumulation, assigned gradients belong to no counted microbatch; `_skip` refuses them.
            elif self._ledger.every == 1 and engine.has_assigned(self.optimizer):
                self._passes.adopt(engine)
        check_presence(trained_parameters(self.optimizer))
        # Once per step: clipping by the user may have unscaled them already.
        if self._scaler is not None and not self._is_unscaled:
            if self._passes.went_past:
                raise RuntimeError(
                    "mixed_precision='fp16' scales the loss, and this step's gradients were made by loss.backward(); "
                    "call accelerator.backward(loss) instead"
                )
            self._scaler.unscale_(self.optimizer)
            self._is_unscaled = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`optimizer.zero_grad`, which does nothing between microbatches of one step."""
        if self._is_inside or self.may_zero():
            self._plain_zero(set_to_none)
            self.forget()

    def may_zero(self) -> bool:
        """Whether gradients may be zeroed: they hold nothing of the current step, or it is over or abandoned.

        A step is abandoned if it has its last microbatch but the optimizer has not stepped, or if no step was requested
        since the last backward pass.
        """
        now, step = self._ledger, self._ledger.step
        if now.every == 1 or self.optimizer in step.stepped:
            return True
        begun = [engine.begun for engine in self._engines if engine.begun.step is step]
        is_complete = step.is_full and any(each.microbatch == now.count for each in begun)
        return not begun or is_complete or any(each.num_asked == self._microbatches.num_asked for each in begun)

    def forget(self) -> None:
        """Record that the gradients are zero."""
        # An optimizer that zeroes gradients within its own step, such as SAM, is still in that step.
        if not self._is_inside:
            if self._guard is not None:
                self._guard.forget(trained_parameters(self.optimizer))
            for engine in self._engines:
                engine.forget()
            if self._ledger.count:  # part of a step is abandoned
                self._microbatches.skips.pop(self.optimizer, None)
            self._passes.forget()
            self._settle()

    def is_stepping(self, engine: Engine) -> bool:
        """Whether the optimizer's own step is running, on parameters of this model."""
        return self._is_inside and engine in self._engines

    @property
    def every(self) -> float:
        """The number of microbatches in a step."""
        return self._ledger.every

    def loop_of_last_step(self) -> Loop | None:
        """The loop over a loader in which the last step was taken, if it has not ended."""
        batch = self._ledger.step.last
        return batch.loop if batch is not None and batch.loop.is_open else None

    def _count_step(self) -> None:
        self.taken = self.taken.after_step(self._ledger.num_dealt(), int(self._ledger.every))

    @property
    def _ledger(self) -> Ledger:
        return self._microbatches.ledger

    def _skip(self) -> None:
        now = self._ledger
        self._microbatches.warn_of_unknown_ends()
        skips = self._microbatches.skips
        skips[self.optimizer] = count = skips.get(self.optimizer, 0) + 1
        # One of `every` requests in a row must be on the last microbatch.
        if count >= now.every:
            if not now.count and any(each.grad is not None for each in trained_parameters(self.optimizer)):
                raise RuntimeError(
                    f"gradient_accumulation_steps={now.every} counts backward passes, and the gradients that the "
                    f"{type(self.optimizer).__name__} finds were assigned by hand, for example from "
                    "torch.autograd.grad; let accelerator.backward(loss) leave them in .grad, or pass "
                    "gradient_accumulation_steps=1 and step on each batch"
                )
            raise RuntimeError(
                f"the {type(self.optimizer).__name__} was asked to step {count} times in a row, and never "
                f"on the last microbatch of gradient_accumulation_steps={now.every}; call its step() on each one, and "
                "where several optimizers step on batches of no prepared loader, let each batch's lines run in "
                "`with accelerator.accumulate():`"
            )

    def _step(self, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        self._is_inside = True
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        try:
            if closure is not None:
                arguments["closure"] = closure  # reduces and finishes the gradients in each of its calls
            else:
                self._finish()
            if self._scaler is not None:
                before = self.taken.steps
                result = self._scaler.step(self.optimizer, **arguments)
                self._scaler.has_skipped |= self.taken.steps == before
                return result
            self._count_step()
            return self._plain_step(**arguments)
        finally:
            self._is_inside = False

    def _finish(self) -> None:
        """Check and clip the gradients, between the reduction and the step."""
        if not self.taken.steps:
            by_hand.warn_of_foreign_batches(self.world, "optimizer.step()", "prepare(loader) cuts it")
        parameters = trained_parameters(self.optimizer)
        if self._guard is not None:
            self._guard.check(parameters)  # before clipping, which would spread one NaN to all gradients
        if self._max_grad_norm is not None:
            clip_grad_norm(parameters, self._max_grad_norm, world=self.world)

    def _check_closure(self) -> None:
        if self._scaler is not None:
            raise RuntimeError("mixed_precision='fp16' and a closure cannot be combined; use mixed_precision='bf16'")
        if self._ledger.every > 1:
            raise RuntimeError(
                f"gradient_accumulation_steps={self._ledger.every} and a closure cannot be combined: it would compute "
                "only the last microbatch's gradients; pass gradient_accumulation_steps=1, and loop over the "
                "microbatches in the closure"
            )

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduce() -> float:
            self.reduce()
            self._finish()
            return self._ledger.part()

        return by_hand.reducing(closure, reduce, self.world)

    def _settle(self) -> None:
        """Record that this optimizer is done with the current gradients, so that an update of the loss scale is due."""
        if self._scaler is not None and self._is_unscaled:
            self._is_unscaled, self._scaler.is_due = False, True

    def _close(self) -> None:
        self._settle()
        for engine in self._engines:
            engine.note_step(self.optimizer)
        self._microbatches.skips.pop(self.optimizer, None)


def watch(engine: Engine, done_in_steps: Sequence[str] = ()) -> None:
    """Keep every optimizer from stepping on gradients of this model that are those of one rank alone.

    Args:
        done_in_steps: the requested features that only steps of prepared optimizers apply.
    """
    _engines[engine] = tuple(done_in_steps)


def _alive(table: WeakKeyDictionary[K, Any]) -> list[K]:
    """The live keys. Threads of other ranks may add entries meanwhile; copying the references is atomic."""
    return [each for reference in table.keyrefs() if (each := reference()) is not None]


def release_engines_of(module: nn.Module) -> None:
    """Disable the hooks that an earlier `prepare` has attached to this module, or to a part of it."""
    own = set(module.parameters())
    for engine in _alive(_engines):
        if not engine.is_released and any(each in own for each in engine.module.parameters()):
            engine.release()


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse to step on gradients that are not reduced, or not processed as the steps should."""
    own = parameters_of(optimizer)
    if by_hand.unreduced and any(each.grad is not None and each in by_hand.unreduced for each in own):
        raise RuntimeError(
            f"the {type(optimizer).__name__} steps on gradients that unisono.backward() has left and that are this "
            "rank's alone; call unisono.optimizer_step(optimizer), which reduces them first"
        )
    suspects = [(engine, _engines.get(engine, ())) for engine in _alive(_engines) if not engine.is_released]
    places = {id(each) for each in own}
    is_ours = optimizer in by_hand.prepared
    for engine, asked in suspects:
        if any(each in engine.replaced for each in own):
            raise RuntimeError(
                f"the {type(optimizer).__name__} steps the parameters that the {engine.name} had before prepare(), "
                "which has put others in their place, so that the model would not change; prepare(optimizer), together "
                "with the model, or make it from the parameters of the model that prepare() returned"
            )
        # Among the engines are those of other ranks' threads, whose parameters are others.
        if not any(id(each) in places for each in engine.module.parameters()):
            continue
        is_ours = True
        is_plain = optimizer not in by_hand.prepared and not _is_stepping(engine)
        if asked and is_plain and not engine.is_held:
            raise RuntimeError(
                f"the {type(optimizer).__name__} steps for the {engine.name} and was not prepared, so that "
                f"{' and '.join(asked)} would do nothing: an Accelerator acts in the steps of the optimizers that "
                "prepare() returns; prepare this one, too"
            )
        if engine.is_held:
            raise RuntimeError(
                f"the {type(optimizer).__name__} steps on gradients of the {engine.name} that are "
                "this rank's alone, in the middle of an accumulation or of a backward pass, or after no_sync(); step "
                "with the optimizer that prepare() has returned, or after the backward pass that ends the step "
                "(accelerator.sync_gradients)"
            )
        if is_plain and engine.has_assigned(optimizer):
            raise RuntimeError(
                f"the {type(optimizer).__name__} steps on gradients of the {engine.name} that no backward pass has "
                "left since its last step: they were assigned, and are this rank's alone; prepare(optimizer), which "
                "reduces them"
            )
        if is_plain:
            # An optimizer that is not prepared has no stepper, which would note it.
            engine.strangers.add(optimizer)
            engine.note_step(optimizer)
    if not is_ours:
        _warn_if_unreduced(optimizer, own)


def _warn_if_unreduced(optimizer: Optimizer, own: Sequence[torch.Tensor]) -> None:
    """Warn once of an optimizer that steps a model which was left out of `prepare`.

    Not an error: the user may reduce the gradients (DistributedDataParallel), or train a model of each rank's own.
    """
    world = current_world()
    hand = world.state.part(by_hand.ByHand)
    is_prepared_for = bool(hand.trainers) and not world.state.deliveries.is_unused
    if world.comm.size == 1 or world.rank != 0 or not is_prepared_for or optimizer in _told or optimizer in hand.agreed:
        return
    if any(isinstance(each, nn.Parameter) and each.grad is not None and not is_distributed(each) for each in own):
        _told.add(optimizer)
        logger.warning(
            "the %s steps parameters of no prepared model: nothing here has reduced their gradients, and if nothing "
            "else does, each rank trains a model of its own; prepare(model, optimizer), or call "
            "unisono.optimizer_step(optimizer)",
            type(optimizer).__name__,
        )


def _is_stepping(engine: Engine) -> bool:
    """Whether a prepared optimizer's step has called this one, as in SAM, and in ZeRO-1 for the rank's part."""
    return any(each.is_stepping(engine) for each in _alive(_steppers))


# Not a decorator, which would replace the function by a handle: an optimizer's class that is pickled by value includes
# the hooks of all steps, which are then pickled by name.
register_optimizer_step_pre_hook(_refuse_step)


def _methods(stepper: Stepper) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Functions that become methods of the optimizer, since schedulers read `step.__func__`."""

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        return stepper.step(closure, **arguments)

    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        stepper.zero_grad(set_to_none)

    return step, zero_grad
