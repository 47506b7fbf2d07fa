"""The hooks at the leaves of a model, where the gradients of a backward pass arrive: all are counted, and some scaled.

*Threads:* autograd's, during a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from operator import call, length_hint
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from unisono.torch_private import will_engine_execute_node


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
