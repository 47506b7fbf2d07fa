"""Virtual ranks: each microbatch is that of one, and begins with the buffers of the step; gradients and buffers are
added in one tree over the virtual ranks, whichever rank carries them (`virtual_ranks.py`).

A rank sets the gradients of a microbatch aside when the next one begins, and reduces when the optimizer steps. With V
virtual ranks on R ranks, it holds up to V / (2 R) + 1 copies of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm.operations import HOST
from unisono.parallel.agreement import broadcast_together, check_agreement
from unisono.parallel.gradients import buckets
from unisono.parallel.machine import Visit
from unisono.parallel.strategies.bare_parameter import BareParameter
from unisono.parallel.strategies.engine import Engine
from unisono.parallel.strategies.strategy import Strategy
from unisono.timeline import REDUCE
from unisono.virtual_ranks import Tree, VirtualRanks, fold_over_ranks, sums_of
from unisono.world import World

_Tensors = dict[torch.Tensor, torch.Tensor]  # of each parameter or buffer that a virtual rank has one for


class VirtualEngine(Engine):
    """Runs a module for several virtual ranks, one after another."""

    def __init__(self, module: nn.Module, world: World, steps: Any, virtual: VirtualRanks) -> None:
        super().__init__(module, world, steps, shares_buffers=False)
        self._virtual = virtual
        self._sums: Tree[_Tensors] = Tree(virtual.count, _add)  # of the step's microbatches that are over
        self._done: set[int] = set()  # the virtual ranks whose gradients it has
        self._current: tuple[int, int] | None = None  # whose gradients are in .grad: its time, and virtual rank
        self._at_begin: list[torch.Tensor] | None = None  # the buffers at the beginning of the step
        self._behind: dict[int, list[torch.Tensor]] = {}  # by virtual rank: the buffers behind its forward passes
        self._buffers_of: int | None = None  # the virtual rank whose buffers the module has

    # Buffers.

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        origin = self._steps.origin
        batch = origin.batch if torch.is_grad_enabled() and origin is not None else None
        if batch is not None and batch.draw is not None and self.members.has_buffers():
            self._change_buffers(batch.draw.rank)
        return super().run(args, kwargs, method)

    def _change_buffers(self, rank: int | None) -> None:
        """Give the module the buffers of a virtual rank, which are those of the step's beginning at first."""
        buffers = self.members.buffers()
        if self._at_begin is None:
            self._at_begin = [each.clone() for each in buffers]
        elif rank == self._buffers_of:
            return
        if self._buffers_of is not None:
            self._behind[self._buffers_of] = [each.clone() for each in buffers]
        if rank is not None:
            for each, value in zip(buffers, self._behind.get(rank, self._at_begin), strict=True):
                each.data.copy_(value)  # as the layer itself does, it is no write that autograd counts
        self._buffers_of = rank

    def after_step(self, optimizer: Optimizer) -> None:
        super().after_step(optimizer)
        if self._at_begin is not None:
            self._change_buffers(None)
            self._share_buffers(self._at_begin)
            self._at_begin = None
            self._behind.clear()

    @torch.no_grad()
    def _share_buffers(self, begin: list[torch.Tensor]) -> None:
        """Give the module the mean of the virtual ranks' buffers, and of those that are no floats, the first one's."""
        buffers = self.members.buffers()
        of_each = {rank: self._behind.get(rank, begin) for rank in self._virtual.own}
        for each, value in zip(buffers, of_each[self._virtual.own[0]], strict=True):
            each.data.copy_(value)
        means = [place for place, each in enumerate(buffers) if each.is_floating_point()]
        broadcast_together([each for place, each in enumerate(buffers) if place not in means], self._world)
        tree: Tree[_Tensors] = Tree(self._virtual.count, _add)
        for rank, values in of_each.items():
            tree.put(rank, {buffers[place]: values[place].clone() for place in means})
        for each, total in self._fold([buffers[place] for place in means], tree):
            each.data.copy_(total)

    # Gradients.

    def begin_pass(self, reduces: bool, visit: Visit) -> None:
        draw = None if visit.batch is None else visit.batch.draw
        if draw is None:
            raise ValueError(
                f"virtual_ranks={self._virtual.count} divides the batches of prepared loaders, and the {self.name} has "
                "a loss on data of none; prepare its loader, or name the batch, accelerator.backward(loss, batch=batch)"
            )
        if (visit.microbatch, draw.rank) != self._current:
            self._put_aside()
            if draw.rank in self._done:
                raise RuntimeError(
                    f"a second batch of virtual rank {draw.rank} in one step of the {self.name}, or a pass on the "
                    "first after one on another batch: with virtual_ranks each batch of a round has its passes before "
                    "the next one has, and none is left out"
                )
            self._current = visit.microbatch, draw.rank
        super().begin_pass(False, visit)

    def _put_aside(self) -> None:
        """Keep the gradients of a microbatch that is over."""
        if self._current is None:
            return
        taken: _Tensors = {}
        for each in self.members.with_gradients():
            if each.grad is not None:
                taken[each] = each.grad.to_dense() if each.grad.layout is not torch.strided else each.grad
                each.grad = None
        _, rank = self._current
        self._done.add(rank)
        if rank < self._virtual.count:  # else it is a batch that does not count
            self._sums.put(rank, taken)
        self._current = None
        self.gradients.look_again()

    def _forget(self) -> None:
        self._sums, self._current = Tree(self._virtual.count, _add), None
        self._done.clear()

    def end_pass(self) -> None:
        """Nothing: the next pass may be of the same microbatch, whose gradients are added first."""

    def rescale_to_step(self) -> None:
        """Nothing, as in `end_pass`."""

    @torch.no_grad()
    def reduce(self) -> None:
        world = self._world
        self._put_aside()
        for rank in self._virtual.own:
            if rank not in self._done:
                self._sums.put(rank, {})
        parameters = self.with_gradients()
        with world.timeline.loop().span(REDUCE):
            if self._agreed is not self._trained and world.comm.size > 1:
                check_agreement(self.members.trained(), world)
                self._agreed = self._trained
            world.comm.announce(f"the gradients of {self.place()}")
            held = [float(any(each in sums for sums in self._sums.sums.values())) for each in parameters]
            is_held = (
                world.comm.all_reduce(torch.tensor(held, device=HOST)) if world.comm.size > 1 else torch.tensor(held)
            )
            present = [each for each, count in zip(parameters, is_held.tolist(), strict=True) if count]
            for each, total in self._fold(present, self._sums):
                each.grad = total.clone()  # a view would keep the memory of the whole bucket
        self._forget()
        self.gradients.note_reduction(self._steps.factor())

    def _fold(self, keys: Sequence[torch.Tensor], tree: Tree[_Tensors]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The means over all virtual ranks. A collective."""
        world, virtual = self._world, self._virtual
        nodes = sums_of(virtual)
        for bucket in buckets(keys):
            own = {node: _flatten(bucket, tree.sums[node]) for node in nodes}

            def gather(sums: list[torch.Tensor]) -> list[list[torch.Tensor]]:
                return [list(each.unbind(0)) for each in world.comm.all_gather(torch.stack(sums))]

            total = fold_over_ranks(virtual, world.comm.size, own, gather, torch.Tensor.add_) / virtual.count
            for each, piece in zip(bucket, total.split([each.numel() for each in bucket]), strict=True):
                yield each, piece.view_as(each)

    def reduce_assigned(self, part: float) -> None:
        raise ValueError(
            f"gradients of the {self.name} were assigned by hand, and virtual_ranks adds those that backward passes "
            "leave; let accelerator.backward(loss) leave them in .grad"
        )

    def note_zeros(self, optimizer: Optimizer | None = None) -> bool:
        if are_all := super().note_zeros(optimizer):
            self._forget()
        return are_all


def _add(one: _Tensors, other: _Tensors) -> _Tensors:
    """The sums; what one of them lacks is a zero, as it is in a bucket of several ranks."""
    for each, value in other.items():
        one[each] = one[each].add_(value) if each in one else value.add_(0)
    for each in one.keys() - other.keys():
        one[each].add_(0)
    return one


def _flatten(bucket: list[torch.Tensor], values: _Tensors) -> torch.Tensor:
    return torch.cat([(values[each] if each in values else torch.zeros_like(each)).reshape(-1) for each in bucket])


class VirtualStrategy(Strategy):
    """Reduces over virtual ranks; optimizers are those of another strategy."""

    name = "virtual"

    def __init__(self, other: Strategy) -> None:
        super().__init__(other.world, other.steps, other.options)
        self._other = other
        self.wrap_optimizer, self.step_of = other.wrap_optimizer, other.step_of  # type: ignore[method-assign]

    def check(self, each: nn.Module | Optimizer) -> None:
        self._other.check(each)
        if isinstance(each, BareParameter):
            raise ValueError(
                f"virtual_ranks do not train a parameter of shape {list(each.value.shape)} that is no model's; make it "
                "one of a module's, and prepare that"
            )

    def engine_of(self, module: nn.Module) -> Engine:
        virtual = self.world.state.virtual
        assert virtual is not None, "the Accelerator has set it"
        return VirtualEngine(module, self.world, self.steps, virtual)
