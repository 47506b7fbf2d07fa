"""Local SGD: each rank steps on its own gradients, and the ranks' parameters are averaged now and then.

A rank's gradients keep their weights, those of its samples among all: the average of what one plain SGD step makes of
them is what the reduced gradient would have made.
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
    """A block in which steps on this model's gradients are each rank's own. Every rank enters and leaves it.

    Raises:
        ValueError: the model is sharded: its parts are no models that could step by themselves.
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
    """Give every rank the mean of the ranks' parameters, in place. A collective."""
    for parameter in model.module.parameters():
        all_reduce(parameter.detach(), "mean", world)
