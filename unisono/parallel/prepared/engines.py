"""How a prepared model runs, and who reduces its gradients: a step later, DistributedDataParallel, or FSDP2.

Each engine is asked with each forward pass whether its backward is to reduce. `generation` counts the reductions that
backward passes have finished, so that an optimizer knows whether the gradients it is about to apply were reduced:
exactly once, whoever does it. One that has begun and cannot finish is an error on the rank that lacks gradients, before
that rank meets others, which may wait in a bucket that it will never send.

A backward pass behind one that has reduced, in the same step, adds a rank's own gradients to reduced ones, and reduces
the sum. That is right where the ranks' factors add up to 1, and made so where they don't.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from unisono.parallel.prepared.accumulation import Accumulation
from unisono.parallel.strategies.hooks import attach_hook
from unisono.parallel.strategies.sharded import shard
from unisono.tree import leaves
from unisono.world import World

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Engine(Protocol):
    """Runs a module's forward pass.

    Attributes:
        module: the user's.
        reduced: the parameters, by identity, that backward passes reduce; what is trained only later is not among them.
    """

    module: nn.Module
    reduced: frozenset[int]

    @property
    def generation(self) -> int:
        """How many reductions backward passes have finished.

        Raises:
            RuntimeError: one has begun, and is not finished, since parameters got no gradient.
        """

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool) -> Any:
        """The forward pass; `reduces` tells whether gradients are reduced in the backward pass that follows."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped."""


class LateEngine:
    """The module as it is; the optimizer's step reduces, in flat buckets."""

    reduced: frozenset[int] = frozenset()
    generation = 0

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool) -> Any:
        return self.module(*args, **kwargs)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


class ReplicatedEngine:
    """torch's DistributedDataParallel: reduces while the backward pass runs, each bucket as it is full.

    Args:
        module: on the world's device.
        world: of processes.
        accumulation: tells what this rank's gradients weigh.
        hook, options: as for `attach_hook`.
        find_unused_parameters: as for DistributedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        accumulation: Accumulation,
        hook: str | None,
        options: Mapping[str, Any] | None,
        find_unused_parameters: bool,
    ) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.module = module
        self._trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self.reduced = frozenset(id(each) for each in self._trained.values())
        self._generation = 0
        self._is_begun = False  # a reduction, and it is not finished
        self._settled = self._divided = 0  # the generation of the last step, and of what `_weigh_again` has scaled
        self._factor = 1.0  # of the last reduction
        self._is_awaited = False  # the next backward pass is to reduce
        self._pass = -1  # the last backward pass that has come by here
        self._hooks: list[RemovableHandle] = []
        self._accumulation = accumulation
        self._comm = world.comm
        self._device = world.device
        self._replicated = DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)
        self._averager = attach_hook(
            self._replicated, hook, _weakly(self._weigh), options, finish=_weakly(self._finish)
        )

    @property
    def generation(self) -> int:
        if self._is_begun:
            self._check_finished()
        return self._generation

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool) -> Any:
        if torch.is_grad_enabled():
            self._weigh_again()
        if not (reduces and torch.is_grad_enabled()):
            with self._replicated.no_sync():
                return self._forward(args, kwargs)
        before, self._is_begun = self._generation, False
        result = self._forward(args, kwargs)
        self._is_awaited = self._generation == before  # else no parameter is used, and all is reduced already
        if not self._is_awaited:
            return result
        for leaf in leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._begin_backward)
        return result

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if any(id(each) in self.reduced for group in optimizer.param_groups for each in group["params"]):
            self._settled = self._generation
            if self._averager is not None:
                self._averager.average_parameters(optimizer.param_groups)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._replicated(*args, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = list(self._trained)
            unused = [names[int(place)] for place in found[1].split()] if found else []
            raise RuntimeError(_unused(type(self.module).__name__, unused)) from error

    def _check_finished(self) -> None:
        """Where a parameter has a gradient and another has none, the last backward pass has gone through a part of the
        model only; where none has one, it was for others."""
        self._is_begun = False  # told once
        lacking = [name for name, each in self._trained.items() if each.grad is None or not each.requires_grad]
        if len(lacking) < len(self._trained):
            raise RuntimeError(_unused(type(self.module).__name__, lacking))

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        """A backward pass has come to an output of this model."""
        now = torch._C._current_graph_task_id()
        if now == self._pass:
            return
        self._pass = now
        self._is_begun = self._is_awaited and any(each.requires_grad for each in self._trained.values())
        if not self._is_awaited:
            raise RuntimeError(
                "a second backward pass goes through the model since it last ran, and DistributedDataParallel reduces "
                "the first one only; add the losses up and call backward once, or run the model under "
                "accelerator.no_sync(model), which leaves the reduction to optimizer.step()"
            )

    def _weigh_again(self) -> None:
        """Let gradients that this step has reduced already weigh the same behind a further reduction. Where each
        microbatch is a step they do: the ranks' factors add up to 1. (A reduction may come early: torch's engine
        keeps one in mind that was to come and did not, since a forward pass was not used.)"""
        while self._hooks:
            self._hooks.pop().remove()
        generation = self._generation
        if self._accumulation.every > 1 and generation not in (self._settled, self._divided):
            factors = torch.tensor(self._factor, dtype=torch.float64, device=self._device)
            total = float(self._comm.all_reduce(factors))

            def divide(parameter: torch.Tensor, arriving: torch.Tensor) -> None:
                self._divided = generation
                if parameter.grad is not None:
                    parameter.grad.div_(total)

            trained = [each for each in self.module.parameters() if each.requires_grad]
            self._hooks = [each.register_hook(partial(divide, each)) for each in trained]

    def _weigh(self) -> float:
        self._is_awaited, self._is_begun = False, True
        self._pass = torch._C._current_graph_task_id()
        self._factor = self._accumulation.share()[1]
        return self._factor

    def _finish(self) -> None:
        self._is_begun = False
        self._generation += 1


class ShardedEngine:
    """torch's FSDP2: each rank keeps its part of parameters, gradients and optimizer state.

    Its gradients are cut, so that nobody else could reduce them: `generation` never stays, and a step finds what
    backward passes have reduced, or nothing.
    """

    def __init__(
        self, module: nn.Module, world: World, accumulation: Accumulation, find_unused_parameters: bool
    ) -> None:
        self._generation = 0
        self._accumulation = accumulation
        sharded: Any = shard(module, world, self._weigh, find_unused_parameters=find_unused_parameters)
        self.module = sharded
        self.reduced = frozenset(id(each) for each in sharded.parameters())

    @property
    def generation(self) -> int:
        self._generation += 1
        return self._generation

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool) -> Any:
        if torch.is_grad_enabled():
            self.module.set_requires_gradient_sync(reduces)
            return self.module(*args, **kwargs)
        try:
            return self.module(*args, **kwargs)
        finally:
            self.module.reshard()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.module.reshard()  # what a forward pass has gathered, and no backward pass has given back, is old now

    def _weigh(self) -> float:
        return self._accumulation.share()[1]


def _unused(model: str, names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"the backward pass gave no gradient to {shown or 'some parameters'} of the {model} on this rank, and the "
        "strategy waits for all that were trained when it was prepared; where parameters are unused or frozen, or the "
        "loss leaves an output out, pass Accelerator(find_unused_parameters=True), and all outputs to the loss"
    )


def _weakly(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """The method, without keeping its object: a reducer in C++ holds what it calls, where no garbage is found."""
    held: Any = WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        result: _T = held()(*args, **kwargs)
        return result

    return call
