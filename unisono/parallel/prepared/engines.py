"""How a prepared model runs, and who reduces its gradients: a step later, DistributedDataParallel, or FSDP2.

Each engine is asked with each forward pass whether its backward is to reduce. `generation` counts the reductions that
backward passes have begun, so that an optimizer knows whether the gradients it is about to apply were reduced: exactly
once, whoever does it.

A backward pass behind one that has reduced, in the same step, adds a rank's own gradients to reduced ones, and reduces
the sum. That is right where the ranks' factors add up to 1, and made so where they don't.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from unisono.parallel.agreement import broadcast_parameters
from unisono.parallel.prepared.accumulation import Accumulation
from unisono.parallel.strategies.hooks import attach_hook
from unisono.parallel.strategies.sharded import shard
from unisono.tree import leaves
from unisono.world import World


class Engine(Protocol):
    """Runs a module's forward pass.

    Attributes:
        module: the user's.
        reduced: the parameters, by identity, that backward passes reduce; what is trained only later is not among them.
        generation: how many reductions backward passes have begun.
    """

    module: nn.Module
    reduced: frozenset[int]
    generation: int

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
        find_unused_parameters, broadcast_buffers: as for DistributedDataParallel.
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
        self.reduced = frozenset(id(each) for each in module.parameters() if each.requires_grad)
        self.generation = 0
        self._settled = self._divided = 0  # the generation of the last step, and of what `_weigh_again` has scaled
        self._factor = 1.0  # of the last reduction
        self._is_awaited = False  # the next backward pass is to reduce
        self._pass = 0  # the last backward pass that has come by here
        self._hooks: list[RemovableHandle] = []
        self._accumulation = accumulation
        self._comm = world.comm
        self._device = world.device
        self._replicated = DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)
        self._averager = attach_hook(self._replicated, hook, self._weigh, options)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool) -> Any:
        if torch.is_grad_enabled():
            self._weigh_again()
        if not (reduces and torch.is_grad_enabled()):
            with self._replicated.no_sync():
                return self._replicated(*args, **kwargs)
        result = self._replicated(*args, **kwargs)
        self._is_awaited = True
        for leaf in leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._begin_backward)
        return result

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if any(id(each) in self.reduced for group in optimizer.param_groups for each in group["params"]):
            self._settled = self.generation
            if self._averager is not None:
                self._averager.average_parameters(optimizer.param_groups)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        """A backward pass has come to an output of this model."""
        now = torch._C._current_graph_task_id()
        if now == self._pass:
            return
        self._pass = now
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
        generation = self.generation
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
        self._is_awaited = False
        self._pass = torch._C._current_graph_task_id()
        self.generation += 1
        self._factor = self._accumulation.share()[1]
        return self._factor


class ShardedEngine:
    """torch's FSDP2: each rank keeps its part of parameters, gradients and optimizer state."""

    def __init__(
        self, module: nn.Module, world: World, accumulation: Accumulation, find_unused_parameters: bool
    ) -> None:
        self.generation = 0
        self._accumulation = accumulation
        sharded: Any = shard(module, world, self._weigh, find_unused_parameters=find_unused_parameters)
        self.module = sharded
        self.reduced = frozenset(id(each) for each in sharded.parameters())

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool) -> Any:
        self.module.set_requires_gradient_sync(reduces)
        return self.module(*args, **kwargs)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def _weigh(self) -> float:
        self.generation += 1
        return self._accumulation.share()[1]


STRATEGIES = ("ddp", "fsdp", "zero1")


def check_strategy(strategy: str, hook: str | None) -> None:
    """Refuse what does not exist, or does not fit.

    Raises:
        ValueError: there is no such strategy, or the hook is none, or is for another strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} does not exist; choose one of {', '.join(STRATEGIES)}")
    if hook is not None and strategy == "fsdp":
        raise ValueError(
            f"comm_hook={hook!r} is for strategy='ddp' or 'zero1'; strategy='fsdp' sends gradients as they are"
        )


def engine_of(
    strategy: str,
    world: World,
    accumulation: Accumulation,
    hook: str | None,
    options: Mapping[str, Any] | None,
    find_unused_parameters: bool,
) -> Callable[[nn.Module], Engine]:
    """What makes the engine of a model.

    In a world of one, among threads, and where a model trains nothing, there is nothing that torch's engines could do:
    the step reduces.
    """
    if world.world_size == 1 or not world.is_of_processes:
        return LateEngine
    if strategy == "fsdp":
        return lambda module: ShardedEngine(module, world, accumulation, find_unused_parameters)

    def replicated(module: nn.Module) -> Engine:
        if not any(each.requires_grad for each in module.parameters()):
            broadcast_parameters(module, world=world)
            return LateEngine(module)
        return ReplicatedEngine(module, world, accumulation, hook, options, find_unused_parameters)

    return replicated
