"""Builds prepared models, metrics and steppers with an Accelerator's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.devices.movement import map_module, move_module
from unisono.devices.randomness import seed_of, seed_python
from unisono.training.agreement import check_same_structure
from unisono.training.batch_norm import synchronize_batch_norm
from unisono.training.compilation import compile_module
from unisono.training.digests import Digests
from unisono.training.meta_modules import fill, is_on_meta
from unisono.training.passes import Passes
from unisono.training.prepared.metrics import synchronize_metric
from unisono.training.prepared.model import PreparedModel
from unisono.training.prepared.scaler import LossScaler
from unisono.training.prepared.scheduler import UnpreparedSchedule
from unisono.training.prepared.stepper import Stepper
from unisono.training.replay import replay_of
from unisono.training.strategies.bare_parameter import BareParameter
from unisono.training.strategies.strategy import Strategy
from unisono.world import World


@dataclass
class Builder:
    """Builds the prepared objects of one Accelerator, by its arguments."""

    world: World
    passes: Passes
    strategy: Strategy
    autocast: Callable[[], AbstractContextManager[Any]] | None
    scaler: LossScaler | None
    moves: bool
    compiles: Mapping[str, Any] | bool
    is_synchronized: bool
    max_grad_norm: float | None
    seed: int | None
    digest_every: int
    _is_seeded: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.seed is not None:
            self._seed_generators(self.seed)

    def model(self, module: nn.Module) -> PreparedModel:
        """Prepare the module: move it to its device, and wrap it with its engine. A collective."""
        if self.moves and not is_on_meta(module):
            module = move_module(module, self.world.device)
        elif self.moves and self.strategy.fills:  # the engine initialises parameters on "meta"
            map_module(lambda tensor: tensor if tensor.is_meta else tensor.to(self.world.device), module)
        elif self.moves:
            fill(module, self.world.device)
        if self.is_synchronized:
            module = synchronize_batch_norm(module, self.world, self.passes.weight)
        # After the move, which may replace the parameters by others, without their hooks.
        if self.compiles is not False:
            compile_module(module, {} if self.compiles is True else self.compiles)
        check_same_structure(module, self.world)
        engine = self.strategy.wrap_model(module)
        made = PreparedModel(engine, self.passes, self.autocast)
        # Until the first model is prepared, the ranks draw the same numbers; from here on, each draws its own.
        is_apart = self.world.world_size > 1 and self.passes.steps.virtual is None
        if self.seed is not None and not self._is_seeded and is_apart:
            self._seed_generators(seed_of(self.seed, "rank", self.world.rank))
        self._is_seeded = True
        return made

    def parameter(self, module: BareParameter) -> PreparedModel:
        """Prepare a bare parameter. A collective."""
        if self.world.world_size > 1 and not self.world.is_of_processes:
            held = self.world.comm.all_gather_object(id(module.value))
            if len({*held}) < len(held):
                raise ValueError(
                    f"a parameter of shape {list(module.value.shape)} is one tensor in several replicas, and each "
                    "trains one of its own: make it in the function that the replicas run"
                )
        if self.moves:
            module.move(self.world.device)
        return PreparedModel(self.strategy.wrap_parameter(module), self.passes, None)

    def metric(self, metric: Any) -> Any:
        """Make the metric gather over the ranks; one of torchmetrics is moved to the device."""
        synchronize_metric(metric, self.world)
        return metric.to(self.world.device) if self.moves and isinstance(metric, nn.Module) else metric

    def stepper(self, optimizer: Optimizer) -> Stepper:
        """Create the stepper that makes the optimizer step for all ranks."""
        self.world.state.deliveries.lone_steps.are_prepared = True
        step = self.strategy.step_of(optimizer)
        steps, digests = self.passes.steps, None
        is_recorded = self.digest_every and self.world.timeline.is_recorded
        if steps.virtual is not None and (is_recorded or replay_of(self.world) is not None):
            digests = Digests(optimizer, steps, self.digest_every)
            step = digests.in_debugger(step)
        stepper = Stepper(optimizer, self.passes, self.max_grad_norm, self.scaler, step, digests)
        UnpreparedSchedule(stepper)
        return stepper

    def done_in_steps(self) -> list[str]:
        """The settings that only steps of prepared optimizers apply."""
        asked = [f"max_grad_norm={self.max_grad_norm}"] if self.max_grad_norm is not None else []
        return asked + (["mixed_precision='fp16'"] if self.scaler is not None else [])

    def _seed_generators(self, seed: int) -> None:
        """Seed the process's generators; if ranks are threads, which share them, only the replica's own."""
        world = self.world
        torch.manual_seed(seed)  # in a replica, even the only one, its own
        if world.world_size == 1 or world.is_of_processes:
            seed_python(seed)
        state = world.backend.seeded_state(seed, world.device)
        if state is not None:
            world.backend.set_rng_state(state, world.device)
