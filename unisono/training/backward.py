"""Backward passes through an Accelerator's models: each is counted in a step, and its gradients are scaled on arrival.
`passes.py` has what the loop does around them.

The outputs of a forward pass carry the origin of its inputs to the backward pass. When that reaches the model, the pass
is counted, and it is known whether it makes its step final. If so, the gradients are reduced when the pass ends.

Gradients are scaled as they arrive at the parameters, so that a gradient penalty is scaled, too. That needs a hook on
each parameter, so they have one only while the part of a batch is not 1, steps have several microbatches, or gradients
were differentiated (`create_graph=True`): a second pass through them may bypass the outputs. Other passes that bypass
the outputs are noticed by `Arrivals`, when their first gradient arrives, and counted then if their batch is even;
otherwise they are refused. If batches with different parts meet in one backward pass, the gradients that flow from the
loss into the model differ, and are scaled relative to the first of them.

`torch.autograd.grad`, and `backward(inputs=...)` of other tensors, leave nothing in `.grad`, and are not counted. A
backward pass that runs inside another one, as in reentrant checkpoints, is a part of that one.

*Threads:* the rank's; on accelerators also autograd's, which runs the hooks of a device one at a time.

Invariant: a hook belongs to the backward pass that calls it, by autograd's number of that pass. An interrupted pass
leaves nothing that another pass could mistake for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from operator import call
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from unisono.torch_private import current_graph_task_id, queue_callback
from unisono.training import claims
from unisono.training.claims import Claim, Crossings, Origin, find_origin
from unisono.training.gradients import scaled
from unisono.training.machine import Visit
from unisono.training.rules import COLLECTING
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.held import is_left_at
from unisono.training.strategies.weak import WeakList, weak_method


@dataclass(eq=False)
class _Pass:
    """A backward pass that was counted."""

    origin: Origin
    visit: Visit
    part: float | None  # of the microbatch, if the user has named its weight or batch; else each output knows its own
    reduces: bool  # whether it makes the step final
    shown: set[Any] | None = None  # the batches of the outputs that it has reached, if its own was a guess
    # Of the models that it has reached; whether they may reduce, and whether they do when it ends.
    engines: list[tuple[ref[Engine], bool, bool]] = field(default_factory=list)


@dataclass(eq=False)
class _Run:
    """A backward pass through one model."""

    task: int  # autograd's number of it
    origin: Origin | None  # that the first output carried; None if the pass has bypassed the outputs
    counted: _Pass | None = None  # None if nothing arrives in `.grad`, or not yet
    part: float = 1.0  # that of the batch that came first
    is_mixed: bool = False  # whether outputs of another batch passed before the pass was counted
    is_taken: bool = False  # whether torch.autograd.grad has asked for gradients of parameters


class BackwardPasses:
    """What happens in the backward passes of one rank through the models of one Accelerator.

    Attributes:
        origin: of the last forward pass.
        went_past: whether a backward pass of the current step was not begun by `Passes.backward`.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps, self._world = steps, steps.world
        self.origin = Origin((None,), steps.world)
        self.went_past = False
        self._crossings = self._world.state.part(Crossings)
        self._claims: set[Claim] = set()  # of the batches of the forward passes since the last request
        self._call: tuple[Any, Origin | None] | None = None  # while `Passes.backward` runs: the weight, and the batch
        self._running: dict[int, _Pass] = {}  # by autograd's number
        # Those that do not reach a leaf of a model themselves, with the gradients that had arrived there.
        self._passed_by: dict[int, tuple[ref[Engine], _Run, int]] = {}
        # Those that have not ended: autograd drops a pass's callback when it ends, or fails.
        self._open: dict[int, Callable[[], Any]] = {}
        self._engines = WeakList[Engine]()

    def _drop_interrupted(self) -> None:
        """Called outside of any pass: those that have not ended never will."""
        for known in (self._running, self._passed_by, self._open):
            known.clear()
        for each in self._engines():
            each.hooks.await_pass()

    def weight(self) -> float:
        """Return the weight of the current batch's gradients on this rank relative to other ranks; while a backward
        pass runs, as far as it is known. Where the loss has weight 0, return a negligible weight: a layer over all
        ranks divides by it what other ranks' losses send through the rows, and the rank's own loss sends zeros."""
        task = current_graph_task_id()
        runs: list[_Run | None] = [each.passes.last for each in self._engines()]
        run = next((each for each in runs if each is not None and each.task == task), None)
        if run is None:
            return self.origin.part
        if run.part == 0 and run.origin is not None and run.origin.part:
            run.part = claims.NEGLIGIBLE
        return run.part

    def _count_late(self, origin: Origin, engine: Engine) -> Visit:
        """Count gradients of a batch whose pass was not counted, or not yet."""
        return self.steps.count(origin, optimizers=partial(self._reached, engine))

    def _reached(self, first: Engine) -> Collection[Optimizer]:
        """The optimizers of the models that the running backward pass reaches; `first` is known to be one."""
        engines = [each for each in self._engines() if not each.hooks.is_removed]
        if len(engines) > 1 and current_graph_task_id() >= 0:
            engines = [each for each in engines if each is first or any(map(is_left_at, each.leaves()))]
        return {optimizer for each in engines for optimizer in each.trainers.optimizers()}

    # Hooks hold these objects weakly: the garbage collector does not see autograd's references.

    @staticmethod
    def _arrive_at_output(
        passes: ref[BackwardPasses], engine: ref[Engine], origin: Origin, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Handle a gradient that flows from the loss into an output of the model."""
        self, model = passes(), engine()
        if self is None or model is None or gradient is None:
            return None
        run = self._run(model, origin)
        if run.counted is None:
            run.is_mixed |= run.origin is None or run.origin.batch is not origin.batch
            return None
        if run.counted.shown is not None:
            run.counted.shown.add(origin.batch)
        part, size = run.part, 1.0
        if run.counted.part is None and origin is not run.origin:
            part = origin.part
            if origin.batch is not run.counted.origin.batch or len(origin.candidates) > 1:
                visit = self._join_origin(model, origin)
                size = self.steps.step.scale(visit) / self.steps.step.scale(run.counted.visit)
        elif origin is not run.origin:
            self._check_named(model, origin)
        if part <= claims.NEGLIGIBLE:  # no product: the mean over no samples is NaN, and NaN * 0 stays NaN
            return torch.zeros_like(gradient)
        # The outputs so far were of batches of weight 0, whose gradients are zeros: this one is the first that counts.
        if run.part == 0:
            run.part = part
        # Leaves multiply by the numbers of the first output, so other outputs are scaled relative to it.
        factor = part / run.part * size
        if factor == 1:
            return None
        if origin.is_differentiated:  # what bypasses this output would not be scaled
            raise claims.penalized()
        if origin.is_chained:
            raise ValueError(
                f"one backward pass has losses of several batches, this rank's parts of them differ, and the "
                f"{model.name} has computed one of them from another model's outputs, so its gradient would be "
                "weighed twice; call accelerator.backward(loss) for the loss of each batch"
            )
        return gradient * factor

    def _join_origin(self, engine: Engine, origin: Origin) -> Visit:
        """Count a further batch that has a loss in this backward pass."""
        before = self.steps.factor()
        others = [each.batch for each in self.steps.step.current() if each.batch is not origin.batch]
        if self.steps.virtual is not None and any(
            each and origin.batch and each.loop is origin.batch.loop for each in others
        ):
            raise RuntimeError(
                f"one backward pass has losses of several batches of the {engine.name}, and with virtual_ranks each "
                "belongs to another virtual rank; call accelerator.backward(loss) for each one's loss when it is drawn"
            )
        visit = self._count_late(origin, engine)
        if engine.gathers and self.steps.factor() != before:
            raise RuntimeError(
                f"one backward pass has losses of several microbatches of the {engine.name}, and strategy='fsdp' has "
                "begun to reduce by the weights of the first one; call backward() for the loss of each, or use "
                "strategy='ddp'"
            )
        return visit

    def _check_named(self, engine: Engine, origin: Origin) -> None:
        """Check that outputs are not known to be of another batch than the user names."""
        _, named = self._call or (None, None)
        if named is None or origin.is_computed or origin.batch in (None, named.batch):
            return
        raise ValueError(
            f"backward(batch=) names one batch, and the loss has outputs of the {engine.name} for another one; call it "
            "for the loss of each batch, or, if the loss is a mean over the samples of one of them, pass their number "
            "as weight="
        )

    @staticmethod
    def _arrive_at_leaf(
        passes: ref[BackwardPasses], engine: ref[Engine], gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Handle a gradient that arrives at a parameter of the model; None if autograd has none."""
        self, model = passes(), engine()
        if self is None or model is None:
            return None
        run = self._run(model, None)
        if run.counted is None:
            return None
        if self._crossings.task in (run.task, current_graph_task_id()):
            if self.steps.virtual is not None:
                raise claims.crossed_virtual()
            if self.steps.count_whole(run.counted.visit):
                run.part = run.counted.visit.claim.part(self.steps.parts)
            claims.refuse_crossed(run.part)
        return scaled(self.steps.step.scale(run.counted.visit) * run.part, gradient)

    @staticmethod
    def _notice_arrival(passes: ref[BackwardPasses], engine: ref[Engine]) -> None:
        """Handle the first gradient that arrives at the model in a pass: count the pass now, if no output has shown it
        and no leaf has a hook that would. Refuse an uneven part now, since other ranks may reduce now."""
        self, model = passes(), engine()
        if self is None or model is None or model.hooks.is_removed or model.gathers or model.hooks.scaling:
            return
        if model.passes.last is not None and model.passes.last.task == current_graph_task_id():
            return
        if self._origin_of_bypass(model).part == 1:
            self._run(model, None)
        elif any(each.requires_grad and is_left_at(each) for each in model.leaves()):
            raise claims.bypassed(model.name)

    def _run(self, engine: Engine, origin: Origin | None) -> _Run:
        """Return the current backward pass through that model; begin it when it reaches the model, by an output that
        carries this origin, or past all outputs."""
        task = current_graph_task_id()
        run: _Run | None = engine.passes.last
        if run is not None and run.task == task:
            return run
        # Reentrant checkpointing runs a backward pass inside the one that has reached the model.
        outer = run if run is not None and run.task in self._open and self._open[run.task]() is not None else None
        # torch.autograd.grad asks for gradients without leaving them in .grad: nothing to reduce.
        for each in engine.leaves():
            if each.requires_grad and is_left_at(each):
                break
        else:
            is_taken = any(is_left_at(each) is None for each in engine.leaves())
            run = _Run(task, origin, is_taken=is_taken, part=(origin or self.origin).part)
            if outer is None:
                engine.passes.last = run
                self._passed_by[task] = ref(engine), run, engine.gradients.arrivals.count()
                self._watch_end(task)  # if all parameters are in reentrant checkpoints, they are reached from these
            if run.is_taken:
                engine.gradients.note_others()
            elif engine.gathers:  # it reduces as they arrive, and they may come in a pass inside this one
                engine.scale_leaves()
            if torch.is_grad_enabled():  # a pass through these gradients may bypass the outputs
                known = origin or self.origin
                known.is_differentiated = True
                engine.passes.graphs.append(known)
                engine.scale_leaves()
            engine.note_other_pass()
            return run
        if outer is None:
            outer = _Run(task, origin)
        if outer.counted is None:
            self._count_run(engine, outer)
        return outer

    def _count_run(self, engine: Engine, run: _Run) -> None:
        """Count a backward pass that leaves gradients at the model's parameters."""
        # One loss may pass through several models: the pass is counted once, by the first that it reaches.
        counted, (weight, named) = self._running.get(run.task), self._call or (None, None)
        is_named = weight is not None or named is not None
        if run.is_mixed and not is_named:
            raise claims.mixed(engine.name)
        if counted is None:
            self.went_past = self.went_past or self._call is None
            if named is not None and run.origin is not None:
                self._check_named(engine, run.origin)
            known = named or run.origin
            origin = known or self._origin_of_bypass(engine)
            if engine.passes.may_bypass and not is_named:  # by a part of the loss from another batch
                claims.check_latest(origin, self._world)
            visit = self.steps.count(origin, weight, is_named, partial(self._reached, engine))
            part = visit.claim.part(self.steps.parts) if is_named else None
            reduces, shown = self.steps.step.state != COLLECTING, None if known else set[Any]()
            counted = self._running[run.task] = _Pass(origin, visit, part, reduces, shown)
            self._watch_end(run.task)
        origin = run.origin or counted.origin
        run.counted, run.part = counted, origin.part if counted.part is None else counted.part
        if origin.batch is not counted.origin.batch and counted.part is None:
            self._join_origin(engine, origin)
        is_mean = self.steps.step.policy.is_mean
        if not engine.is_called and counted.part is None:
            claims.check_alike(engine.name, self._claims, counted.origin, is_mean, self._world)
        if engine.passes.graphs and counted.part is None:
            # These gradients may be in this pass, and bypass the outputs, where they could be scaled by themselves.
            if any(each.part != run.part for each in engine.passes.graphs):
                raise claims.penalized()
            engine.passes.graphs.clear()
        held = engine.gradients
        is_weighed = is_mean or run.part != 1
        # Or the assigned ones come from another batch.
        if held.known is not None and (is_weighed or self._parts() != {1}) and held.is_changed():
            raise RuntimeError(
                f"the gradients of the {engine.name} were assigned by hand, for example from torch.autograd.grad, and "
                "a backward pass adds to them, which is weighted otherwise; let backward() leave all of them, or step "
                "and zero_grad() in between"
            )
        engine.passes.last = run
        if is_weighed:  # others may train since the forward pass
            engine.scale_leaves()
        reduces = counted.reduces and origin.syncs
        counted.engines.append((ref(engine), origin.syncs, reduces))
        engine.begin_pass(reduces, counted.visit)

    def _parts(self) -> set[float]:
        return {each.part(self.steps.parts) for each in self._claims}

    def _origin_of_bypass(self, engine: Engine) -> Origin:
        """The origin of a pass that has bypassed the outputs of the model."""
        if engine.passes.graphs:  # of several batches: which one is not known
            found = list(dict.fromkeys(batch for each in engine.passes.graphs for batch in each.candidates))
            return Origin(found, self._world, is_computed=len(found) > 1)
        return self.origin if self.steps.is_recent() else find_origin(self._world)

    def _watch_end(self, task: int) -> None:
        """Have `_end` called at the end of the running backward pass, unless it ends with an error."""
        if task not in self._open:
            ending = partial(self._end, ref(self), task)
            self._open[task] = ref(ending)
            queue_callback(ending)

    @staticmethod
    def _end(passes: ref[BackwardPasses], task: int) -> None:
        """Finish a backward pass that has ended without an error."""
        if (self := passes()) is None:
            return
        self._open.pop(task, None)
        if task in self._passed_by:
            by, run, before = self._passed_by.pop(task)
            engine = by()
            if engine is not None and run.counted is None and engine.gradients.arrivals.count() != before:
                if run.is_taken:
                    engine.gradients.arrivals.leave_out(before)
                else:  # from checkpoints, which have no hooks, since the part is 1
                    self._count_late(run.origin or self.origin, engine)
                    engine.reduce()
        for engine in filter(None, map(call, self._engines)) if self._world.comm.size > 1 else ():
            engine.hooks.await_pass()  # of a pass that no output shows
        if (ended := self._running.pop(task, None)) is None:
            return
        if self.steps.step.policy.is_mean and ended.shown and ended.origin.batch not in ended.shown:
            raise claims.guessed()
        for each, _, reduces in ended.engines:
            if (engine := each()) is None:
                continue
            if reduces:
                engine.end_pass()
            if engine.gradients.known is not None:
                queue_callback(weak_method(engine.gradients.look_again))  # after torch's own, as in `Engine.end_pass`
        step = self.steps.step
        if not step.policy.is_mean or step.state == COLLECTING or not any(syncs for _, syncs, _ in ended.engines):
            return
        kept = [each() for each, syncs, reduces in ended.engines if reduces or not syncs]
        for engine in [each for each in self._engines() if each not in kept]:
            engine.rescale_to_step()
