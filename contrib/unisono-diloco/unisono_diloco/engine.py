"""The strategy "diloco": each rank steps on its own gradients, and every few steps the ranks meet.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): at a meeting, the mean over the ranks of how far their parameters have
moved since the last one is the gradient of an outer step, by torch's SGD with Nesterov momentum, from the parameters of
the last meeting; all ranks continue with its result. The outer momentum is kept in the state of the prepared
optimizers, as "outer_momentum", so that checkpoints have it. The result depends on the number of ranks.

Invariants:
1. Whether an optimizer steps is equal on all ranks, and so is when they meet; only what it steps on differs.
2. After a meeting, parameters, buffers and outer momentum are equal on all ranks.
"""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Optimizer

from unisono import World
from unisono.strategies import Engine, Strategy, buckets
from unisono_diloco import DiLoCo

_MOMENTUM = "outer_momentum"
_BLOCK = 256  # elements that share a scale in int8
_MOST_RANKS = 31  # of which int8 holds the sum, with at least 4 levels for each sign


class DiLoCoStrategy(Strategy):
    """The strategy in any world; a single rank takes outer steps, too."""

    takes_parameters = shares_state = False

    def __init__(self, world: World, steps: Any, options: DiLoCo) -> None:
        super().__init__(world, steps, options)
        if options.sent_as == "int8" and world.world_size > _MOST_RANKS:
            raise ValueError(
                f"sent_as='int8' has too few levels for the sum of {world.world_size} ranks, more than {_MOST_RANKS}; "
                "pass sent_as='bf16'"
            )

    def check(self, each: nn.Module | Optimizer) -> None:
        super().check(each)
        if isinstance(each, LBFGS):  # whose state is at one parameter, and has no place for the momenta of the others
            raise TypeError("strategy='diloco' does not work with LBFGS; use strategy='ddp', or another optimizer")

    def engine_of(self, module: nn.Module) -> Engine:
        return DiLoCoEngine(module, self.world, self.steps, self.options)


class DiLoCoEngine(Engine):
    """Leaves gradients to their rank, and meets the other ranks every few steps, and at the end of a loop."""

    def __init__(self, module: nn.Module, world: World, steps: Any, options: DiLoCo) -> None:
        super().__init__(module, world, steps, shares_buffers=False)
        self.is_local = True
        self._options = options
        self._starts: dict[torch.Tensor, torch.Tensor] = {}  # parameters as of the last meeting, once a step is taken
        self._since = 0  # steps since then
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped since all had
        self._spare: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # for parameters whose optimizer has no state yet

    def add_trainer(self, optimizer: Optimizer) -> Any:
        known, found = [*self.trainers], super().add_trainer(optimizer)
        if found not in known:
            method = WeakMethod(self._depart)  # the optimizer may outlive the model
            optimizer.register_step_pre_hook(lambda *_: (depart := method()) and depart())
        return found

    def _depart(self) -> None:
        """Called before each step that is taken: keep the parameters as they were before the first one."""
        if not self._starts and not self.is_released:
            self._starts = {each: each.detach().clone() for each in self.members.trained()}

    def after_step(self, optimizer: Optimizer) -> None:
        self._stepped.add(id(optimizer))
        if not self._stepped.issuperset(map(id, self.trainers.optimizers())):
            return
        self._stepped.clear()
        self._since += 1
        if self._since >= self._options.every or self.is_at_end_of_loop():
            self.equalize_ranks()

    def adapt_to_trained(self) -> None:
        self.equalize_ranks()  # what trains from here on has no start

    def step_unprepared(self, optimizer: Optimizer) -> NoReturn:
        raise RuntimeError(
            f"the {type(optimizer).__name__}, which was not prepared, steps for the {self.name}, and strategy='diloco' "
            "counts the steps of prepared ones; prepare(optimizer)"
        )

    @torch.no_grad()
    def equalize_ranks(self, saves: bool = False) -> None:
        starts, self._starts, self._since = self._starts, {}, 0
        if starts:
            with self.meet("a meeting"):
                self._step_outward(starts)
                if self.world.comm.size > 1 and self.members.buffers():
                    self.agreement.share_buffers()
        if saves:
            self.share_optimizer_states()

    def _step_outward(self, starts: dict[torch.Tensor, torch.Tensor]) -> None:
        """Take an outer step. A collective."""
        for bucket in buckets(list(starts)):
            mean = self._mean(torch.cat([(starts[each] - each).reshape(-1) for each in bucket]))
            for each, part in zip(bucket, mean.split([each.numel() for each in bucket]), strict=True):
                starts[each].grad = part.view_as(each)
        rate, momentum = self._options.outer_lr, self._options.outer_momentum
        outer = SGD(list(starts.values()), rate, momentum, nesterov=momentum > 0)
        places = self._places(starts)
        for each, start in starts.items():
            if _MOMENTUM in places[each]:
                outer.state[start]["momentum_buffer"] = places[each][_MOMENTUM]
        outer.step()
        for each, start in starts.items():
            each.copy_(start)
            if momentum:
                places[each][_MOMENTUM] = outer.state[start]["momentum_buffer"]

    def _places(self, parameters: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Where the outer momentum of each parameter is kept: in its optimizer's state; or in a spare place where that
        has not begun, as on a rank that has not used the parameter: optimizers begin a state where there is none."""
        places = {each: self._spare.setdefault(each, {}) for each in parameters}
        for optimizer, group in ((each, group) for each in self.trainers.optimizers() for group in each.param_groups):
            known = {each: optimizer.state[each] for each in group["params"] if each in optimizer.state}
            has_none = not any(state.keys() - {_MOMENTUM} for state in known.values())  # as SGD without momentum
            for each in group["params"]:
                if each in places and (has_none or each in known):
                    places[each] = optimizer.state[each]
                    places[each].update(self._spare.pop(each, {}))
        return places

    def _mean(self, moved: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks of a vector, of what is sent with fewer bits if that is asked for. A collective."""
        comm, sent_as = self.world.comm, self._options.sent_as
        if comm.size == 1:
            return moved
        if moved.is_complex():
            return torch.view_as_complex(self._mean(torch.view_as_real(moved).view(-1)).view(-1, 2))
        if sent_as == "bf16":
            return comm.all_reduce(moved.bfloat16(), "mean").to(moved.dtype)
        wide = moved.to(torch.promote_types(moved.dtype, torch.float32))
        if sent_as is None:
            return comm.all_reduce(wide, "mean").to(moved.dtype)
        # A block has one scale on all ranks, and each of them a part of int8's levels: sums cannot overflow on the way.
        blocks, levels = F.pad(wide, (0, -len(wide) % _BLOCK)).view(-1, _BLOCK), 127 // comm.size
        largest = blocks.abs().amax(1, keepdim=True).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        scales = comm.all_reduce(largest, "max") / levels
        rounded = (blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)).round().to(torch.int8)
        # A scale that is not finite stays so in the mean.
        mean = comm.all_reduce(rounded).to(wide.dtype) * scales / comm.size
        return mean.view(-1)[: len(moved)].to(moved.dtype)
