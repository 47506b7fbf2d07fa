"""Virtual ranks: each microbatch is that of one, and begins with the buffers of the step; gradients and buffers are
added in one tree over the virtual ranks, whichever rank carries them (`virtual_ranks.py`).

Each optimizer is asked to step for each of them. The gradients that it finds are set aside, and reduced when it was
asked for the last one; so what `zero_grad()` zeroes, and what another optimizer's loss leaves, is as on a device of its
own. With V virtual ranks on R ranks, a rank holds up to V / (2 R) + 1 copies of the gradients.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.batches.deliveries import Batch, Loop
from unisono.batches.virtual_ranks import WITNESS, Draw, VirtualRanks
from unisono.devices.seeding import seed_beside
from unisono.torch_private import VERSION
from unisono.training.machine import Visit
from unisono.training.parameter_names import parameters_of
from unisono.training.rules import TAKEN
from unisono.training.steps import Steps
from unisono.training.strategies.engine import Engine
from unisono.training.strategies.sharded import is_distributed
from unisono.training.strategies.virtual_sums import Requests, Tensors, VirtualBuffers, fold
from unisono.training.strategies.witnesses import Witnesses
from unisono.world import World


class VirtualEngine(Engine):
    """Runs a module for several virtual ranks, one after another."""

    def __init__(self, module: nn.Module, world: World, steps: Any, virtual: VirtualRanks) -> None:
        self._run_with(module, world, steps)
        self._virtual = virtual  # as the ranks have carried them in the last step
        # Of each loop: the round of the last forward pass, and how often the parameters were written before the first.
        self._first_writes: WeakKeyDictionary[Loop, tuple[Any, int]] = WeakKeyDictionary()
        self._requests = Requests()
        self._reduced: WeakSet[Optimizer] = WeakSet()  # that have yet to step on gradients that are reduced
        self._unzeroed = set[int]()  # the ids of parameters whose gradients of an earlier step `zero_grad` has to drop
        self._zeros = set[int]()  # the ids of parameters that the step has found with gradients of zero
        self._buffers = VirtualBuffers(self.name, self.members)
        self._witnesses = Witnesses(module, world)

    def _run_with(self, module: nn.Module, world: World, steps: Any) -> None:
        """Initialize what runs the module."""
        Engine.__init__(self, module, world, steps, shares_buffers=False)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        is_recorded = torch.is_grad_enabled()
        if is_recorded:
            batch = None if self.steps.origin is None else self.steps.origin.batch
        else:
            batch = next(iter(self.world.state.deliveries.find((args, kwargs))), None)
        if batch is not None and batch.draw is not None:
            self._check_turn(batch, batch.draw, is_recorded)
            if self.module.training and self.members.has_buffers():
                self._check_buffers(batch)
                self._buffers.turn_to(batch.draw.turn)
        if self.module.training:
            self._buffers.means = None
        return super().run(args, kwargs, method)

    def _check_turn(self, batch: Batch, draw: Draw, is_recorded: bool) -> None:
        """Refuse a forward pass whose result would depend on which virtual ranks this rank carries."""
        check_left(self.world, self._virtual, batch.loop)
        if is_recorded and batch.loop.last is not batch:
            raise RuntimeError(
                f"a forward pass of the {self.name} is on another batch than its loop has drawn last: with "
                "virtual_ranks random numbers are those of the batch drawn last; draw each batch where it is used"
            )
        step, version = self.steps.step, self.count_writes()
        round_, first = self._first_writes.setdefault(batch.loop, (draw.round, version))
        if round_ != draw.round:
            self._first_writes[batch.loop] = draw.round, version
        is_asked = self._requests.has_turn(self.trainers.optimizers(), step, draw.turn)
        if (round_ == draw.round and first != version) or (is_recorded and is_asked and step.last is batch):
            raise RuntimeError(
                f"a forward pass of the {self.name} came after a step, or another change of its parameters, in the "
                "same round; with virtual_ranks the other virtual ranks' forward passes come first: compute all losses "
                "of a batch before the first step() of its optimizers, and change parameters by hand where "
                "accelerator.sync_gradients is true"
            )

    def count_writes(self) -> int:
        """How often the parameters were written to."""
        return sum(map(attrgetter(VERSION), self.members.parameters()))

    def parameters_by(self, optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
        """The ids of an optimizer's parameters, and where passes leave their gradients."""
        own = set(map(id, parameters_of(optimizer)))
        return [(id(each), each) for each in self.members.parameters() if id(each) in own]

    def trained_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters of an optimizer that are trained, or hold gradients, where passes leave these."""
        own = set(map(id, parameters_of(optimizer)))
        return [each for each in self.with_gradients() if id(each) in own]

    def take_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What passes have left at one of `trained_by`, which has none then."""
        taken, parameter.grad = parameter.grad, None
        return taken

    def give_gradient(self, parameter: torch.Tensor, total: torch.Tensor, factor: float, out: Any) -> None:
        """Let the optimizer find factor times total, in the memory of `out` if that is given."""
        # No view, which would keep the memory of the whole bucket.
        parameter.grad = torch.mul(total, factor, out=out)

    def _check_buffers(self, batch: Batch) -> None:
        if batch.loop.is_evaluation or not self.trainers.optimizers():
            where = "in a loop without gradients" if batch.loop.is_evaluation else "and it has no prepared optimizer"
            raise RuntimeError(
                f"the {self.name} is in training mode, and its buffers may change, {where}: with virtual_ranks they "
                "are averaged when it steps; call its eval() before"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        super().after_step(optimizer)
        self._share_buffers()

    def skip_step(self, optimizer: Optimizer) -> None:
        self._requests.pop(optimizer, None)
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self._buffers.have_begun:
            if self._buffers.means is None:  # there was a forward pass after the reduction
                sums = self._buffers.sums(self._virtual)
                found = fold([*next(iter(sums.values()))], sums, self._virtual, self.world.comm)
                self._buffers.means = {each: total / self._virtual.count for each, total in found}
            self._buffers.share(self._buffers.means, self.world)

    # Gradients: for each optimizer, those that it was asked to step on, of each virtual rank.

    def begin_pass(self, reduces: bool, visit: Visit) -> None:
        draw = None if visit.batch is None else visit.batch.draw
        if draw is None:
            raise ValueError(
                f"virtual_ranks={self._virtual.count} divides the batches of prepared loaders, and the {self.name} has "
                "a loss on data of none; prepare its loader, or name the batch, accelerator.backward(loss, batch=batch)"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward(create_graph=True) through the {self.name}: with virtual_ranks gradients are added outside "
                "any graph; get what is to be differentiated again from torch.autograd.grad(..., create_graph=True)"
            )
        if self.module.training and self.members.has_buffers() and self._buffers.turn != draw.turn:
            raise RuntimeError(
                f"a loss of the {self.name} bypassed what prepare() has returned, so its buffers are not the virtual "
                "rank's; call that, or a method of it after model.mark_forward_method(name)"
            )
        visits = [each for each in self.steps.step.visits if each.loop is visit.loop and each.batch is not None]
        draws = [each.batch.draw for each in visits if each.batch is not None and each.batch.draw is not None]
        turns = {each.turn for each in draws}
        if any(each.round != draw.round for each in draws) or len(turns) < len(draws) or self._has_left(visit):
            raise RuntimeError(
                f"a step of the {self.name} has a batch twice, or lacks one of the round: with virtual_ranks each "
                "batch has its passes before optimizer.step() is called for it, once, and none is left out; leave a "
                "loop where accelerator.sync_gradients is true"
            )
        if self._reduced:
            raise RuntimeError(
                f"a backward pass through the {self.name} came after its gradients were reduced, as for clipping, and "
                "before optimizer.step(): with virtual_ranks they cannot be added any more; clip after the last pass"
            )
        self.note_dropped({id(each) for each in self.with_gradients() if self.gradients.is_dropped(each)})
        if self.gradients.step is not None and not self.gradients.is_current:
            self._drop_earlier()
        elif self.gradients.step is None:
            self._drop_zeros()
        self.gradients.note_others()  # to find what is changed by hand
        super().begin_pass(False, visit)

    def note_dropped(self, dropped: set[int]) -> None:
        """The loop has set the gradients of parameters with these ids to None since the pass before."""
        self._unzeroed -= dropped

    def _drop_earlier(self) -> None:
        """Drop the gradients of the step before, to which a pass of one virtual rank would add. They must be zeroed
        before an optimizer steps on them, as in a GAN whose generator comes first."""
        for each in self.with_gradients():
            if each.grad is not None:
                self._unzeroed.add(id(each))
                each.grad = None
        self.gradients.note_zeros()

    def _drop_zeros(self) -> None:
        """Drop what `zero_grad(set_to_none=False)` has left, which the first batch of a rank would take alone: these
        zeros are those of each batch of the step, also where its passes do not reach the parameter."""
        for each in self.with_gradients():
            own = each.grad.to_local() if is_distributed(each.grad) else each.grad
            if own is not None and own.layout is torch.strided and not own.any():
                self._zeros.add(id(each))
                each.grad = None

    def refuse_earlier(self) -> NoReturn:
        if self._unzeroed:
            raise RuntimeError(
                f"a backward pass through the {self.name} found gradients that its optimizer had stepped on, and they "
                "were not zeroed before its next step(); call its zero_grad()"
            )
        super().refuse_earlier()

    def note_zeros(self, optimizer: Optimizer | None = None) -> bool:
        self._unzeroed -= self._unzeroed if optimizer is None else set(map(id, parameters_of(optimizer)))
        if optimizer is not None and not self.is_due(optimizer):  # the step is left out, as for a norm of NaN
            self._reduced.discard(optimizer)
            self._zeros.difference_update(map(id, parameters_of(optimizer)))
            self._share_buffers()
            self.steps.take_step(optimizer)
        return super().note_zeros(optimizer)

    def _has_left(self, visit: Visit) -> bool:
        """Whether a loop of this step, before that of the visit, was left in the middle of its round."""
        loops = [each.batch.loop for each in self.steps.step.visits if each.batch and each.loop is not visit.loop]
        return any(not each.is_open and not each.is_exhausted for each in loops)

    def is_due(self, optimizer: Optimizer) -> bool:
        return optimizer not in self._reduced

    def set_aside(self, optimizer: Optimizer) -> None:
        """Move the gradients of a virtual rank to what that optimizer is to step on, when all have had their turns."""
        own = set(map(id, parameters_of(optimizer)))
        if not self._unzeroed.isdisjoint(own):
            self.refuse_earlier()
        taken: Tensors = {}
        for each in self.trained_by(optimizer):
            if (gradient := self.take_gradient(each)) is not None:
                taken[each] = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        for name, each in self.parameters_by(optimizer) if self._zeros else ():
            if name in self._zeros:
                taken.setdefault(each, torch.zeros_like(each, requires_grad=False))
        step = self.steps.step
        draw = step.visits[-1].batch.draw if step.visits and step.visits[-1].batch is not None else None
        if draw is None:
            return  # there was no pass
        request = self._requests.add(optimizer, step, draw, self._virtual)
        if draw.is_compared:
            self._witnesses.note(optimizer, draw, self.trained_by(optimizer), taken)
        if draw.counts:
            request.tree.put(draw.rank, taken)
        self.gradients.look_again()

    @torch.no_grad()
    def reduce(self, optimizer: Optimizer | None = None) -> None:
        if optimizer is None:
            return
        self.set_aside(optimizer)
        last = self.steps.step.last
        if last is None or last.draw is None or optimizer not in self._requests:
            return  # no pass has left anything, which the optimizer says
        if torch.get_num_threads() != 1:
            raise RuntimeError(
                f"torch.set_num_threads({torch.get_num_threads()}) was called after the Accelerator was made: with "
                "virtual_ranks each rank computes with one thread, since kernels add in an order that depends on it"
            )
        for visit in self.steps.step.visits:
            if visit.batch is not None:
                self._check_drawn(visit.batch)
                visit.batch.loop.seeding = last.draw.seed_step
        seed_beside(self.world.backend, self.world.device, last.draw.seed_step())
        self._virtual = last.draw.carried
        world, request = self.world, self._requests.take(optimizer, self._virtual)
        found = request.tree.sums
        parameters = self.trained_by(optimizer)
        listed = set(map(id, parameters))  # not those that were frozen with gradients of zero, with which torch steps
        frozen = {id(each): each for values in found.values() for each in values if id(each) not in listed}
        parameters += frozen.values()
        if not self.gathers:  # shards differ
            self.agreement.check(self._trained)
        world.comm.announce(f"the gradients of {self.agreement.place()}")
        if WITNESS in request.turns:
            self._witnesses.compare(optimizer, self.steps.step.number)
        # A vector more, in the first bucket: by it, ranks know which parameters have a gradient on any of them.
        notes = (parameters or self.members.parameters())[0].detach().new_zeros(len(parameters))
        sums = {
            node: {notes: notes.new_tensor([float(each in values) for each in parameters]), **values}
            for node, values in found.items()
        }
        means, buffers = Tensors(), list[torch.Tensor]()
        if self._buffers.have_begun and self._buffers.means is None:
            for node, values in self._buffers.sums(self._virtual).items():
                sums[node].update(values)
                buffers, self._buffers.means = list(values), means
        present, averaged, (known, *_) = set[int](), set(map(id, buffers)), found.values()
        factor = 1 / (self.steps.given_total() or self._virtual.count)
        for each, total in fold([notes, *parameters, *buffers], sums, self._virtual, world.comm):
            if each is notes:
                present = {id(one) for one, count in zip(parameters, total.tolist(), strict=True) if count}
            elif id(each) in present:
                self.give_gradient(each, total, factor, known.get(each))
            elif id(each) in averaged:
                means[each] = total / self._virtual.count
        self._reduced.add(optimizer)
        self.gradients.note_reduction(self.steps.factor())

    def _check_drawn(self, batch: Batch) -> None:
        """Refuse a step after its loop has gone on to the next round, whose random numbers the step would change."""
        last = batch.loop.last
        if last and last.draw is not None and batch.draw is not None and last.draw.round != batch.draw.round:
            raise RuntimeError(
                f"the first batch of the next round was drawn before a step of the {self.name}: with virtual_ranks "
                "random numbers are those of the batch that was drawn last; draw each batch after optimizer.step()"
            )

    def note_step(self, optimizer: Optimizer) -> None:
        super().note_step(optimizer)
        self._zeros.difference_update(map(id, parameters_of(optimizer)))
        self._reduced.discard(optimizer)

    def restart(self) -> None:
        super().restart()
        self._first_writes.clear()
        self._requests.clear()
        self._reduced.clear()
        self._zeros.clear()
        self.world.state.deliveries.settle()
        self._buffers.forget()
        self._witnesses.forget()

    def end_pass(self) -> None:
        """Nothing: gradients are reduced when an optimizer steps."""

    def rescale_to_step(self) -> None:
        """Nothing, as in `end_pass`."""

    def reduce_assigned(self, part: float) -> None:
        raise ValueError(
            f"gradients of the {self.name} were assigned by hand, and virtual_ranks adds those that backward passes "
            "leave; let accelerator.backward(loss) leave them in .grad"
        )


def check_left(world: World, virtual: VirtualRanks, current: Loop | None = None) -> None:
    """Refuse to go on after a loop, another one than the current, was left in the middle of a round; but for a look at
    its first batch."""
    for loop in [each for each in world.state.deliveries.recent() if each is not current]:
        draw = None if loop.last is None else loop.last.draw
        is_left = not (loop.is_open or loop.is_exhausted or loop.is_settled)
        is_left = is_left and bool(loop.num_batches > 1 or loop.num_used or loop.gathered)
        if is_left and draw is not None and not draw.ends_round:
            raise RuntimeError(
                f"a loop was left after {loop.num_batches} batches, in the middle of a round of {virtual.count} "
                "virtual ranks: on another number of ranks these are other samples; leave it where "
                "accelerator.sync_gradients is true, or loop over a part of the data, Subset(dataset, range(n))"
            )


def check_between(steps: Steps, name: str) -> None:
    """Refuse the call of that name in the middle of a round of virtual ranks, if there are any, and after a loop that
    was left there: another number of ranks would be elsewhere, and buffers are those of one virtual rank."""
    if steps.virtual is None:
        return
    check_left(steps.world, steps.virtual)
    if steps.step.state != TAKEN and steps.step.visits:
        raise RuntimeError(
            f"{name} was called in the middle of a round of {steps.virtual.count} virtual ranks; call it after "
            "optimizer.step(), where accelerator.sync_gradients is true"
        )
