"""The requests of optimizers under virtual ranks: each is asked to step for each batch of a round, and steps when it is
asked for the last one. Until then, the gradients that it has found are added up."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer

from unisono.batches.virtual_ranks import WITNESS, Draw, Tree, VirtualRanks
from unisono.training.machine import Step
from unisono.training.strategies.virtual_buffers import Tensors


class Request:
    """What one optimizer is asked for in a step.

    Attributes:
        turns: those of the batches so far.
        tree: the sums of the gradients that it has found.
    """

    __slots__ = ("step", "tree", "turns")

    def __init__(self, step: Step, count: int) -> None:
        self.step, self.turns, self.tree = step, set[int](), Tree[Tensors](count, _add)


class Requests:
    """The requests of the optimizers of one module.

    Attributes:
        reduced: the optimizers that have yet to step on gradients that are reduced.
    """

    def __init__(self) -> None:
        self._open: WeakKeyDictionary[Optimizer, Request] = WeakKeyDictionary()
        self.reduced: WeakSet[Optimizer] = WeakSet()

    def forget(self) -> None:
        """No step has begun."""
        self._open.clear()
        self.reduced.clear()

    def drop(self, optimizer: Optimizer) -> None:
        """The optimizer does not step on what it was asked for."""
        self._open.pop(optimizer, None)

    def has(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer was asked for batches of a step that it has not taken."""
        return optimizer in self._open

    def has_turn(self, optimizers: Collection[Optimizer], step: Step, turn: int) -> bool:
        """Whether one of these was asked for the batch of that turn in that step."""
        found = filter(None, map(self._open.get, optimizers))
        return any(each.step is step and turn in each.turns for each in found)

    def add(self, optimizer: Optimizer, step: Step, draw: Draw, virtual: VirtualRanks) -> Request:
        """Note that the optimizer is asked for the last batch of the step; returns its request.

        Raises:
            RuntimeError: it was asked for that batch before, or for some batches of an earlier round alone.
        """
        found = self._open.get(optimizer)
        if found is not None and found.step is not step:
            _refuse_some(optimizer, found, virtual)
        if found is None:
            found = self._open[optimizer] = Request(step, virtual.count)
        if draw.turn in found.turns:
            _refuse_again(optimizer, step)
        found.turns.add(draw.turn)
        return found

    def take(self, optimizer: Optimizer, virtual: VirtualRanks) -> Request:
        """The request of an optimizer that is to step now. RuntimeError: it was asked for some batches alone."""
        found = self._open.pop(optimizer)
        if len(found.turns - {WITNESS}) < virtual.turns:
            _refuse_some(optimizer, found, virtual)
        return found


def _refuse_some(optimizer: Optimizer, request: Request, virtual: VirtualRanks) -> NoReturn:
    raise RuntimeError(
        f"the {type(optimizer).__name__} was asked to step for {len(request.turns - {WITNESS})} of the {virtual.turns} "
        "batches that this rank has of a round; call its step() for each: it does nothing until the last one"
    )


def _refuse_again(optimizer: Optimizer, step: Step) -> NoReturn:
    if step.last is not None and step.last.loop.last is not step.last:
        raise RuntimeError(
            f"the {type(optimizer).__name__} was asked to step on a batch that had no backward pass; with "
            "virtual_ranks each batch has one before step(): of a loss that is 0, or weight=0, if it is not to count"
        )
    raise RuntimeError(
        f"the {type(optimizer).__name__} was asked to step twice for one batch of a virtual rank; call its step() once "
        "for each batch"
    )


def _add(one: Tensors, other: Tensors) -> Tensors:
    """The sums; what one of them lacks is a zero, as it is in a bucket of several ranks."""
    for each, value in other.items():
        one[each] = one[each].add_(value) if each in one else value.add_(0)
    for each in one.keys() - other.keys():
        one[each].add_(0)
    return one
