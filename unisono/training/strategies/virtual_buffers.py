"""The buffers of a model under virtual ranks: each batch of a round begins with those of the step's beginning; after
the step, those of floats are the mean over the virtual ranks, and others are those of the first one."""

from __future__ import annotations

import torch

from unisono.batches.virtual_ranks import Node, Tree, VirtualRanks
from unisono.training.agreement import broadcast_together
from unisono.training.strategies.held import Members
from unisono.world import World

Tensors = dict[torch.Tensor, torch.Tensor]
"""Of each parameter or buffer that a virtual rank has one for."""


class VirtualBuffers:
    """The buffers of one module.

    Attributes:
        means: what they are after the step, once that is known; a forward pass drops it.
    """

    def __init__(self, name: str, members: Members) -> None:
        self._name, self._members = name, members
        self.forget()

    def forget(self) -> None:
        """No step has begun."""
        self._begin: list[torch.Tensor] | None = None  # those at the beginning of the step
        self._behind = dict[int, list[torch.Tensor]]()  # by the turn of a batch: those behind its forward passes
        self.turn: int | None = None  # that of the batch whose buffers the module has
        self.means: Tensors | None = None

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
            for each, value in zip(buffers, self._behind.get(turn, self._begin), strict=True):
                if each.shape != value.shape:
                    raise RuntimeError(
                        f"a buffer of the {self._name} has grown from {list(value.shape)} to {list(each.shape)}, and "
                        "with virtual_ranks each batch of a round begins with the same; give it its full shape"
                    )
                each.data.copy_(value)  # as the layer itself does, it is no write that autograd counts
        self.turn = turn

    def _keep(self) -> None:
        if self.turn is not None:
            self._behind[self.turn] = [each.clone() for each in self._members.buffers()]

    def _of(self, turn: int) -> list[torch.Tensor]:
        return self._behind.get(turn, self._begin or [])

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
