"""Engine: runs a prepared model for a strategy, and reduces its gradients once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.parallel.agreement import broadcast_together, check_agreement
from unisono.parallel.gradients import reduce_gradients, scale_gradients
from unisono.parallel.ledger import Ledger, Step, describe_rates
from unisono.parallel.weak_methods import weak_method
from unisono.torch_private import BUFFERS, MODULES, PARAMETERS, queue_callback, will_engine_execute_node
from unisono.world import World


class Begun(NamedTuple):
    """The position of a rank: its step, its microbatch, and the number of step requests so far."""

    step: Step | None = None
    microbatch: int = 0
    num_asked: int = 0


class Engine:
    """Runs the module unchanged, and reduces its gradients in flat buckets after the backward pass.

    Args:
        module: the user's module, on the world's device.
        world: the rank's world.
        ledger: provides the weights of the rank's gradients.
        shares_buffers: whether rank zero's buffers are broadcast after each reducing backward pass.

    Attributes:
        gathers: whether the module's parameters are whole only while it runs.
        name: the name of the module's class.
        is_held: whether a backward pass has left gradients of this rank alone in `.grad`.
        is_reduced: whether the current gradients are reduced over the ranks.
        begun: the position of the rank when the last backward pass reached the model.
        hooks: the gradient hook of each leaf.
        passing: the last backward pass through the model; set by `passes.py`.
        is_released: whether its model is no longer prepared.
        optimizers: the prepared optimizers of its parameters, in the order of preparation.
        replaced: the parameters that the module had before it was prepared, if it has others now.
        strangers: the optimizers that have stepped on its parameters without being prepared.
        is_local: whether steps use this rank's own gradients, and the caller averages the parameters over the ranks.
    """

    gathers: ClassVar[bool] = False

    def __init__(self, module: nn.Module, world: World, ledger: Ledger, shares_buffers: bool = True) -> None:
        self.module, self.name = module, type(module).__name__
        self.is_held = self.is_reduced = False
        self.begun = Begun()
        self.is_released = self.is_local = False
        self.hooks: dict[torch.Tensor, RemovableHandle] = {}
        self.passing: Any = None
        self.strangers: WeakSet[Optimizer] = WeakSet()
        self.optimizers: list[ref[Optimizer]] = []
        self.replaced = WeakTensorKeyDictionary()
        self._world, self._ledger, self._shares_buffers = world, ledger, shares_buffers
        self._reduced_in: Step | None = None
        self._earlier: dict[torch.Tensor, torch.Tensor] = {}  # gradients of earlier steps, which were not zeroed
        self._stepped: WeakSet[Optimizer] = WeakSet()  # since the last backward pass
        self._tree: list[nn.Module] = []  # the module and all its submodules
        self._children = [-1]  # the ids of their children; [-1] equals no list of them
        self._is_agreed = False  # whether the ranks have compared their models
        self._known = WeakTensorKeyDictionary(dict.fromkeys(module.parameters()))
        self._trained = self.trained()  # in the last forward pass

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        """The forward pass: a call of the module, or of one of its methods."""
        call = self.module if method is None else getattr(self.module, method)
        return call(*args, **kwargs)

    def place(self) -> str:
        """The position of this rank, and its learning rates: equal on all ranks, or they would drift apart."""
        return self._ledger.place() + describe_rates(filter(None, (each() for each in self.optimizers)))

    def refresh(self) -> None:
        """Detect parameters that were frozen, unfrozen or added since the last forward pass with gradients.

        Called before each such pass. A change makes it a collective: added parameters get rank zero's values.
        """
        trained = self.trained()
        if list(map(id, trained)) != list(map(id, self._trained)) and not self._runs_with_others():
            self._trained = trained
            if self._world.comm.size > 1:
                self._world.comm.announce(f"new buckets for {len(trained)} trained parameters of the {self.name}")
                self._world.comm.barrier()  # names the ranks, if only some have detected a change
                self.adapt([each for each in trained if each not in self._known])
            self._known.update(dict.fromkeys(trained))

    def _runs_with_others(self) -> bool:
        """Whether `torch.func.functional_call` has replaced parameters for this call."""
        found = [each for part in self._tree for each in getattr(part, PARAMETERS).values()]
        return any(each is not None and not isinstance(each, nn.Parameter) for each in found)

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
        if self.is_reduced and self._ledger.is_mean and self._reduced_in is not self._ledger.step:
            self._set_aside()
        elif self.is_reduced and self._ledger.held_factor() not in (0, 1):
            scale_gradients(self.trained(), 1 / self._ledger.held_factor())  # cancelled by the next reduction
        # A single rank that does not accumulate has a factor of 1: its `.grad` is the step's at once.
        self.is_held, self.is_reduced = self._world.comm.size > 1 or self._ledger.every > 1, False
        self._stepped.clear()
        self.prepare(reduces and not self.is_local)

    def _set_aside(self) -> None:
        """Keep gradients of an earlier step, which were not zeroed, out of the reduction of this one."""
        for each in self.trained():
            if each.grad is not None:
                self._earlier[each], each.grad = each.grad, None

    def _add_earlier(self) -> None:
        while self._earlier:
            each, earlier = self._earlier.popitem()
            each.grad = earlier if each.grad is None else each.grad + earlier

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
        if not self.is_local:
            self.share_buffers()

    def share_buffers(self) -> None:
        """Broadcast rank zero's buffers, since batch statistics make them differ between ranks. A collective."""
        if self._shares_buffers and self._world.comm.size > 1 and not self._world.backend.is_lazy:
            buffers = [each for part in self._tree for each in getattr(part, BUFFERS).values() if each is not None]
            broadcast_together(buffers, self._world)

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
        if self.is_local:
            # No sum over the ranks follows, so the factor is without 1 / R.
            scale_gradients(self.trained(), self._ledger.held_factor())
        else:
            reduce()
        self.is_held, self.is_reduced, self._reduced_in = False, True, self._ledger.step

    def adopt(self, part: float) -> None:
        """Reduce gradients that were assigned, for example from `torch.autograd.grad`, not left by a backward pass.

        Args:
            part: the part of their batch, see `Claim.part`.
        """
        self._world.comm.announce(f"gradients that were assigned, or stepped on before, of {self.place()}")
        scale_gradients(self.trained(), part)
        # From here on they count as left by a backward pass, so that `has_assigned` does not find them again.
        self.begun = Begun(self._ledger.step)
        self._stepped.clear()
        self.reduce()

    def reduce_late(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Reduce the gradients of these parameters together; None means all trained parameters."""
        ledger = self._ledger
        if not self._is_agreed and self._world.comm.size > 1:
            check_agreement(self.trained(), self._world)
            self._is_agreed = True  # after the comparison: an error leaves it to be repeated
        reduced = self.trained() if parameters is None else parameters
        reduce_gradients(reduced, self._world, ledger.factor(), self.place(), is_part=True)

    def release(self) -> None:
        """Remove the hooks from all gradients."""
        self.is_released = True
        while self.hooks:
            self.hooks.popitem()[1].remove()

    def zero_grad(self, set_to_none: bool) -> None:
        """`zero_grad` of the module."""
        self.module.zero_grad(set_to_none)

    def forget(self) -> None:
        """Record that the gradients are zero."""
        self.is_held = self.is_reduced = False
        self._earlier.clear()

    def has_assigned(self, optimizer: Optimizer) -> bool:
        """Whether `.grad` holds gradients that no backward pass has left since that optimizer's last step."""
        is_left = self.begun.step is not None and optimizer not in self._stepped
        return self._world.comm.size > 1 and not is_left and any(each.grad is not None for each in self.trained())

    def note_step(self, optimizer: Optimizer) -> None:
        """Record that the optimizer is stepping on the current gradients."""
        # Gradients that it finds again before the next backward pass count as assigned (`has_assigned`).
        self._stepped.add(optimizer)
        self._ledger.close(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Record that the optimizer has stepped."""

    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients, without the replacements of `torch.func.functional_call`.

        Called in each forward pass, so the tree of modules is traversed only after it has changed.
        """
        if [id(child) for each in self._tree for child in getattr(each, MODULES).values()] != self._children:
            self._tree = list(self.module.modules())
            self._children = [id(child) for each in self._tree for child in getattr(each, MODULES).values()]
        found = [each for part in self._tree for each in getattr(part, PARAMETERS).values()]
        # By identity: hashing a tensor costs a Python call.
        once = {id(each): each for each in found if isinstance(each, nn.Parameter) and each.requires_grad}
        return list(once.values())

    def leaves(self) -> list[torch.Tensor]:
        """The tensors at which the gradients of a backward pass arrive, and which get the hooks."""
        return self._trained

    def named_leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that `leaves` returns, by their names in the module. A collective."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def take_up(self, begun: Begun) -> None:
        """Resume in the middle of a step, with its gradients so far in `.grad`."""
        self.is_held, self.is_reduced, self.begun = True, False, begun


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
