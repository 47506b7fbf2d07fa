"""The forward and backward passes through an Accelerator's models, as the loop asks for them. The outputs of a forward
pass carry the origin of its inputs to the backward pass, which `backward.py` counts; what passes have left unreduced is
reduced at a step.

*Threads:* the rank's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Set
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from unisono.comm.selection import raise_translated
from unisono.report.timeline import BACKWARD
from unisono.torch_private import SEQUENCE_NUMBER, current_graph_task_id, is_in_torch_func
from unisono.training import claims
from unisono.training.backward import BackwardPasses
from unisono.training.claims import Origin, find_origin
from unisono.training.finiteness import LOSS, Finiteness
from unisono.training.losses import LossWatch, warn_of_unprepared
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import is_distributed
from unisono.training.strategies.weak import weak_method
from unisono.tree import tensors

logger = logging.getLogger(__name__)


class Passes(BackwardPasses):
    """The passes of one rank through the models of one Accelerator."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._finiteness = self._world.state.part(Finiteness)
        self._is_checked = False  # whether a model is prepared, at the first loss
        self._losses = LossWatch(steps.world, weak_method(self._look_at_loss))

    def register_engine(self, engine: Engine) -> None:
        """Begin to watch a model, before its first pass."""
        self._engines.add(engine)
        if self._world.comm.size > 1 or self.steps.policy.is_mean:
            self._losses.begin()
        weak: tuple[ref[Any], ref[Engine]] = ref(self), ref(engine)
        engine.watch_leaves(partial(self._arrive_at_leaf, *weak), partial(self._notice_arrival, *weak))
        if self.steps.step.policy.is_mean:
            engine.scale_leaves()

    def find_origin(self, engine: Engine, values: Any, syncs: bool = True) -> Origin:
        """Find where the inputs of a forward pass come from, for its outputs to carry."""
        task = current_graph_task_id()
        if task < 0:  # in no backward pass
            if self._open:
                self._drop_interrupted()
        elif task in self._running:  # a checkpoint recomputes what it did not keep
            found = self._world.state.deliveries.find(values)
            if not found:
                return self._running[task].origin
            return Origin(found, self._world, syncs=syncs, optimizers=engine.trainers.optimizers_of)
        steps = self.steps
        # Gradients that were assigned by hand count at the step, after it was requested.
        if steps.origin is None and (steps.begins_step() or not steps.is_recent()):
            self._claims.clear()
        inputs = tensors(values)
        self.origin = steps.origin = origin = find_origin(self._world, inputs, syncs, engine.trainers.optimizers_of)
        origin.is_chained = any(map(attrgetter("grad_fn"), inputs))
        self._claims.add(origin.claim)
        if origin.part != 1 or steps.step.policy.is_mean or steps.policy.is_mean:
            engine.scale_leaves()
        return origin

    def hook_outputs(self, engine: Engine, outputs: Any, origin: Origin) -> None:
        """Watch for a backward pass to reach these outputs of the model."""
        if engine.hooks.is_removed:
            return
        found = tensors(outputs)
        if any(map(is_in_torch_func, found)) and engine.members.is_out_of_reach():
            return
        arrive = partial(self._arrive_at_output, ref(self), ref(engine), origin)
        computed, shows_pass = [], False
        for each in found:
            if each.is_leaf and each.requires_grad:
                continue  # a parameter: a hook would outlive this pass, and its memory belongs to no batch
            computed.append(each)
            if each.requires_grad:
                each.register_hook(arrive)
                shows_pass = True
                if self._losses.left and each.grad_fn is not None:
                    self._losses.begun = getattr(each.grad_fn, SEQUENCE_NUMBER)()
        if not shows_pass:
            engine.passes.may_bypass = True  # by what an object holds that is not a container of tensors
        # Metrics and a second forward pass on these outputs then find the same batch.
        if origin.batch is not None:
            self._world.state.deliveries.know(computed, origin.batch)

    def has(self, parameters: Set[torch.Tensor]) -> bool:
        """Whether some of these are parameters of the models."""
        return any(each in parameters for engine in self._engines() for each in engine.leaves())

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None, batch: Any, retain_graph: bool = False
    ) -> None:
        """Run `loss.backward()` with the user's weight or batch, as `unisono.backward`."""
        if type(loss) is not torch.Tensor and is_distributed(loss):
            raise TypeError(
                "the loss is a DTensor: a penalty on parameters that strategy='fsdp' has sharded was added to it; give "
                "the penalty a backward pass of its own, penalty.backward(), or let the optimizer add it "
                "(weight_decay=)"
            )
        if not self._is_checked:
            self._is_checked = True
            if not self._engines():
                warn_of_unprepared(self._world)
        if self._losses.left and self.steps.policy.is_mean:
            self._losses.begin()
        timeline = self._world.timeline
        track = timeline.backward = timeline.loop()
        before = track.switch(BACKWARD) if timeline.is_recorded else track.phase
        self._call = weight, None
        try:
            if batch is not None:
                self._call = weight, claims.named_origin(batch, self._world)
            if weight is not None or batch is not None:
                for engine in self._engines():
                    engine.scale_leaves()
            loss.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            raise_translated(error, self._world.comm)
            raise
        finally:
            self._call = timeline.backward = None
            if track.phase != before:
                track.switch(before)

    def look(self, loss: torch.Tensor) -> None:
        """Check whether the loss of the last pass, without a scale, was finite."""
        self._finiteness.look(loss, LOSS, self.steps, self._trained)

    def _trained(self) -> list[torch.Tensor]:
        return [each for engine in self._engines() for each in engine.members.trained()]

    def _look_at_loss(self, loss: torch.Tensor) -> None:
        """If the loss of a pass that begins is not a mean over the samples, say why."""
        weight, named = self._call or (None, None)
        if weight is not None:
            return
        batch = (named or self.origin).batch
        rows, epoch = (None, range(0)) if batch is None else (batch.rows, batch.samples_of_epoch())
        if said := self._losses.describe(loss, rows, epoch):
            logger.warning(said)

    def reduce_assigned(self, engine: Engine) -> None:
        """Count gradients that were assigned by hand: those of the batch of the last forward pass. A collective."""
        if len(parts := self._parts()) > 1:
            raise ValueError(
                "gradients were assigned or added by hand, and may come from several batches, where this rank had "
                f"different parts ({', '.join(f'{each:.3g}' for each in sorted(parts))} of an even one), so one "
                "number cannot weigh them; let accelerator.backward(loss) leave them in .grad, or step on each "
                "batch and zero_grad() after each step"
            )
        origin = self.origin if self._claims else find_origin(self._world)  # without a forward pass of the model
        self._count_late(origin, engine)
        engine.reduce_assigned(origin.part)

    def reduce(self, engine: Engine, optimizer: Optimizer | None = None) -> None:
        """Reduce what backward passes have left on this rank alone, at a step of the optimizer. A collective."""
        if engine.gradients.has_bypassed():
            origin = self._origin_of_bypass(engine)
            if not self.steps.is_recent():
                self._count_late(origin, engine)
            if origin.part != 1:
                raise claims.bypassed(engine.name)
        engine.reduce(optimizer)

    def note_zeros(self, zeroed: Collection[Engine]) -> None:
        """Note that all gradients of these models were zeroed; microbatches of the others still count."""
        others = [each.gradients for each in self._engines() if each not in zeroed]
        if not any(held.is_own or held.is_current for held in others):
            self.steps.drop_step()
            self._claims.clear()
        self.went_past = False
