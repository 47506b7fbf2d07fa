"""Passes: backward passes through an Accelerator's models, detected by hooks on outputs and on parameters.

The outputs of a forward pass carry its batch to the backward pass; only backward passes are counted. When a backward
pass reaches a model, through an output or, if it bypasses the outputs, through the first of its parameters, the ledger
gives the weight of the gradients and whether they end a step. If so, they are reduced when the pass ends: every `.grad`
is then the step's.

A model's gradients are scaled as they arrive at its parameters, by the part of its batch, so that everything computed
from the batch is scaled, a gradient penalty too. If batches with different parts meet in one backward pass, the
gradients that flow from the loss into the model differ, and they are scaled relative to the first of them.

`torch.autograd.grad`, and `backward(inputs=...)` of other tensors, leave nothing in `.grad`, and are not counted. A
backward pass that runs inside another one, as in reentrant checkpoints, is a part of that one.

*Threads:* the rank's; on accelerators also autograd's, which runs the hooks of one device one after the other.

Invariant: a hook belongs to the backward pass that calls it, by autograd's number of that pass. An interrupted pass
leaves nothing that another one could mistake for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch

from unisono.comm.selection import translate_errors
from unisono.deliveries import check_counts
from unisono.parallel.gradients import scaled
from unisono.parallel.ledger import Crossings, refuse_crossed
from unisono.parallel.microbatches import Bound, Microbatches
from unisono.parallel.strategies.engine import Begun, Engine, is_left_at
from unisono.parallel.strategies.sharded import is_distributed
from unisono.parallel.weak_methods import weak_method
from unisono.torch_private import current_graph_task_id, queue_callback
from unisono.tree import tensors


@dataclass(eq=False)
class _Pass:
    """A backward pass that was counted.

    Attributes:
        bound: its batch.
        part: the part of the microbatch, if the user gave it; None if each output knows its own.
        scale: the scale of the microbatch, for what arrives at parameters.
        is_reducing: whether it ends a step.
        engines: those of the models whose gradients it reduces when it ends; none after an interrupt.
    """

    bound: Bound
    part: float | None
    scale: float
    is_reducing: bool
    engines: list[ref[Engine]] = field(default_factory=list)


@dataclass(eq=False)
class _Run:
    """A backward pass through one model.

    Attributes:
        task: autograd's number of the backward pass.
        bound: the batch that the first output carried; None if the pass has bypassed the outputs.
        counted: None if nothing arrives in `.grad`, or not yet.
        part: that of the batch that came first.
        is_mixed: whether outputs of another batch passed before the pass was counted.
    """

    task: int
    bound: Bound | None
    counted: _Pass | None = None
    part: float = 1.0
    is_mixed: bool = False


class Passes:
    """The backward passes of one rank through the models of one Accelerator.

    Args:
        microbatches: the rank's.

    Attributes:
        went_past: whether a backward pass of the current step was not begun by `backward`.
    """

    def __init__(self, microbatches: Microbatches) -> None:
        self.microbatches = microbatches
        self.went_past = False
        self._world, self._ledger = microbatches.world, microbatches.ledger
        self._crossings = self._world.state.part(Crossings)
        self._is_called = False  # `backward`, and it runs
        self._begun: _Pass | None = None  # by `backward`, with the user's weight and batch
        self._running: dict[int, _Pass] = {}  # by autograd's number
        # Those that have not ended: autograd drops a pass's callback when it ends, with or without an error.
        self._open: WeakValueDictionary[int, Callable[[], None]] = WeakValueDictionary()
        self._engines: WeakKeyDictionary[Engine, None] = WeakKeyDictionary()  # in the order of their first passes

    def bind(self, values: Any, syncs: bool = True) -> Bound:
        """Find the batch that the inputs of a forward pass come from, for its outputs to carry."""
        task = current_graph_task_id()
        if task < 0:  # in no backward pass
            self._running.clear()  # an interrupted pass never ends
        elif task in self._running:  # a checkpoint recomputes what it has not kept
            return self._running[task].bound
        return self.microbatches.bind(values, syncs)

    def watch(self, engine: Engine, outputs: Any, bound: Bound) -> None:
        """Watch for a backward pass to reach these outputs of the model."""
        if engine.is_released:
            return
        # Parameters first: a loss may bypass the outputs (a penalty), and its gradients must be scaled as well.
        self.watch_parameters(engine)
        arrive = partial(weak_method(self._arrive), ref(engine), bound)
        found = tensors(outputs)
        for each in found:
            if each.requires_grad:
                each.register_hook(arrive)
        # Metrics and a second forward pass on these outputs then find the same batch.
        if bound.batch is not None:
            self._world.state.deliveries.know(found, bound.batch)

    def know(self, inputs: Any, outputs: Any) -> None:
        """Associate the outputs of a forward pass without gradients with the batch of its inputs."""
        self._world.state.deliveries.know_computed(inputs, outputs)

    def watch_parameters(self, engine: Engine) -> None:
        """Watch for gradients to arrive at the model's parameters, and scale them; again, when others train."""
        self._engines[engine] = None
        for each in engine.leaves():
            # A hook stays for the life of its parameter; a second one would scale twice.
            if each not in engine.hooks:
                engine.hooks[each] = each.register_hook(partial(weak_method(self._arrive_at_leaf), ref(engine)))

    def has(self, parameters: Set[torch.Tensor]) -> bool:
        """Whether some of these are parameters of the models."""
        return any(each in parameters for engine in list(self._engines) for each in engine.hooks)

    def backward(
        self, loss: torch.Tensor, weight: float | torch.Tensor | None, batch: Any, retain_graph: bool = False
    ) -> None:
        """Run `loss.backward()` with the user's weight or batch.

        Args:
            weight: the number of samples, or tokens. None uses the batch's.
            batch: tensors of the batch. None uses those that the model's inputs came from.

        Raises:
            TypeError: the loss was computed from the parts of parameters that strategy="fsdp" leaves on each rank.
        """
        if is_distributed(loss):
            raise TypeError(
                "the loss is a DTensor: a penalty on parameters that strategy='fsdp' has sharded was added to it; give "
                "the penalty a backward pass of its own, penalty.backward(), or let the optimizer add it "
                "(weight_decay=)"
            )
        self._is_called = True
        try:
            if weight is not None or batch is not None:
                named = None if batch is None else Bound(tuple(self._world.state.deliveries.named(batch)))
                self._begun = self._count(named or self.microbatches.bound, weight, is_told=True)
                # Scaled here, once; the hooks on the leaves then find a scale of 1.
                loss = loss if self._begun.scale == 1 else loss * self._begun.scale
                self._begun.scale = 1.0
            with translate_errors(self._world.comm):
                loss.backward(retain_graph=retain_graph)
        finally:
            self._is_called, self._begun = False, None

    def adopt(self, engine: Engine) -> None:
        """Count gradients that were assigned by hand: those of the batch of the last forward pass. A collective.

        Raises:
            ValueError: their weight is not known.
        """
        bound = self.microbatches.bound
        self.microbatches.check_alike()
        self._count(bound)
        engine.adopt(self.microbatches.part(bound))

    def forget(self) -> None:
        """Note that the gradients of one optimizer were zeroed: the others' microbatches still count."""
        if self._ledger.every == 1 or not any(each.is_held or each.is_reduced for each in self._engines):
            self.microbatches.forget()
        self.went_past = False

    def weight(self) -> float:
        """Return the weight of the current batch's gradients on this rank relative to other ranks; while a backward
        pass runs, as far as it is known."""
        task = current_graph_task_id()
        for engine in self._engines if task >= 0 else ():
            if engine.passing is not None and engine.passing.task == task:
                part: float = engine.passing.part
                return part
        return self.microbatches.part(self.microbatches.bound)

    def _count(self, bound: Bound, weight: float | torch.Tensor | None = None, is_told: bool = False) -> _Pass:
        """Count a backward pass.

        Args:
            is_told: whether the user gave the weight.

        Raises:
            ValueError: its batch is not known, and this matters.
        """
        # Before the claim is entered: a refused pass must leave the ledger unchanged.
        self.microbatches.check_told(bound)
        if weight is None and not self._ledger.is_sum:
            check_counts(bound.candidates, by_part=not self._ledger.is_mean)
        claim = self._ledger.claim(bound.batch, weight, self._world)
        self.microbatches.enter(claim, bound)
        part = claim.part(self._world.comm.size) if is_told else None
        return _Pass(bound, part, self._ledger.scale(claim), self._ledger.is_full())

    # In a backward pass.

    def _arrive(
        self, engine: Callable[[], Engine | None], bound: Bound, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Handle a gradient that flows from the loss into an output of the model."""
        model = engine()
        if model is None or gradient is None:
            return None
        run = self._run(model, bound)
        if run.counted is None:
            run.is_mixed |= run.bound is None or run.bound.batch is not bound.batch
            return None
        part = run.part
        if run.counted.part is None:
            part = self.microbatches.part(bound)
            if bound.batch is not None and not self._ledger.is_sum and not self.microbatches.is_counted(bound):
                self._ledger.join(bound.batch)
        # Zeros, not a product: the mean over no samples is NaN, and NaN * 0 stays NaN.
        if part == 0:
            return torch.zeros_like(gradient)
        # The first output belonged to a batch of weight 0; the ratio below would divide by it.
        if run.part == 0:  # earlier gradients were set to zero there
            run.part = part
        # Leaves multiply by the part of the first output, so other outputs are scaled relative to it.
        return None if part == run.part else gradient * (part / run.part)

    def _arrive_at_leaf(
        self, engine: Callable[[], Engine | None], gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Handle a gradient that arrives at a parameter of the model; None if autograd has none."""
        model = engine()
        if model is None:
            return None
        run = self._run(model, None)
        if run.counted is None:
            return None
        if self._crossings.task in (run.task, current_graph_task_id()):
            refuse_crossed(run.part)
        return scaled(run.counted.scale * run.part, gradient)

    def _run(self, engine: Engine, bound: Bound | None) -> _Run:
        """Return the current backward pass through that model; begin it when it reaches the model.

        Args:
            bound: the batch that an output carries; None if the pass has bypassed the outputs.
        """
        task = current_graph_task_id()
        run: _Run | None = engine.passing
        if run is not None and run.task == task:
            return run
        # Reentrant checkpointing runs a backward pass inside of the one that has reached the model.
        outer = run if run is not None and run.task in self._open else None
        # torch.autograd.grad asks for gradients without leaving them in .grad: nothing to reduce.
        if not any(is_left_at(each) for each in engine.hooks if each.requires_grad):
            run = _Run(task, bound)
            if outer is None:
                engine.passing = run
                self._watch_end(task)  # if all parameters are in reentrant checkpoints, they are reached from these
            engine.pass_by()
            return run
        if outer is None:
            outer = _Run(task, bound)
        if outer.counted is None:
            self._count_run(engine, outer)
        return outer

    def _count_run(self, engine: Engine, run: _Run) -> None:
        """Count a backward pass that leaves gradients at the model's parameters."""
        # One loss may pass through several models: the pass is counted once, by the first that it reaches.
        counted = self._running.get(run.task)
        told = counted or self._begun
        if run.is_mixed and (told is None or told.part is None):
            raise RuntimeError(
                f"outputs of the {engine.name} from several batches met in one backward pass, and all parameters that "
                "it has reached are in checkpoints with use_reentrant=True, so their weights cannot be applied; pass "
                "use_reentrant=False, or call backward() for the loss of each batch"
            )
        counted = counted or self._begin(run.task, run.bound)
        bound = run.bound or counted.bound
        run.counted, run.part = counted, self.microbatches.part(bound) if counted.part is None else counted.part
        engine.passing = run
        engine.begun = Begun(self._ledger.step, self._ledger.count, self.microbatches.num_asked)
        if reduces := counted.is_reducing and bound.syncs:
            counted.engines.append(ref(engine))
        engine.begin(reduces)

    def _begin(self, task: int, bound: Bound | None) -> _Pass:
        """Count the running backward pass, if `backward` has not."""
        self.went_past = self.went_past or not self._is_called
        counted = self._running[task] = self._begun or self._count(bound or self.microbatches.find(()))
        self._watch_end(task)
        return counted

    def _watch_end(self, task: int) -> None:
        """Have `_end` called at the end of the running backward pass, unless it ends with an error."""
        if task not in self._open:
            self._open[task] = ending = partial(weak_method(self._end), task)
            queue_callback(ending)

    def _end(self, task: int) -> None:
        """Finish a backward pass that has ended without an error."""
        ended = self._running.pop(task, None)
        for each in ended.engines if ended is not None else ():
            if (engine := each()) is not None:
                engine.finish()
