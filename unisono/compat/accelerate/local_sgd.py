"""`accelerate.local_sgd`: ranks step independently, and average their parameters every n steps.

A rank's gradients keep their weight, its fraction of all samples: after one plain SGD step, the average of the
parameters equals the result of a step on the reduced gradient.
"""

from __future__ import annotations

import torch
from torch import nn

from unisono.accelerator import Accelerator
from unisono.training.collectives import all_reduce
from unisono.training.prepared.model import PreparedModel
from unisono.training.strategies.sharded import is_sharded


class LocalSGD:
    """A block in whose steps each rank follows its own gradients. Leaving it averages the parameters, as does each n-th
    `step`.

    Args:
        model: prepared, else a TypeError; not sharded, nor in such a block, else a ValueError when the block is
            entered.
        enabled: False disables it: the block changes nothing.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if not isinstance(model, PreparedModel):
            raise TypeError(f"model is a {type(model).__name__} that is not prepared; pass what prepare() returned")
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._world, self._model, self._every = accelerator.world, model, local_sgd_steps

    def __enter__(self) -> LocalSGD:
        engine = self._model.engine
        if self.enabled and is_sharded(self._model.module):
            raise ValueError(
                f"the {engine.name} is sharded by strategy='fsdp', and no rank has a whole one to step with; use "
                "strategy='ddp'"
            )
        if self.enabled and engine.is_local:
            raise ValueError(
                f"the {engine.name} steps locally already, in a LocalSGD block or under its strategy; leave this block "
                "out"
            )
        engine.is_local = self.enabled
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._model.engine.is_local = False
        if self.enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Call after each batch, on every rank: averages when it is due."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """Replace the parameters on every rank by the mean over the ranks, in place. A collective."""
        for parameter in self._model.module.parameters():
            all_reduce(parameter.detach(), "mean", self._world)
