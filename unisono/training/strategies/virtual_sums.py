"""What a step adds up over virtual ranks, and how: the gradients that each optimizer finds when it is asked to step for
each batch of a round, the buffers of the model, and the one tree in which ranks add them, bucket by bucket.

*Threads:* the rank's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from unisono.batches.virtual_ranks import WITNESS, Draw, Node, Tree, VirtualRanks, fold_over_ranks, sums_of
from unisono.protocols import Communicator
from unisono.training.agreement import broadcast_together
from unisono.training.gradients import buckets
from unisono.training.machine import Step
from unisono.training.strategies.held import Members
from unisono.world import World

Tensors = dict[torch.Tensor, torch.Tensor]
"""Of each parameter or buffer that a virtual rank has one for."""

_LARGE = 1 << 18  # bytes: to copy them into a bucket takes longer than one collective more


class Request:
    """What one optimizer is asked for in a step.

    Attributes:
        turns: those of the batches so far.
        tree: the sums of the gradients that it has found.
    """

    __slots__ = ("step", "tree", "turns")

    def __init__(self, step: Step, count: int) -> None:
        self.step, self.turns, self.tree = step, set[int](), Tree[Tensors](count, _add)


class Requests(WeakKeyDictionary[Optimizer, Request]):
    """The requests of the optimizers of one module, for batches of steps that they have not taken."""

    def has_turn(self, optimizers: Collection[Optimizer], step: Step, turn: int) -> bool:
        """Whether one of these was asked for the batch of that turn in that step."""
        found = filter(None, map(self.get, optimizers))
        return any(each.step is step and turn in each.turns for each in found)

    def add(self, optimizer: Optimizer, step: Step, draw: Draw, virtual: VirtualRanks) -> Request:
        """Note that the optimizer is asked for the last batch of the step; returns its request. RuntimeError: it was
        asked for that batch before, or for some batches of an earlier round alone."""
        found = self.get(optimizer)
        if found is not None and found.step is not step:
            _refuse_some(optimizer, found, virtual)
        if found is None:
            found = self[optimizer] = Request(step, virtual.count)
        if draw.turn in found.turns:
            _refuse_again(optimizer, step)
        found.turns.add(draw.turn)
        return found

    def take(self, optimizer: Optimizer, virtual: VirtualRanks) -> Request:
        """The request of an optimizer that is to step now. RuntimeError: it was asked for some batches alone."""
        found = self.pop(optimizer)
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


class VirtualBuffers:
    """The buffers of one module: each batch of a round begins with those of the step's beginning; after the step, those
    of floats are the mean over the virtual ranks, and others are those of the first one."""

    def __init__(self, name: str, members: Members) -> None:
        self._name, self._members = name, members
        self.forget()

    def forget(self) -> None:
        """No step has begun."""
        self._begin: list[torch.Tensor] | None = None  # those at the beginning of the step
        self._after_batch = dict[int, list[torch.Tensor]]()  # by the turn of a batch: those after its forward passes
        self.turn: int | None = None  # that of the batch whose buffers the module has
        self.means: Tensors | None = None  # what they are after the step, once known; a forward pass drops it

    @property
    def have_begun(self) -> bool:
        """Whether there was a forward pass since the last step."""
        return self._begin is not None

    def turn_to(self, turn: int) -> None:
        """Give the module the buffers of the round's batch of that turn."""
        buffers = self._members.buffers()
        if self._begin is None:
            self._begin = [each.clone() for each in buffers]  # which it has
        elif turn == self.turn:
            return
        else:
            self._keep()
            for each, value in zip(buffers, self._after_batch.get(turn, self._begin), strict=True):
                if each.shape != value.shape:
                    raise RuntimeError(
                        f"a buffer of the {self._name} has grown from {list(value.shape)} to {list(each.shape)}, and "
                        "with virtual_ranks each batch of a round begins with the same; give it its full shape"
                    )
                each.data.copy_(value)  # as the layer itself does, it is no write that autograd counts
        self.turn = turn

    def _keep(self) -> None:
        if self.turn is not None:
            self._after_batch[self.turn] = [each.clone() for each in self._members.buffers()]

    def _of(self, turn: int) -> list[torch.Tensor]:
        return self._after_batch.get(turn, self._begin or [])

    def sums(self, virtual: VirtualRanks) -> dict[Node, Tensors]:
        """The sums of those of floats, as the virtual ranks that this rank carries have left them."""

        def add(one: Tensors, other: Tensors) -> Tensors:
            return {each: value + other[each] for each, value in one.items()}

        self._keep()
        tree: Tree[Tensors] = Tree(virtual.count, add)
        for turn, rank in enumerate(virtual.own, 1):
            values = zip(self._members.buffers(), self._of(turn), strict=True)
            tree.put(rank, {each: value for each, value in values if each.is_floating_point()})
        return tree.sums

    @torch.no_grad()
    def share(self, means: Tensors, world: World) -> None:
        """Give the module its buffers after the step. A collective, if some are no floats."""
        others = []
        for each, value in zip(self._members.buffers(), self._of(1), strict=True):
            each.data.copy_(means.get(each, value))
            if each not in means:
                others.append(each)
        broadcast_together(others, world)
        self.forget()


def fold(
    keys: Sequence[torch.Tensor], sums: Mapping[Node, Tensors], virtual: VirtualRanks, comm: Communicator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sums over all virtual ranks, of those of this one. A collective."""

    def exchange(pieces: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Of each rank, its sums in the slice that this one adds up: as much is sent as in a ring all-reduce."""
        slices = [each.view(size, -1) for each in pieces]
        return [list(each[0].unbind()) for each in comm.all_to_all(torch.stack(slices, 1))]

    size = comm.size
    if size == 1:
        yield from ((each, sums[1, 0][each]) for each in keys if each in sums[1, 0])
        return
    of_ranks = [sums_of(own, virtual.count) for own in virtual.table]
    nodes = of_ranks[virtual.rank]
    are_two = [*map(len, of_ranks)] == [1, 1]  # one sum each, and a + b is b + a
    # Large gradients are added where they are, after the first vector.
    large = [each for each in keys if are_two and each.requires_grad and each.nbytes >= _LARGE]
    apart = set(map(id, large))
    for bucket in [*buckets([each for each in keys if id(each) not in apart]), *([each] for each in large)]:
        lengths = [each.numel() for each in bucket]
        room = 0 if are_two else -sum(lengths) % size  # as many for each rank
        own = {node: _flatten(bucket, sums[node], room) for node in nodes}
        if are_two:
            total = comm.all_reduce(own[nodes[0]])
        else:
            total = torch.cat(comm.all_gather(fold_over_ranks(virtual, own, exchange, torch.Tensor.add_)))
        for each, piece in zip(bucket, total.split([*lengths, room]), strict=False):
            yield each, piece.view_as(each)


def _flatten(bucket: list[torch.Tensor], values: Tensors, room: int) -> torch.Tensor:
    """The values of a bucket, one after another, and `room` zeros; of a single large one its own memory, if it can."""
    found = map(values.get, bucket)
    pieces = [
        (torch.zeros_like(each) if one is None else one).reshape(-1) for each, one in zip(bucket, found, strict=True)
    ]
    if len(pieces) == 1 and bucket[0].requires_grad and not room:
        return pieces[0]
    return torch.cat([*pieces, bucket[0].new_zeros(room)] if room else pieces)
