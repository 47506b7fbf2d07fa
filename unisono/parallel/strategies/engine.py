"""Engine: runs a prepared model for a strategy, and reduces its gradients once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import length_hint
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.parallel.agreement import broadcast_together, check_agreement
from unisono.parallel.gradients import reduce_gradients, scale_gradients
from unisono.parallel.learning_rates import describe_rates
from unisono.parallel.steps import Step, Steps
from unisono.parallel.strategies.members import Members
from unisono.parallel.weak_methods import weak_method
from unisono.torch_private import queue_callback, will_engine_execute_node
from unisono.world import World


class Arrivals:
    """Counts the gradients that arrive at leaves, without a Python call for each of them."""

    def __init__(self) -> None:
        self.left = iter(range(_MANY))  # its length tells how many have arrived
        # next(nones, gradient) is None, which leaves the gradient as it is; and nothing keeps the gradient.
        nothing: dict[int, None] = {}
        self.hook = partial(next, map(nothing.get, self.left))


_MANY = 2**62


class Trainer:
    """An optimizer of a model's parameters.

    Attributes:
        optimizer: held weakly.
        is_stranger: whether it steps without being prepared.
        has_stepped, has_zeroed: since the last backward pass.
    """

    __slots__ = ("has_stepped", "has_zeroed", "is_stranger", "optimizer")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = ref(optimizer)
        self.is_stranger = self.has_stepped = self.has_zeroed = False


class Engine:
    """Runs the module unchanged, and reduces its gradients in flat buckets after the backward pass.

    Args:
        module: the user's module, on the world's device.
        world: the rank's world.
        steps: provides the weights of the rank's gradients.
        shares_buffers: whether rank zero's buffers are broadcast after each step.

    Attributes:
        gathers: whether the module's parameters are whole only while it runs.
        name: the name of the module's class.
        passed: the step of the last counted backward pass through the model, and its time (`Steps.now`); None if the
            gradients are zero.
        reduced_by: the factor by which the current gradients were reduced over the ranks; None if they are not.
        hooks: the hooks of each leaf that scale its gradients, while there are any.
        scale: the hook that scales the gradients of a leaf; set by `backward.py`.
        passing: the last backward pass through the model; set by `backward.py`.
        taken: the gradients that the parameters had when torch.autograd.grad was first asked for others; None if it was
            not, since the last backward pass or step.
        graphs: the origins of outputs whose gradients were differentiated (`create_graph=True`); set by `backward.py`.
        is_released: whether its model is no longer prepared.
        trainers: the optimizers of its parameters: the prepared ones, in the order of preparation, and others that have
            stepped.
        replaced: the parameters that the module had before it was prepared, if it has others now.
        is_local: whether steps use this rank's own gradients, and the caller averages the parameters over the ranks.
    """

    gathers: ClassVar[bool] = False

    def __init__(self, module: nn.Module, world: World, steps: Steps, shares_buffers: bool = True) -> None:
        self.module, self.name = module, type(module).__name__
        self.passed: tuple[Step, int] | None = None
        self.reduced_by: float | None = None
        self.is_released = self.is_local = False
        self.hooks: dict[torch.Tensor, RemovableHandle] = {}
        self.scale: Callable[[torch.Tensor | None], torch.Tensor | None] = lambda gradient: None
        self.passing: Any = None
        self.give_optimizers = partial(_optimizers_of, ref(self))  # weak: it is kept by the graphs of losses
        self.taken: list[torch.Tensor | None] | None = None
        self.graphs: list[Any] = []
        self._left: list[ref[torch.Tensor]] = []  # the gradients of the last step, if losses are sums
        self.trainers: list[Trainer] = []
        self.replaced = WeakTensorKeyDictionary()
        self._world, self._steps = world, steps
        self._shares_buffers = shares_buffers and world.comm.size > 1 and not world.backend.is_lazy
        self._arrivals = Arrivals()
        self._left_out = self._noticed = 0  # numbers of arrivals: of torch.autograd.grad; up to the last reduction
        # Gradients of earlier steps, which were not zeroed; None for those that were added again.
        self._earlier: dict[torch.Tensor, torch.Tensor | None] = {}
        self._members = Members(module)
        self._is_agreed = False  # whether the ranks have compared their models
        self._known = WeakTensorKeyDictionary(dict.fromkeys(module.parameters()))
        self._counted: dict[torch.Tensor, RemovableHandle] = {}  # the hooks that count arrivals
        self._trained = self.trained()  # in the last forward pass

    @property
    def is_reduced(self) -> bool:
        """Whether the current gradients are reduced over the ranks."""
        return self.reduced_by is not None

    @property
    def is_held(self) -> bool:
        """Whether `.grad` holds what backward passes have left on this rank alone, or a part of a step."""
        if self._world.comm.size == 1 and self._steps.every == 1:
            return False
        return (self.passed is not None and self.reduced_by is None) or self.num_arrived() != self._noticed

    def num_arrived(self) -> int:
        """The number of gradients that have arrived at its leaves, of those that were not asked for by themselves."""
        return _MANY - length_hint(self._arrivals.left) - self._left_out

    def leave_out(self, before: int) -> None:
        """Leave out what has arrived since `num_arrived` was that number: torch.autograd.grad has returned it."""
        self._left_out += self.num_arrived() - before

    def has_bypassed(self) -> bool:
        """Whether gradients have arrived since the last reduction that no counted pass accounts for."""
        return self.num_arrived() != self._noticed and (self.passed is None or self.reduced_by is not None)

    def optimizers(self) -> list[Optimizer]:
        """The optimizers of its parameters."""
        return [each for trainer in self.trainers if (each := trainer.optimizer()) is not None]

    def trainer(self, optimizer: Optimizer) -> Trainer:
        """The record of an optimizer; of one that has none, from now on."""
        for each in self.trainers:
            if each.optimizer() is optimizer:
                return each
        self.trainers.append(Trainer(optimizer))
        return self.trainers[-1]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        """The forward pass: a call of the module, or of one of its methods."""
        call = self.module if method is None else getattr(self.module, method)
        return call(*args, **kwargs)

    def place(self) -> str:
        """The position of this rank, and its learning rates: equal on all ranks, or they would drift apart."""
        return self._steps.step.place() + describe_rates(self.optimizers())

    def refresh(self) -> None:
        """Detect parameters that were frozen, unfrozen or added since the last forward pass with gradients.

        Called before each such pass. A change makes it a collective: added parameters get rank zero's values.
        """
        if not self._members.has_changed():
            return
        trained = self.trained()
        if list(map(id, trained)) != list(map(id, self._trained)) and not self._members.is_replaced():
            self._trained = trained
            if self._world.comm.size > 1:
                self._world.comm.announce(f"new buckets for {len(trained)} trained parameters of the {self.name}")
                self._world.comm.barrier()  # names the ranks, if only some have detected a change
                self.adapt([each for each in trained if each not in self._known])
                self.count_leaves()
            self._known.update(dict.fromkeys(trained))

    def adapt(self, new: Sequence[torch.Tensor]) -> None:
        """Adapt to a changed set of trained parameters. A collective.

        Args:
            new: the parameters that were added; they get rank zero's values.
        """
        for each in new:
            self._world.comm.broadcast(each.detach(), 0)

    def begin(self, reduces: bool) -> None:
        """Record that a backward pass has reached the model.

        Args:
            reduces: whether it ends a step.

        Raises:
            RuntimeError: it builds a graph of the gradients, but those of other ranks are added outside any graph.
        """
        if torch.is_grad_enabled() and self._world.comm.size > 1:
            raise RuntimeError(
                f"backward(create_graph=True) through the {self.name}: the gradients of {self._world.comm.size} ranks "
                "are added, outside any graph; get what is to be differentiated again from torch.autograd.grad(..., "
                "create_graph=True), and call backward() on a loss of it"
            )
        steps, size = self._steps, self._world.comm.size
        step, is_other = steps.step, self.passed is not None and self.passed[0] is not steps.step
        if is_other and self.is_held and steps.every > 1:
            raise RuntimeError(
                f"the gradients of the {self.name} are of microbatches of two steps: its optimizer was not asked to "
                "step when the first of them was complete; call the step() of each optimizer on each microbatch, or "
                "train the models with an Accelerator each"
            )
        if self.reduced_by is not None and is_other and steps.is_mean:
            self._set_aside()
        elif self.reduced_by is not None and self._earlier:
            raise RuntimeError(
                f"the gradients of the {self.name} hold those of an earlier step, which were not zeroed, and a "
                "microbatch is to be averaged with those of this step, which was complete; zero_grad() after each "
                "step, or step as soon as its microbatches are there"
            )
        elif self.reduced_by and (steps.is_mean or steps.is_sum) and self.reduced_by * size != 1:
            # The next reduction multiplies by its factor, and adds up what the ranks hold.
            scale_gradients(self.held(), 1 / (self.reduced_by * size))
        self.passed, self.reduced_by, self.taken = (step, steps.now), None, None
        for each in self.trainers:
            each.has_stepped = each.has_zeroed = False
        self.prepare(reduces and not self.is_local)

    def _set_aside(self) -> None:
        """Keep gradients of an earlier step, which were not zeroed, out of the reduction of this one."""
        self._earlier = {each: each.grad for each in self.held() if each.grad is not None}
        for each in self._earlier:
            each.grad = None

    def _add_earlier(self) -> None:
        for each, earlier in self._earlier.items():
            if earlier is not None:
                each.grad = earlier if each.grad is None else each.grad + earlier
        self._earlier = dict.fromkeys(self._earlier)

    def pass_by(self) -> None:
        """Record a backward pass through the model that leaves nothing in `.grad`, such as `torch.autograd.grad`."""

    def prepare(self, reduces: bool) -> None:
        """Called before the first gradient of a backward pass arrives."""

    def finish(self) -> None:
        """Called when a reducing backward pass has ended. A collective."""
        self._settle(self.complete)
        if self._earlier:
            # torch's own final callback, which assigns `.grad`, may follow this one, but precedes one queued now.
            queue_callback(weak_method(self._add_earlier))

    def share_buffers(self) -> None:
        """Broadcast rank zero's buffers, since batch statistics make them differ between ranks. A collective."""
        broadcast_together(self._members.buffers(), self._world)

    def complete(self) -> None:
        """Reduce the gradients that a backward pass has not reduced itself.

        Raises:
            RuntimeError: a parameter that the reduction waits for got no gradient.
        """
        self.reduce_late()

    def reduce(self) -> None:
        """Reduce at a step, if the gradients are still those of this rank alone. A collective."""
        self._settle(self.reduce_late)
        self._add_earlier()

    def _settle(self, reduce: Callable[[], None]) -> None:
        factor = self._steps.factor()
        if factor == self._world.comm.size == 1:
            pass
        elif self.is_local:
            # No sum over the ranks follows, so the factor is without 1 / R.
            scale_gradients(self.held(), factor * self._world.comm.size)
        else:
            reduce()
        self.passed, self.reduced_by = self.passed or (self._steps.step, self._steps.now), factor
        self._noticed = self.num_arrived()

    def adopt(self, part: float) -> None:
        """Reduce gradients that were assigned, for example from `torch.autograd.grad`, not left by a backward pass.

        Args:
            part: the part of their batch, see `Claim.part`.
        """
        self._world.comm.announce(f"gradients that were assigned, or stepped on before, of {self.place()}")
        scale_gradients(self.trained(), part)
        for each in self.trainers:
            each.has_stepped = False
        self.reduce()

    def reduce_late(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Reduce the gradients of these parameters together; None means all trained parameters."""
        if not self._is_agreed and self._world.comm.size > 1:
            check_agreement(self.trained(), self._world)
            self._is_agreed = True  # after the comparison: an error leaves it to be repeated
        reduced = self.held() if parameters is None else parameters
        reduce_gradients(reduced, self._world, self._steps.factor(), self.place(), is_part=True)

    def count_leaves(self) -> None:
        """Count the gradients that arrive at the leaves; again, when others train."""
        if self._world.comm.size > 1:
            self._hook(self._counted, self._arrivals.hook)

    def scale_leaves(self) -> None:
        """Scale the gradients that arrive at the leaves."""
        self._hook(self.hooks, self.scale)

    def _hook(self, hooked: dict[torch.Tensor, RemovableHandle], hook: Callable[[Any], Any]) -> None:
        for each in () if self.is_released else self.leaves():
            # A second hook would scale twice.
            if each not in hooked and each.requires_grad:  # not frozen since its forward pass
                hooked[each] = each.register_hook(hook)

    def release(self) -> None:
        """Remove the hooks from all gradients."""
        self.is_released = True
        _remove(self.hooks)
        _remove(self._counted)

    def zero_grad(self, set_to_none: bool) -> None:
        """`zero_grad` of the module."""
        self.module.zero_grad(set_to_none)

    def forget(self, optimizer: Optimizer | None = None) -> None:
        """Record that the gradients are zero.

        Args:
            optimizer: whose gradients they are; None for all of them.
        """
        if optimizer is not None and len(self.trainers) > 1:
            self.trainer(optimizer).has_zeroed = True
            if not all(each.has_zeroed for each in self.trainers if each.optimizer() is not None):
                return  # those of the others are as they were
        self.passed = self.reduced_by = self.taken = None
        self._noticed = self.num_arrived()
        self._earlier.clear()

    def has_assigned(self, optimizer: Optimizer) -> bool:
        """Whether `.grad` holds gradients that no backward pass has left since that optimizer's last step."""
        if self._world.comm.size == 1:
            return False
        is_left = self.passed is not None and (not self.trainer(optimizer).has_stepped or self._is_left_again())
        if is_left and not self.has_replaced():
            return False
        return any(each.grad is not None for each in self.trained())

    def note_taken(self) -> None:
        """Record that torch.autograd.grad is asked for gradients of parameters: they may be assigned."""
        if self.taken is None:
            self.taken = [each.grad for each in self.trained()]

    def has_replaced(self) -> bool:
        """Whether gradients were assigned in place of those that backward passes have left."""
        return self.taken is not None and any(
            each.grad is not None and each.grad is not before
            for each, before in zip(self.trained(), self.taken, strict=False)
        )

    def _is_left_again(self) -> bool:
        """Whether `.grad` holds what the last step was on. Recorded for sums only: a mean of equal ones is equal."""
        held = [each.grad for each in self.trained() if each.grad is not None]
        return len(held) == len(self._left) and all(
            each is known() for each, known in zip(held, self._left, strict=True)
        )

    def note_step(self, optimizer: Optimizer) -> None:
        """Record that the optimizer is stepping on the current gradients."""
        # Gradients that it finds again before the next backward pass count as assigned (`has_assigned`).
        self.trainer(optimizer).has_stepped = True
        self._steps.close(optimizer)
        self.taken = None
        self.graphs.clear()
        if self._steps.is_sum:
            self._left = [ref(each.grad) for each in self.trained() if each.grad is not None]
        if self.hooks and not (self._steps.is_mean or self._steps.is_sum):
            _remove(self.hooks)  # they were for an uneven batch, or a differentiated gradient

    def step_by_stranger(self, optimizer: Optimizer) -> None:
        """Record that an optimizer steps that was not prepared, so that no stepper notes it. A collective."""
        self._steps.request(optimizer)
        self.note_step(optimizer)
        self.after_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer has stepped, on all ranks. A collective."""
        if self._shares_buffers and not self.is_local:
            self.share_buffers()

    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients, without the replacements of `torch.func.functional_call`."""
        return [each for each in self._members.parameters() if each.requires_grad]

    def held(self) -> list[torch.Tensor]:
        """The parameters that require gradients, and those that were frozen with a gradient."""
        return [each for each in self._members.parameters() if each.requires_grad or each.grad is not None]

    def leaves(self) -> list[torch.Tensor]:
        """The tensors at which the gradients of a backward pass arrive, and which get the hooks."""
        return self._trained

    def named_leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that `leaves` returns, by their names in the module. A collective."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def resume(self) -> None:
        """Continue in the middle of a step, with its gradients so far in `.grad`."""
        self.passed, self.reduced_by = (self._steps.step, 0), None


def _optimizers_of(engine: Callable[[], Engine | None]) -> list[Optimizer]:
    return [] if (found := engine()) is None else found.optimizers()


def _remove(hooks: dict[torch.Tensor, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def is_left_at(leaf: torch.Tensor) -> bool:
    """Whether the running backward pass accumulates a gradient in this leaf's `.grad`."""
    try:
        return bool(will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:
        return False


def is_taken_from(leaf: torch.Tensor) -> bool:
    """Whether the running backward pass is `torch.autograd.grad` with respect to leaves that include this one."""
    try:
        will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch refuses the query for such a leaf
        return True
    return False
