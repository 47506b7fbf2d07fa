"""Engine: runs a prepared model for a strategy, and reduces its gradients once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.report.timeline import REDUCE
from unisono.training.compilation import compilable
from unisono.training.gradients import reduce_gradients, scale_gradients
from unisono.training.machine import Visit
from unisono.training.steps import Steps
from unisono.training.strategies.held import HeldGradients, LeafHooks, Members
from unisono.training.strategies.model_agreement import ModelAgreement
from unisono.training.strategies.sharded import holds_any
from unisono.training.strategies.trainers import Trainer, Trainers
from unisono.world import World


@dataclass(slots=True)
class ModelPasses:
    """What `Passes` knows of the passes through one model.

    Attributes:
        last: the last backward pass that has reached it.
        graphs: the origins of outputs whose gradients were differentiated (`create_graph=True`).
        may_bypass: whether a loss may come from a submodule, from a method that is not marked, or from an output that
            hides its tensors.
    """

    last: Any = None
    graphs: list[Any] = field(default_factory=list)
    may_bypass: bool = False


class Engine:
    """Runs the module unchanged, and reduces its gradients in flat buckets after the backward pass.

    A strategy of another package may override these methods. But for `run`, all ranks call them in the same order.

    - `run`, the forward pass. It returns what the module returns.
    - `add_up(flat)`, the reduction of a bucket. Write the sum over the ranks into `flat`, the same bits on all of them;
      what is returned is ignored. It holds gradients that are multiplied by the rank's weight already.
    - `reduce_late(parameters)`, the reduction of all that `with_gradients()` returns, or of those that are given. Each
      `.grad` becomes the sum over the ranks of `steps.factor() * grad`. None counts as zeros, and so does what is
      multiplied by a factor of 0, NaN included.
    - `prepare_reduction(reduces)` comes before the first gradient of a backward pass arrives, and
      `complete_reduction()` when a reducing pass has ended: for reductions during the pass. `.grad` is final after it.
    - `adapt_to_trained()`: parameters were frozen or unfrozen.
    - `add_trainer(optimizer)`: an optimizer trains the parameters. Call the base method, and return its result.
    - `after_step(optimizer)`: it has stepped. The base method shares buffers and compares the ranks.
    - `equalize_ranks(saves)`: a state is about to be saved or loaded. All ranks have the same parameters after it.
    - `state()` and `load_state(state)`: what a rank keeps from step to step beside parameters and optimizers.

    An engine whose parameters are not whole has to override more, as `FSDPEngine` does: `leaves`, `named_leaves`,
    `reduced`, `refresh`, `reduce`, `reduce_assigned`, `note_other_pass` and `note_zeros`.

    Attributes:
        module, world, steps: what it was made with; `world.comm` has the collectives.
        name: the name of the module's class.
        members: `trained()` and `buffers()` return the parameters that require gradients, and the buffers.
        trainers: the optimizers of its parameters; `optimizers()` returns them.
        agreement: whether all ranks have the same of it; `share_buffers()` gives all of them rank zero's.
        is_local: whether steps use this rank's own gradients, and the ranks' parameters differ until they are averaged.
        gathers: whether the module's parameters are whole only while it runs.
        is_called: whether the module is, so that its outputs show the passes through it.
        hooks: those at its leaves.
        passes: what `Passes` knows of the passes through it.
        replaced: the parameters that the module had before it was prepared, if it has others now.
    """

    gathers: ClassVar[bool] = False
    is_called: ClassVar[bool] = True
    _members_class: ClassVar[type[Members]] = Members

    def __init__(self, module: nn.Module, world: World, steps: Steps, shares_buffers: bool = True) -> None:
        self.module, self.name = module, type(module).__name__
        self._call = compilable(module)
        self.members = self._members_class(module)
        self.gradients = HeldGradients(self.members, steps)
        self.hooks = LeafHooks(self.gradients.arrivals, counts=world.comm.size > 1)
        self.passes, self.trainers = ModelPasses(), Trainers()
        self.agreement = ModelAgreement(module, self.members, self.trainers, steps)
        self.is_local = False
        self.replaced = WeakTensorKeyDictionary()
        self.world, self.steps = world, steps
        self._shares_buffers = shares_buffers and world.comm.size > 1 and not world.backend.is_lazy
        self._known = WeakTensorKeyDictionary(dict.fromkeys(module.parameters()))
        self._trained = self.members.trained()  # in the last forward pass
        self._left: list[torch.Tensor] = []  # that were frozen in the middle of a step

    def add_trainer(self, optimizer: Optimizer) -> Trainer:
        """Record that an optimizer trains the model's parameters, unless that is known. Returns its record."""
        return self.trainers.record(optimizer)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        """The forward pass: a call of the module, or of one of its methods."""
        return (self._call if method is None else getattr(self.module, method))(*args, **kwargs)

    def refresh(self) -> None:
        """Detect parameters that were frozen or unfrozen since the last forward pass with gradients.

        Called before each such pass. A change makes it a collective.
        """
        if not self.members.has_changed():
            return
        trained = self.members.trained()
        if list(map(id, trained)) != list(map(id, self._trained)) and not self.members.is_replaced():
            if self.gradients.is_current:
                self._left += self._trained
            self._trained = trained
            if self.world.comm.size > 1:
                if new := [each for each in trained if each not in self._known]:
                    self._refuse_added(new)
                self.world.comm.announce(f"new buckets for {len(trained)} trained parameters of the {self.name}")
                self.world.comm.barrier()  # names the ranks, if only some have detected a change
                self.adapt_to_trained()
                self.count_leaves()

    def _refuse_added(self, new: Sequence[torch.Tensor]) -> NoReturn:
        shapes = ", ".join(str(list(each.shape)) for each in new)
        raise RuntimeError(
            f"parameters of shapes {shapes} were put into the {self.name} after prepare(), and no rank knows the "
            "others'; add them before, or call free_memory() and prepare the model and a new optimizer"
        )

    def adapt_to_trained(self) -> None:
        """Adapt to a changed set of trained parameters. A collective."""

    def note_conversion(self) -> None:
        """Called when parameters have got another dtype, which gives them other nodes in the graphs to come."""

    def equalize_ranks(self, saves: bool = False) -> None:
        """Have all ranks be in the same state, if the strategy lets them differ between meetings; if it is saved, the
        optimizers, too. A collective, before a state is saved or loaded."""
        if saves:
            self._compare()

    def _compare(self) -> None:
        if not (self.is_local or self.gathers):
            self.agreement.compare()

    def note_load(self) -> None:
        """Called before a state is loaded into the model, or into one of its optimizers."""
        if not (self.is_local or self.gathers):
            self.agreement.note_load()

    def state(self) -> dict[str, Any] | None:
        """What this rank keeps from step to step beside the parameters, in plain data, for a checkpoint; None if this
        engine keeps nothing."""
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned on the same rank of as many."""

    def begin_pass(self, reduces: bool, visit: Visit) -> None:
        """Record that a backward pass of that visit has reached the model, and whether it ends a step."""
        if torch.is_grad_enabled() and self.world.comm.size > 1:
            raise RuntimeError(
                f"backward(create_graph=True) through the {self.name}: the gradients of {self.world.comm.size} ranks "
                "are added, outside any graph; get what is to be differentiated again from torch.autograd.grad(..., "
                "create_graph=True), and call backward() on a loss of it"
            )
        steps, size = self.steps, self.world.comm.size
        held, reduced_by = self.gradients, self.gradients.reduced_by
        is_mean = steps.step.policy.is_mean
        if is_mean and held.step is not None and not held.is_current:
            # Gradients that the user has zeroed by hand are of no step.
            if held.is_own or holds_any(self.reduced(), self.world):
                self.refuse_earlier()
        elif is_mean and reduced_by:
            # The next reduction multiplies by its factor, and adds up what the ranks hold; if the parameters are
            # gathered, it adds to what is reduced.
            factor = steps.factor() / reduced_by if self.gathers else 1 / (reduced_by * size)
            scale_gradients(self.reduced(), factor)
            held.is_divided = True
        held.note_pass()
        self.trainers.note_pass()
        self.prepare_reduction(reduces and not self.is_local)

    def refuse_earlier(self) -> NoReturn:
        """Raise the error for gradients of an earlier step."""
        raise RuntimeError(
            f"the gradients of the {self.name} are of two steps: the first step's were not zeroed, or its optimizer "
            "was not asked to step when they were complete; call the step() of each optimizer on each microbatch, and "
            "zero_grad() after it, or use an Accelerator each; one that nobody steps takes requires_grad_(False)"
        )

    def note_other_pass(self) -> None:
        """Record a backward pass through the model that leaves nothing in `.grad`, such as `torch.autograd.grad`."""

    def prepare_reduction(self, reduces: bool) -> None:
        """Called before the first gradient of a backward pass arrives."""

    def end_pass(self) -> None:
        """Called when a reducing backward pass has ended. A collective."""
        self._reduce_with(self.complete_reduction)

    def complete_reduction(self) -> None:
        """Reduce the gradients that a backward pass has not reduced itself."""
        self.reduce_late()

    def is_due(self, optimizer: Optimizer) -> bool:
        """Whether the gradients are to be reduced before that optimizer steps."""
        return self.gradients.is_own

    def set_aside(self, optimizer: Optimizer) -> None:
        """Called at a request of that optimizer that is not taken."""

    def reduce(self, optimizer: Optimizer | None = None) -> None:
        """Reduce at a step of that optimizer, if the gradients are still those of this rank alone. A collective."""
        self._reduce_with(self.reduce_late)

    def rescale_to_step(self) -> None:
        """Have `.grad` be that of the step, after a pass by which it became final, or larger, and which has not reduced
        the gradients of this model. A collective."""
        held, factor = self.gradients, self.steps.factor()
        if not held.is_current or held.is_changed():
            return  # nothing of the step; or it is refused when the optimizer steps
        if held.is_own and not self.gathers:  # which reduces in a pass only
            self.reduce()
        elif held.reduced_by and held.reduced_by != factor:
            scale_gradients(self.reduced(), factor / held.reduced_by)
            held.note_reduction(factor)

    def _reduce_with(self, reduce: Callable[[], None]) -> None:
        factor = self.steps.factor()
        if factor == self.world.comm.size == 1:
            pass
        elif self.is_local:
            # No sum over the ranks follows, so the factor is without 1 / R.
            scale_gradients(self.with_gradients(), factor * self.world.comm.size)
        else:
            reduce()
        self.gradients.note_reduction(factor)

    def reduce_assigned(self, part: float) -> None:
        """Reduce gradients that were assigned, of a batch of which this rank has that part."""
        self.world.comm.announce(f"gradients that were assigned, or stepped on before, of {self.agreement.place()}")
        scale_gradients(self.members.trained(), part)
        self.gradients.note_pass()
        self.reduce()

    def reduce_late(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Reduce the gradients of these parameters together; None means all trained parameters."""
        track = self.world.timeline.loop_in_backward(all(each.is_cpu for each in self.members.trained()[:1]))
        with nullcontext() if track is None else track.span(REDUCE):
            self.agreement.check(self._trained)
            reduced = self.with_gradients() if parameters is None else parameters
            reduce_gradients(reduced, self.world, self.steps.factor(), self.agreement.place(), self.add_up)

    def add_up(self, flat: torch.Tensor) -> None:
        """Replace a vector of weighted gradients by its sum over the ranks, in place. A collective."""
        self.world.comm.all_reduce(flat)

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters that require gradients, and those that were frozen with a gradient on some rank."""
        found = self.members.with_gradients()
        if late := {
            id(each) for each in (*self._trained, *self._left) if not (each.requires_grad or each.grad is not None)
        }:
            known = late.union(map(id, found))
            return [each for each in self.members.parameters() if id(each) in known]
        return found

    def watch_leaves(
        self, scale: Callable[[torch.Tensor | None], torch.Tensor | None], notice: Callable[[], None]
    ) -> None:
        """Count the gradients that arrive at the leaves; `LeafHooks` has what is called."""
        self.hooks.scale_one, self.hooks.notice = scale, notice
        self.count_leaves()

    def count_leaves(self) -> None:
        """Count the gradients that arrive at the leaves; again, when others train."""
        self.hooks.count(self.leaves())

    def scale_leaves(self) -> None:
        """Scale the gradients that arrive at the leaves."""
        self.hooks.scale(self.leaves())

    def note_zeros(self, optimizer: Optimizer | None = None) -> bool:
        """Record that the gradients are zero: those of the optimizer, or all of them. Returns whether all are."""
        if optimizer is not None and not self.trainers.note_zeros(optimizer):
            return False  # those of the others are as they were
        self.gradients.note_zeros()
        return True

    def restart(self) -> None:
        """Record that a state was loaded: what this run has begun belongs to no step."""
        self.note_zeros()

    def has_assigned(self, optimizer: Optimizer) -> bool:
        """Whether `.grad` holds gradients that no backward pass has left since that optimizer's last step."""
        if self.world.comm.size == 1:
            return False
        held = self.gradients
        has_stepped = held.step is not None and self.steps.stepped_at(optimizer) > held.at
        if held.step is not None and not has_stepped and not (held.known and held.is_changed()):
            return False
        return any(each.grad is not None for each in self.members.trained())

    def skip_step(self, optimizer: Optimizer) -> None:
        """Called in place of a step in which nothing counts. May be a collective."""

    def note_step(self, optimizer: Optimizer) -> None:
        """Record that the optimizer is stepping on the current gradients."""
        # Gradients that it finds again before the next backward pass count as assigned (`has_assigned`).
        if self.trainers[-1].optimizer() is not optimizer:
            self.add_trainer(optimizer)
        self.steps.take_step(optimizer)
        self.gradients.known = self.agreement.before_load = None
        self._left.clear()
        self.passes.may_bypass = False
        self.passes.graphs.clear()
        if self.hooks.scaling and not self.steps.policy.is_mean:
            self.hooks.stop_scaling()  # they were for an uneven batch, or a differentiated gradient

    def step_unprepared(self, optimizer: Optimizer) -> None:
        """Record that an optimizer steps that was not prepared, so that no stepper notes it. A collective."""
        if self.agreement.before_load is not None:
            self.agreement.announce_load()
        self.steps.request(optimizer)
        self.note_step(optimizer)
        self.after_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer has stepped, on all ranks. A collective."""
        if self.agreement.count_step():
            self.world.comm.announce(f"the end of {self.steps.step.place()}")
            self._compare()
        if self._shares_buffers and not self.is_local and self.members.has_buffers():
            self.agreement.share_buffers()

    @property
    def is_released(self) -> bool:
        """Whether `free_memory` has released the model."""
        return self.hooks.is_removed

    def is_at_end_of_loop(self) -> bool:
        """Whether the last batch of the current step is the last one of its loop over a loader."""
        batch = self.steps.step.last
        return batch is not None and batch.is_last()

    @contextmanager
    def meet(self, purpose: str) -> Iterator[None]:
        """A block of collectives, outside a backward pass. Where ranks differ in the purpose, an error names two. Its
        time counts as reduction."""
        with self.world.timeline.loop().span(REDUCE):
            self.world.comm.announce(f"{purpose} of the {self.name} at {self.agreement.place()}")
            yield

    def share_optimizer_states(self) -> None:
        """Give all ranks the states of rank zero's optimizers. A collective."""
        from unisono.training.strategies.states import load_optimizer_state  # which imports this module

        for each in self.trainers.optimizers() if self.world.comm.size > 1 else ():
            load_optimizer_state(each, each.state_dict(), self.world)

    def reduced(self) -> list[torch.Tensor]:
        """The parameters that hold reduced gradients, in a backward pass."""
        return self.members.with_gradients()

    def leaves(self) -> list[torch.Tensor]:
        """The tensors at which the gradients of a backward pass arrive, and which get the hooks."""
        return self._trained

    def named_leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that `leaves` returns, by their names in the module. A collective."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}
