"""The optimizers of a model's parameters, prepared or not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter, call
from typing import Any
from weakref import ref

from torch.optim import Optimizer

from unisono.training.parameter_names import describe_rates, parameters_of


class Trainer:
    """An optimizer of a model's parameters, held weakly: whether it steps without being prepared, and whether it has
    zeroed them since the last backward pass. Its groups outlive it: ranks compare them, and one that was dropped is
    garbage, which each rank collects at another time."""

    __slots__ = ("groups", "has_zeroed", "is_unprepared", "optimizer")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.groups = ref(optimizer), optimizer.param_groups
        self.is_unprepared = self.has_zeroed = False

    def is_within(self, parameters: Collection[int]) -> bool:
        """Whether all that it trains, or holds gradients of, is among these, given by their ids."""
        own = [each for group in self.groups for each in group["params"] if each.requires_grad or each.grad is not None]
        return all(id(each) in parameters for each in own)


class Trainers(list[Trainer]):
    """The optimizers of a model's parameters: the prepared ones, in the order of preparation, and others that have
    stepped; not those that others have replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers_of = partial(_optimizers, ref(self))  # as `optimizers`, for the graphs of losses, which keep it

    def optimizers(self) -> list[Optimizer]:
        """Those that are alive."""
        return list(filter(None, map(call, map(attrgetter("optimizer"), self))))  # which are weak references

    def record(self, optimizer: Optimizer) -> Trainer:
        """The record of an optimizer; of one that has none, from now on. It replaces those whose parameters it has,
        until they step again."""
        for each in self:
            if each.optimizer() is optimizer:
                return each
        own = set(map(id, parameters_of(optimizer)))
        self[:] = [*(each for each in self if not each.is_within(own)), Trainer(optimizer)]
        return self[-1]

    def rates(self) -> str:
        """The learning rates, for an announcement."""
        groups: list[dict[str, Any]] = []
        for each in self:
            if (optimizer := each.optimizer()) is not None:
                each.groups = optimizer.param_groups  # others, after its state was loaded
            groups += each.groups
        return describe_rates(groups)

    def note_pass(self) -> None:
        """Record that a backward pass has reached the parameters."""
        for each in self:
            each.has_zeroed = False

    def note_zeros(self, optimizer: Optimizer) -> bool:
        """Record that an optimizer has zeroed its gradients. Returns whether those of all are zero."""
        if len(self) > 1:
            zeroed = set(map(id, parameters_of(optimizer)))
            for each in self:
                each.has_zeroed = each.has_zeroed or each.is_within(zeroed)
        return len(self) <= 1 or all(each.has_zeroed for each in self if each.optimizer() is not None)


def _optimizers(trainers: Callable[[], Trainers | None]) -> list[Optimizer]:
    return [] if (found := trainers()) is None else found.optimizers()
