"""`step` and `zero_grad` of a prepared optimizer. A step reduces the gradients that backward passes have not reduced,
then unscales, checks and clips them, and calls the optimizer's own step.

The optimizer stays the same object, so that its holders, such as a scheduler, use the new methods.

Invariants:
1. While microbatches accumulate, `step` and `zero_grad` do nothing.
2. Either all ranks skip a step, or none does: the decision depends only on reduced gradients, and on numbers that are
   equal on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import methodcaller
from types import MethodType
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unisono.batches.deliveries import Loop
from unisono.comm.selection import raise_translated
from unisono.report.timeline import REDUCE, STEP
from unisono.torch_private import STEP_CALLED, STEP_WRAPPED, current_graph_task_id
from unisono.training import optimizer as by_hand
from unisono.training.clipping import clip_grad_norm
from unisono.training.digests import Digests
from unisono.training.finiteness import GRADIENT, Finiteness, small_gradient
from unisono.training.gradients import check_presence
from unisono.training.parameter_names import has_gradient, trained_parameters
from unisono.training.passes import Passes
from unisono.training.prepared.scaler import LossScaler
from unisono.training.prepared.step_checks import (
    check_added,
    check_closure,
    refuse_assigned,
    refuse_inside_backward,
    steppers,
    stepping,
)
from unisono.training.rules import TAKEN
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import holds_any

logger = logging.getLogger(__name__)


class Taken(NamedTuple):
    """The progress of an optimizer.

    Attributes:
        steps: the number of steps taken.
        batches: the number of batches of the user's loaders that these steps consumed.
        device_steps: the number of steps that one device would have taken.
    """

    steps: int = 0
    batches: int = 0
    device_steps: int = 0

    def since(self, before: Taken, unit: str) -> int:
        """How many units one call advances: the rounded mean per optimizer step since `before`, or 1.

        A script that calls its scheduler every n optimizer steps does so on one device, too. There the same batches
        make more steps, and so more calls; one call here replaces them all.
        """
        counted = {"batch": self.batches - before.batches, "device_step": self.device_steps - before.device_steps}
        steps = self.steps - before.steps
        return round(counted.get(unit, steps) / steps) if steps else 1


_taken = partial(tuple.__new__, Taken)  # without a Python call, in each step


class Stepper:
    """The steps of one prepared optimizer: its `step` and `zero_grad` are replaced by those of this object.

    Attributes:
        world, steps: of its rank.
        num_asked: the number of calls of `step`.
        checks: functions of the schedulers that follow it, called before each step that is taken.
        taken: the steps taken, without the calls that did not step: between microbatches, and after an overflow.
        find_engines: looks for the prepared models that have some of its parameters; set by `PreparedObjects`.
        was_skipped: whether the last due step was skipped, after an overflow or because no sample counted.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        passes: Passes,
        max_grad_norm: float | None,
        scaler: LossScaler | None,
        step: Callable[..., Any],
        digests: Digests | None,
    ) -> None:
        self.optimizer = optimizer
        self.num_asked = 0
        self.taken = Taken()
        self.was_skipped = False
        self.checks: list[Callable[[], None]] = []
        self._engines: list[Engine] = []  # of the models that have some of the optimizer's parameters
        self._passes, self.steps, self.world = passes, passes.steps, passes.steps.world
        self._max_grad_norm = max_grad_norm
        self._scaler, self._digests = scaler, digests
        self._has_warned = False
        self._num_groups = len(optimizer.param_groups)
        self.find_engines: Callable[[Stepper], None] = lambda stepper: None
        self._plain_step, self._plain_zero = step, optimizer.zero_grad
        # What others have patched on the instance, such as a scheduler's counter of steps, for `release` to restore.
        self._own = {name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)}
        step, zero = _methods(self)
        if hasattr(optimizer.step, STEP_WRAPPED):  # a scheduler created earlier has marked it
            setattr(step, STEP_WRAPPED, True)
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero, optimizer)  # type: ignore[method-assign]
        self._hook: RemovableHandle | None = None
        with suppress(AttributeError):  # a wrapper whose class does not call torch's `__init__` has no hooks
            self._hook = optimizer.register_load_state_dict_pre_hook(self._note_load)
        by_hand.prepared.add(optimizer)
        steppers[self] = None

    def trains(self, engine: Engine) -> bool:
        """Whether the model is known to have some of the optimizer's parameters."""
        return any(each is engine for each in self._engines)

    def train(self, engine: Engine) -> None:
        """Record that a model with some of the optimizer's parameters is prepared."""
        self._engines.append(engine)
        engine.add_trainer(self.optimizer).is_unprepared = False

    def release(self) -> None:
        """Restore the optimizer's own methods."""
        # Methods of the class are not assigned as attributes: bound to the optimizer, they would keep it alive.
        for name in ("step", "zero_grad"):
            vars(self.optimizer).pop(name, None)
        for name, own in self._own.items():
            setattr(self.optimizer, name, own)
        if self._hook is not None:
            self._hook.remove()
        by_hand.prepared.discard(self.optimizer)
        self._engines.clear()

    def _note_load(self, *_: Any) -> None:
        for engine in self._engines:
            engine.note_load()

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Run `optimizer.step` at the end of an accumulation; otherwise do nothing and return None."""
        if id(self.optimizer) in stepping:  # called by the scaler, unless gradients have overflowed
            self._count_step()
            return self._plain_step(**arguments)
        self.num_asked += 1
        if len(self.optimizer.param_groups) != self._num_groups:  # perhaps parameters of another prepared model
            self._num_groups = len(self.optimizer.param_groups)
            self.find_engines(self)
            check_added(self.optimizer, self._engines, self.steps)
        if current_graph_task_id() >= 0 and not self.steps.is_plain:
            refuse_inside_backward(self.optimizer)
        if closure is not None:
            check_closure(self.steps, self._scaler is not None)
        if not self.steps.request(self.optimizer):
            self._skip_step()
            return None
        track, before = self.world.timeline.loop(), self.taken.steps
        self.was_skipped = False
        try:
            # Before anything is changed: a scheduler that was stepped by hand has made this step's learning rate wrong.
            for check in self.checks[:]:  # one may be for the first steps only
                check()
            if closure is not None:
                closure = self._reducing_closure(closure)
            elif self.steps.is_empty() and not holds_any(trained_parameters(self.optimizer), self.world):
                for engine in self._engines:
                    engine.skip_step(self.optimizer)
                track.count("skipped steps")
                self.was_skipped = True
                return None
            else:
                self.reduce()
            phase = track.switch(STEP)  # no `with`, which would cost four calls
            try:
                result = self._step(closure, arguments)
                if self.world.backend.is_lazy:
                    self.world.backend.mark_step(self.world.device)
            finally:
                track.switch(phase)
        except RuntimeError as error:
            raise_translated(error, self.world.comm)
            raise
        finally:  # zero_grad() is next, whether the step succeeded or failed
            if self._scaler is not None:
                self._scaler.let_go(self.optimizer)
            for engine in self._engines:
                engine.note_step(self.optimizer)
        for engine in self._engines:
            engine.after_step(self.optimizer)
        if self._digests is not None:
            self._digests.note_step(self.taken.steps, self._engines)
        track.counts["steps"] += 1
        if self.world.timeline.at_step is not None:
            self.world.timeline.at_step(track.counts["steps"], self.taken.steps)
        self.was_skipped = self.taken.steps == before
        return result

    def reduce(self) -> None:
        """Reduce and unscale the gradients of the whole step; repeated calls before the step do nothing. RuntimeError:
        no parameter has a gradient; or, with a scaler, a backward pass ran without it."""
        is_mean = self.steps.step.policy.is_mean
        for engine in () if self.steps.is_plain else self._engines:
            if engine.agreement.before_load is not None:
                engine.agreement.announce_load()
            if is_mean and engine.gradients.is_changed():
                refuse_assigned(self.optimizer, self.steps)
            if engine.is_due(self.optimizer):
                with self.world.timeline.loop().span(REDUCE):
                    self._passes.reduce(engine, self.optimizer)
            # With accumulation, assigned gradients belong to no counted microbatch; `_skip_step` refuses them.
            elif not is_mean and engine.has_assigned(self.optimizer):
                with self.world.timeline.loop().span(REDUCE):
                    self._passes.reduce_assigned(engine)
        if not has_gradient(self.optimizer):
            check_presence(trained_parameters(self.optimizer))
        if self._digests is not None:
            self._digests.note_gradients(self.taken.steps + 1, self._engines)
        # Once per step: clipping by the user may have unscaled them already.
        if self._scaler is not None and self.optimizer not in self._scaler.unscaled:
            if self._passes.went_past:
                raise RuntimeError(
                    "mixed_precision='fp16' scales the loss, and this step's gradients were made by loss.backward(); "
                    "call accelerator.backward(loss) instead"
                )
            if any(engine.is_local for engine in self._engines):
                self._scaler.share_overflow(self.optimizer, self.world)
            self._scaler.unscale_(self.optimizer)
            self.look_again()

    def look_again(self) -> None:
        """Record that this package has changed the gradients, and not the user."""
        for engine in self._engines:
            engine.gradients.look_again()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`optimizer.zero_grad`, which does nothing between microbatches of one step."""
        if id(self.optimizer) in stepping or not self.steps.step.policy.is_mean or self.may_zero():
            self._plain_zero(set_to_none)
            self.note_zeros()

    def may_zero(self) -> bool:
        """Whether gradients may be zeroed, as `Machine.zeroes` says."""
        return self.steps.zeroes(self.optimizer, [each.gradients for each in self._engines])

    def note_zeros(self) -> None:
        """Record that the gradients are zero."""
        # An optimizer that zeroes gradients within its own step, such as SAM, is still in that step.
        if id(self.optimizer) not in stepping:
            self._passes.note_zeros(list(filter(methodcaller("note_zeros", self.optimizer), self._engines)))
            if self._scaler is not None:
                self._scaler.let_go(self.optimizer)

    def note_step_within(self) -> None:
        """Record a step of another optimizer on its parameters, such as SAM's base optimizer: schedulers count it."""
        self.num_asked += 1
        self._count_step()

    def is_stepping(self, engine: Engine) -> bool:
        """Whether the optimizer's own step is running, on parameters of this model."""
        return id(self.optimizer) in stepping and engine in self._engines

    def loop_of_last_step(self) -> Loop | None:
        """The loop over a loader in which the last step was taken, if it has not ended."""
        batch = self.steps.step.last
        return batch.loop if batch is not None and batch.loop.is_open else None

    def _count_step(self) -> None:
        steps, batches, device_steps = self.taken
        dealt = self.steps.step.num_dealt()
        device_steps += math.ceil(dealt / self.steps.step.per_device_step())
        self.taken = _taken((steps + 1, batches + dealt, device_steps))

    def _skip_step(self) -> None:
        """Handle a request that is not taken: check that some request could be."""
        parameters = trained_parameters(self.optimizer)
        if not self.steps.step.visits or self.steps.step.state == TAKEN:
            check_presence(parameters)
        is_new = not self.steps.step.visits and any(each.grad is not None and each.grad.any() for each in parameters)
        if is_new or any(engine.gradients.is_changed() for engine in self._engines):
            refuse_assigned(self.optimizer, self.steps)
        for engine in self._engines:
            engine.set_aside(self.optimizer)
        if self.steps.has_unknown_end() and not self._has_warned and self.world.rank == 0:
            self._has_warned = True
            logger.warning(
                "gradient_accumulation_steps=%d, and the batches come from no prepared loader, or no prepared model is "
                "called: nothing says where a loop ends, so that what is left of it at its end is not stepped on; "
                "prepare(loader), say model.mark_forward_method(name) if the loop calls a method of the model, or let "
                "each batch's lines run in `with accelerator.accumulate():`",
                self.steps.step.policy.every,
            )

    def _step(self, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        stepping.add(id(self.optimizer))
        setattr(self.optimizer, STEP_CALLED, True)  # for torch's schedulers
        try:
            if closure is not None:
                arguments["closure"] = closure  # reduces and finishes the gradients in each of its calls
            elif self._max_grad_norm is not None or not self.taken.steps:
                self._finish()
            if self._passes.went_past and self.world.rank == 0:  # no loss was seen
                self._look_at_gradients()
            if self._scaler is not None:
                return self._scaler.step(self.optimizer, **arguments)
            self._count_step()
            return self._plain_step(**arguments)
        finally:
            stepping.discard(id(self.optimizer))

    def _look_at_gradients(self) -> None:
        """Check whether the gradients are finite."""
        finiteness, trained = self.world.state.part(Finiteness), trained_parameters(self.optimizer)
        if not finiteness.is_known and (gradient := small_gradient(trained)) is not None:
            finiteness.look(gradient, GRADIENT, self.steps, lambda: trained)

    def _finish(self) -> None:
        """Clip the gradients, between the reduction and the step."""
        if not self.taken.steps:
            by_hand.warn_of_foreign_batches(self.world)
        if self._max_grad_norm is not None:
            clip_grad_norm(trained_parameters(self.optimizer), self._max_grad_norm, self.world)

    def _reducing_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduce() -> float:
            self.reduce()
            self._finish()
            return self.steps.fraction()

        return by_hand.reducing(closure, reduce, self.world)


def _methods(stepper: Stepper) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Functions that become methods of the optimizer, since schedulers read `step.__func__`."""

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        return stepper.step(closure, **arguments)

    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        stepper.zero_grad(set_to_none)

    return step, zero_grad
