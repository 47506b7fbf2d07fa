"""Makes torchmetrics' metrics gather their states over a world's ranks, threads or processes, when they compute.

torchmetrics supports only torch.distributed: ranks that are threads would each compute the metric of their own samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from unisono.parallel.collectives import all_gather_object
from unisono.parallel.means import Mean
from unisono.parallel.strategies.sharded import loaded_class
from unisono.storages import StorageMap
from unisono.tree import tensors
from unisono.world import World


def is_metric(each: Any) -> bool:
    """Whether the object is a `Mean`, or a torchmetrics `Metric` or `MetricCollection`."""
    kinds = Mean, loaded_class("torchmetrics", "Metric"), loaded_class("torchmetrics", "MetricCollection")
    return any(isinstance(each, kind) for kind in kinds if kind)


def synchronize_metric(metric: Any, world: World) -> None:
    """Make the metric, or those in a collection, gather over the ranks of that world when they compute."""
    if isinstance(metric, Mean):
        metric.world = world
        return
    for each in metric.modules():
        if isinstance(each, loaded_class("torchmetrics", "Metric")):
            each.dist_sync_fn = partial(_gather_state, world)
            each.distributed_available_fn = partial(_has_peers, world)
            each.update = wraps(each.update)(partial(_update, each, each.update, world))


def _update(metric: Any, update: Callable[..., Any], world: World, *args: Any, **kwargs: Any) -> Any:
    """Update a metric with this rank's rows.

    Raises:
        ValueError: they are rows of all ranks.
    """
    gathered = world.state.part(_Gathered)
    if getattr(metric, "sync_on_compute", True) and any(map(gathered.find, tensors((args, kwargs)))):
        raise ValueError(
            f"the {type(metric).__name__} is updated with what gather_for_metrics has returned, and gathers over the "
            f"ranks itself: each sample would count {world.world_size} times; update it with the rank's own (count = "
            "loader.valid_samples; metric.update(scores[:count], labels[:count])), or pass it sync_on_compute=False"
        )
    return update(*args, **kwargs)


class _Gathered(StorageMap[bool]):
    """The memory of rows of all ranks."""


def note_gathered(values: Any, world: World) -> None:
    """Note that these rows are those of all ranks."""
    if world.world_size > 1:
        for each in tensors(values):
            world.state.part(_Gathered).note(each, True)


def _has_peers(world: World) -> bool:
    return world.world_size > 1


def _gather_state(world: World, own: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of a metric's state from all ranks, in rank order. They may differ in shape, and be empty."""
    parts: list[torch.Tensor] = all_gather_object(own.detach().cpu(), world)
    return [part.to(own.device) for part in parts]
