"""What `step` and `zero_grad` of a prepared optimizer do: the step reduces, unscales, guards and clips before it.

The optimizer stays the same object, so that whoever holds it, a scheduler say, steps rightly.

Invariants:
1. Gradients are reduced exactly once per step: by the backward pass, where the model's engine has finished a reduction
   since the last step, and else here.
2. While microbatches accumulate, `step` and `zero_grad` do nothing.
3. All ranks skip a step, or none: they decide by the reduced gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unisono.parallel import optimizer as stepping
from unisono.parallel.gradients import check_presence, check_rounds, reduce_gradients
from unisono.parallel.names import trained_parameters
from unisono.parallel.prepared.accumulation import Accumulation
from unisono.parallel.prepared.engines import Engine
from unisono.parallel.prepared.guard import NanGuard
from unisono.timeline import REDUCE, STEP
from unisono.window import Share
from unisono.world import World

_CHECKED_STEPS = 2  # at first each step's rounds are compared, then those of one in so many
_CHECK_EVERY = 32


class Follower(Protocol):
    """A prepared scheduler."""

    def check_hand(self) -> None:
        """Raise where it was stepped by hand."""


class Stepper:
    """The steps of one prepared optimizer.

    Args:
        optimizer: whose `step` and `zero_grad` become this object's.
        engines: of all prepared models; more may come.
        world: the rank's.
        accumulation: which microbatches make a step.
        clip: clips the gradients of these parameters to a norm over all ranks.
        max_grad_norm: to which each step clips; None for no clipping.
        scaler: of the loss; None for none.
        guard: None for none.

    Attributes:
        num_asked: how often `step` was called.
        schedulers: that follow it.
        num_steps: how often it has stepped: not between microbatches, nor behind an overflow.
        is_scale_due: whether the scaler has seen a step of it since its last update.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engines: Sequence[Engine],
        world: World,
        accumulation: Accumulation,
        clip: Callable[[Sequence[torch.Tensor], float], torch.Tensor],
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        guard: NanGuard | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.num_asked = self.num_steps = 0
        self.schedulers: list[Follower] = []
        self.is_scale_due = False
        self._engines = engines
        self._world = world
        self._accumulation = accumulation
        self._clip = clip
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._guard = guard
        self._seen = {engine: engine.generation for engine in engines}
        self._is_reduced = self._is_unscaled = self._is_inside = False
        self._skipped_in = self._closed_in = (
            0  # the last step, by its number, that was asked for too early, that is over
        )
        self._num_skipped = 0  # in a row
        self._has_reduced = False
        self._is_added_to = False  # a backward pass came behind the reduction
        self._hooks: list[RemovableHandle] = []  # that notice it
        self._plain_step, self._plain_zero = optimizer.step, optimizer.zero_grad
        step, zero = _methods(self)
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a scheduler made before has marked it
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero, optimizer)  # type: ignore[method-assign]
        stepping.prepared.add(optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """`optimizer.step` at the end of an accumulation; else nothing, and None."""
        if self._is_inside:  # the scaler's way to the plain step, which it does not take behind an overflow
            self.num_steps += 1
            return self._plain_step(**arguments)
        self.num_asked += 1
        self._accumulation.look()
        if not self._accumulation.is_boundary():
            self._skip()
            return None
        track = self._world.timeline.loop()
        try:
            for each in self.schedulers:
                each.check_hand()
            if closure is not None:
                self._check_closure()
            with track.span(REDUCE):
                if closure is None:
                    self.reduce(is_stepping=True)
                else:
                    closure = self._reducing(closure)
            with track.span(STEP):
                result = self._step(closure, arguments)
                self._world.backend.mark_step(self._world.device)
        finally:  # whether it was taken or has failed, zero_grad() is next
            self._close()
        for engine in self._engines:
            engine.after_step(self.optimizer)
        track.count("steps")
        return result

    def reduce(self, is_stepping: bool = False) -> None:
        """Make the gradients those of the whole step, unscaled; once, however often it is called before the step.

        Args:
            is_stepping: the step comes next, and no further backward pass.

        Raises:
            RuntimeError: nothing has a gradient, or a backward pass came between two calls and cannot be made good.
        """
        parameters = trained_parameters(self.optimizer)
        if self._is_added_to:
            self._reduce_again()
        if not self._is_reduced:
            late = self._reduce(parameters)
            self._is_reduced = True
            if self._world.world_size > 1 and not is_stepping:
                self._hooks = [each.register_hook(self._notice) for each in late]
        if self._scaler is not None and not self._is_unscaled:
            if not self._accumulation.has_noted:
                raise RuntimeError(
                    "precision='fp16' scales the loss, and this step's gradients were made by loss.backward(); call "
                    "accelerator.backward(loss) instead"
                )
            self._scaler.unscale_(self.optimizer)
            self._is_unscaled = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`optimizer.zero_grad`, but between microbatches of one step."""
        self._accumulation.look()
        if self._is_inside or self.may_zero():
            self._plain_zero(set_to_none)
            self.forget()

    def may_zero(self) -> bool:
        """Whether gradients may be zeroed: nothing of the present step is in them, or it is over."""
        now = self._accumulation
        return now.every == 1 or self._closed_in == now.number or (now.count <= 1 and self._skipped_in != now.number)

    def forget(self) -> None:
        """The gradients are zero."""
        if not self._is_inside:
            if self._guard is not None:
                self._guard.forget(trained_parameters(self.optimizer))
            self._accumulation.clear()
            self._settle()

    def _skip(self) -> None:
        now = self._accumulation
        now.skip()
        self._num_skipped = self._num_skipped + 1 if self._skipped_in >= now.restarted_at else 1
        self._skipped_in = now.number
        if self._num_skipped >= self._accumulation.every:
            raise RuntimeError(
                f"the {type(self.optimizer).__name__} was asked to step {self._num_skipped} times in a row, and never "
                f"on the last microbatch of accumulate={self._accumulation.every}; call its step() on each one, and "
                "where several optimizers step on batches of no prepared loader, let each batch's lines run in "
                "`with accelerator.accumulate():`"
            )

    def _notice(self, gradient: torch.Tensor) -> None:
        """A gradient arrives where reduced ones are."""
        self._is_added_to = True

    def _reduce_again(self) -> None:
        """The ranks' factors of a batch add up to 1, so that what was reduced stays as it is."""
        if self._accumulation.every > 1 or self._is_unscaled:
            raise RuntimeError(
                "a backward pass came behind clip_grad_norm() and before the step, and the gradients that it was added "
                "to are those of all ranks, unscaled; clip behind the last backward pass of a step"
            )
        self._forget_reduction()

    def _forget_reduction(self) -> None:
        self._is_reduced = self._is_added_to = False
        while self._hooks:
            self._hooks.pop().remove()

    def _reduce(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reduce what no backward pass has; which parameters' gradients that were."""
        share, factor = self._accumulation.share()
        late = self._late(parameters)
        if not self._has_reduced:
            stepping.warn_of_foreign_batches(self._world, "optimizer.step()", "prepare(loader) cuts it")
        self._has_reduced = True
        if any(id(each) in engine.reduced for engine in self._engines for each in late):
            check_presence(parameters)  # others may wait in a backward pass that this rank never begins
        if late:
            stepping.check_once(self.optimizer, late, self._world)
            reduce_gradients(late, self._world, share, factor, is_part=True)
        check_presence(parameters)
        if not late and (self.num_steps < _CHECKED_STEPS or self.num_steps % _CHECK_EVERY == 0):
            check_rounds(self._world, share)
        return late

    def _late(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters whose gradients no backward pass has reduced."""
        done = [each.reduced for each in self._engines if each.generation != self._seen.get(each, 0)]
        return [each for each in parameters if not any(id(each) in reduced for reduced in done)]

    def _step(self, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        self._is_inside = True
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        try:
            if closure is not None:
                arguments["closure"] = closure
            else:
                self._finish()
            if self._scaler is not None:
                return self._scaler.step(self.optimizer, **arguments)
            self.num_steps += 1
            return self._plain_step(**arguments)
        finally:
            self._is_inside = False

    def _finish(self) -> None:
        """Between the reduction and the step."""
        parameters = trained_parameters(self.optimizer)
        if self._guard is not None:
            self._guard.check(parameters)
        if self._max_grad_norm is not None:
            self._clip(parameters, self._max_grad_norm)

    def _check_closure(self) -> None:
        if self._scaler is not None:
            raise RuntimeError("precision='fp16' and a closure do not go together; take precision='bf16'")
        if self._accumulation.every > 1:
            raise RuntimeError(
                f"accumulate={self._accumulation.every} and a closure do not go together: it would compute the last "
                "microbatch's gradients only; pass accumulate=1, and go through the microbatches in the closure"
            )

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduce() -> Share | None:
            share, _ = self._accumulation.share()
            self.reduce(is_stepping=True)
            self._finish()
            self._settle()
            return share

        return stepping.reducing(closure, self._accumulation.clear, reduce, self._world)

    def _settle(self) -> None:
        """The gradients that are held belong to no further step of this optimizer."""
        self._forget_reduction()
        self._seen = {engine: engine.generation for engine in self._engines}
        if self._is_unscaled:
            self._is_unscaled, self.is_scale_due = False, True

    def _close(self) -> None:
        self._settle()
        self._closed_in, self._num_skipped = self._accumulation.number, 0
        self._accumulation.close(self.optimizer)


def _methods(stepper: Stepper) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Functions that become methods of the optimizer: schedulers look at `step.__func__`."""

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        return stepper.step(closure, **arguments)

    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        stepper.zero_grad(set_to_none)

    return step, zero_grad
