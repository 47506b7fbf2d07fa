"""`accelerate.local_sgd`: ranks step independently, and average their parameters every n steps."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from unisono.accelerator import Accelerator
from unisono.parallel.prepared.local_steps import average_parameters, local_steps
from unisono.parallel.prepared.model import PreparedModel


class LocalSGD:
    """A block in whose steps each rank follows its own gradients.

    Args:
        accelerator: the Accelerator that has prepared the model.
        model: prepared, not sharded.
        local_sgd_steps: calls of `step` from one average to the next; leaving the block averages, too.
        enabled: False disables it: the block changes nothing.

    Raises:
        TypeError: the model is not prepared.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if not isinstance(model, PreparedModel):
            raise TypeError(f"model is a {type(model).__name__} that is not prepared; pass what prepare() returned")
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._world, self._model, self._every = accelerator.world, model, local_sgd_steps
        self._block = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._block.enter_context(local_steps(self._model))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._block.close()
        if self.enabled and kind is None:
            average_parameters(self._model, self._world)

    def step(self) -> None:
        """Call after each batch, on every rank: averages when it is due."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            average_parameters(self._model, self._world)
