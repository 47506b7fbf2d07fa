"""What a model consists of at the moment; the hooks at its leaves, where the gradients of backward passes arrive, which
are all counted, and some scaled; and what `.grad` holds: gradients of which step, reduced or not, left by passes or
assigned.

*Threads:* the rank's, and autograd's during a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import call, length_hint
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from unisono.torch_private import BUFFERS, MODULES, PARAMETERS, VERSION, will_engine_execute_node
from unisono.training.machine import Held
from unisono.training.steps import Steps
from unisono.tree import innermost


class Members:
    """The parameters and buffers of a module, which may change, without a Python call for each of its parts: each step
    asks for them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Of each module: its children, its parameters, its buffers.
        self._tables: tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]] = [], [], []
        self._children = [-1]  # their ids; this equals no list of them
        self._seen: Any = None

    def parameters(self) -> list[nn.Parameter]:
        """Each once, without the tensors that `torch.func.functional_call` puts in their places."""
        self._look()
        # A Parameter's class asks a metaclass about everything else: a bias of None costs a microsecond.
        found = [each for each in _values(self._tables[1]) if each is not None and isinstance(each, nn.Parameter)]
        return list(dict(zip(map(id, found), found, strict=True)).values())  # hashing a tensor costs a Python call

    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients."""
        return [each for each in self.parameters() if each.requires_grad]

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters that require gradients, and those that were frozen with a gradient."""
        return [each for each in self.parameters() if each.requires_grad or each.grad is not None]

    def buffers(self) -> list[torch.Tensor]:
        """The buffers; a shared one several times."""
        self._look()
        return [each for each in _values(self._tables[2]) if each is not None]

    def has_buffers(self) -> bool:
        """Whether it had buffers when its parts were looked at last."""
        return any(self._tables[2])

    def is_replaced(self) -> bool:
        """Whether `torch.func.functional_call` has put other tensors in the place of parameters."""
        return any(each is not None and not isinstance(each, nn.Parameter) for each in _values(self._tables[1]))

    def is_out_of_reach(self) -> bool:
        """Whether the running forward pass is one of `torch.func.grad`, of other tensors that no backward pass leads
        back to parameters from."""
        return not any(innermost(each).requires_grad for each in _values(self._tables[1]) if each is not None)

    def has_changed(self) -> bool:
        """Whether its parts, its parameters, or what is frozen of them, are others than at the last call."""
        children = list(chain.from_iterable(map(dict.values, self._tables[0])))
        parameters = list(chain.from_iterable(map(dict.values, self._tables[1])))
        flags = list(map(getattr, parameters, repeat("requires_grad"), repeat(None)))
        seen = list(map(id, children)), list(map(id, parameters)), flags
        before, self._seen = self._seen, seen
        return bool(seen != before)

    def _look(self) -> None:
        """Traverse the tree of modules again, after it has changed."""
        if list(map(id, _values(self._tables[0]))) != self._children:
            tree = list(self._module.modules())
            self._tables = (
                [getattr(each, MODULES) for each in tree],
                [getattr(each, PARAMETERS) for each in tree],
                [getattr(each, BUFFERS) for each in tree],
            )
            self._children = list(map(id, _values(self._tables[0])))


def _values(tables: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))


class Arrivals:
    """Counts the gradients that arrive at leaves with its `hook`, with a Python call for the first of a pass only."""

    def __init__(self) -> None:
        self._left = iter(range(_MANY))
        self._first: dict[int, Callable[[], None]] = {}  # what the arrival of that number calls
        nothing: Callable[[], None] = dict[int, int]().clear
        # Its result is None, which leaves the gradient as it is; and nothing keeps the gradient.
        self.hook = partial(next, map(call, map(self._first.pop, self._left, repeat(nothing))))
        self._left_out = 0

    def call_at_next(self, function: Callable[[], None]) -> None:
        """Call the function when the next gradient arrives, in the backward pass."""
        self._first.clear()
        self._first[_MANY - length_hint(self._left)] = function

    def count(self) -> int:
        """The number of gradients so far, without those that were left out."""
        return _MANY - length_hint(self._left) - self._left_out

    def leave_out(self, before: int) -> None:
        """Leave out what has arrived since `count` was that number: torch.autograd.grad has returned it."""
        self._left_out += self.count() - before


_MANY = 2**62


class LeafHooks:
    """The hooks of one model.

    Attributes:
        is_removed: whether there will be none any more.
        scaling: the hooks that scale gradients, while there are any.
        scale_one: what they call: scales a gradient, where that has to be.
        notice: called by the first gradient of each pass.
    """

    def __init__(self, arrivals: Arrivals, counts: bool) -> None:
        self.is_removed = False
        self.scaling: dict[torch.Tensor, RemovableHandle] = {}
        self._arrivals, self._counts = arrivals, counts
        self._counting: dict[torch.Tensor, RemovableHandle] = {}
        self.scale_one: Callable[[torch.Tensor | None], torch.Tensor | None] = lambda gradient: None
        self.notice: Callable[[], None] = lambda: None

    def count(self, leaves: Iterable[torch.Tensor]) -> None:
        """Count the gradients that arrive at these leaves, too."""
        if self._counts:
            self._hook(self._counting, leaves, self._arrivals.hook)
            self.await_pass()

    def await_pass(self) -> None:
        """Have the next gradient that arrives noticed as the first of a pass."""
        self._arrivals.call_at_next(self.notice)

    def scale(self, leaves: Iterable[torch.Tensor]) -> None:
        """Scale the gradients that arrive at these leaves, too."""
        self._hook(self.scaling, leaves, self.scale_one)

    def _hook(
        self, hooked: dict[torch.Tensor, RemovableHandle], leaves: Iterable[torch.Tensor], hook: Callable[[Any], Any]
    ) -> None:
        for each in () if self.is_removed else leaves:
            # A second hook would scale twice.
            if each not in hooked and each.requires_grad:  # not frozen since its forward pass
                hooked[each] = each.register_hook(hook)

    def stop_scaling(self) -> None:
        """Remove the hooks that scale."""
        while self.scaling:
            self.scaling.popitem()[1].remove()

    def remove(self) -> None:
        """Remove all, for good."""
        self.is_removed = True
        self.stop_scaling()
        while self._counting:
            self._counting.popitem()[1].remove()


def is_left_at(leaf: torch.Tensor) -> bool | None:
    """Whether the running backward pass accumulates a gradient in this leaf's `.grad`; None if it is
    `torch.autograd.grad` with respect to leaves that include this one."""
    try:
        return bool(will_engine_execute_node(get_gradient_edge(leaf).node))
    except (RuntimeError, AttributeError):  # torch refuses the query for such a leaf; in torch.func.grad
        return None


class HeldGradients(Held):
    """The gradients of one model on this rank, with those that no counted pass has left.

    Attributes:
        known: of each trained parameter, by its id, the gradient that passes have left, and torch's count of writes to
            it; None if torch.autograd.grad was not asked for others since the last step.
        looks_at: returns the gradients of trained parameters, after their ids.
    """

    def __init__(self, members: Members, steps: Steps) -> None:
        super().__init__(steps)
        self.arrivals = Arrivals()
        self._members, self._steps = members, steps
        self._noticed = 0  # the number of arrivals up to the last reduction
        self.known: dict[int, tuple[torch.Tensor | None, int]] | None = None
        self.looks_at: Callable[[], list[tuple[int, torch.Tensor | None]]] = self._trained

    @property
    def is_own(self) -> bool:
        """Whether backward passes have left them on this rank alone, or they are a part of a step."""
        if self._steps.is_plain:
            return False
        return self.is_unreduced or self.arrivals.count() != self._noticed

    def has_bypassed(self) -> bool:
        """Whether gradients have arrived since the last reduction that no counted pass accounts for."""
        return self.arrivals.count() != self._noticed and not self.is_unreduced

    def note_reduction(self, factor: float) -> None:
        super().note_reduction(factor)
        self._noticed = self.arrivals.count()
        self.look_again()

    def note_zeros(self) -> None:
        super().note_zeros()
        self._noticed = self.arrivals.count()
        self.look_again()

    def note_others(self) -> None:
        """Note that torch.autograd.grad is asked for gradients of parameters: they may be assigned, or added."""
        if self.known is None:
            self.known = self._look()

    def look_again(self) -> None:
        """Note that a pass, or this package, has changed them."""
        if self.known is not None:
            self.known = self._look()

    def _look(self) -> dict[int, tuple[torch.Tensor | None, int]]:
        found = self.looks_at()  # by ids, since hashing a tensor costs a Python call
        return {each: (grad, -1 if grad is None else getattr(grad, VERSION)) for each, grad in found}

    def _trained(self) -> list[tuple[int, torch.Tensor | None]]:
        return [(id(each), each.grad) for each in self._members.trained()]

    def is_changed(self) -> bool:
        """Whether gradients were assigned in place of those that backward passes have left, or added to them."""
        if self.known is None:
            return False
        for each, (grad, version) in self._look().items():
            before = self.known.get(each, (None, -1))
            if grad is not None and (grad is not before[0] or version != before[1]):
                return True
        return False

    def is_dropped(self, parameter: torch.Tensor) -> bool:
        """Whether a trained parameter that is looked at has lost the gradient that passes have left."""
        left, _ = (self.known or {}).get(id(parameter), (None, -1))
        return left is not None and parameter.grad is None
