"""Local SGD: each rank steps on its own gradients, and the ranks' parameters are averaged from time to time.

A rank's gradients keep their weight, its fraction of all samples: after one plain SGD step, the average of the
parameters equals the result of a step on the reduced gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.parallel.collectives import all_reduce
from unisono.parallel.prepared.model import PreparedModel
from unisono.parallel.strategies.sharded import is_sharded
from unisono.world import World


@contextmanager
def local_steps(model: PreparedModel) -> Iterator[None]:
    """Within the block, each rank steps on its own gradients of this model. All ranks must enter and leave it.

    Raises:
        ValueError: the model is sharded, so that no rank has a complete model to step on.
    """
    if is_sharded(model.module):
        raise ValueError(
            f"the {model.engine.name} is sharded by strategy='fsdp', and no rank has a whole one to step with; use "
            "strategy='ddp'"
        )
    before, model.engine.is_local = model.engine.is_local, True
    try:
        yield
    finally:
        model.engine.is_local = before


@torch.no_grad()
def average_parameters(model: PreparedModel, world: World) -> None:
    """Replace the parameters on every rank by the mean over the ranks, in place. A collective."""
    for parameter in model.module.parameters():
        all_reduce(parameter.detach(), "mean", world)
