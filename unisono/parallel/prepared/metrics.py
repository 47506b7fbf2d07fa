"""The rows of a tensor that count for a metric, if its rows are the samples of batches that a loop has received; and
metrics of torchmetrics, which gather over the ranks.

The memory of labels, and of outputs of prepared models, identifies their batch (`deliveries.py`); one such tensor
identifies the batch of the structure that contains it. Tensors computed from them (an argmax, a concatenation) are of
the batch that was delivered last, if those before it were gathered, or of all batches of its loop, if they have that
many rows. Where no batch has repeated a sample, all rows count, whatever they are. It is an error otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch

from unisono.comm.operations import HOST
from unisono.deliveries import Loop
from unisono.errors import CollectiveMismatchError
from unisono.parallel.collectives import all_gather_object, announce_structure, check_samples, gather_samples, num_rows
from unisono.parallel.means import Mean
from unisono.parallel.strategies.sharded import loaded_class
from unisono.storages import StorageMap
from unisono.timeline import REDUCE
from unisono.tree import tensors, tree_map
from unisono.world import World

Stretches = Sequence[tuple[int, int]]
"""Ranges of rows, to slice them on their device: a list of indices would have to be copied there, with a sync."""


class NoSuchBatchError(ValueError):
    """The rows match no batch. Raised on all ranks."""


def gather_rows(values: Any, valid_samples: int | None, world: World) -> Any:
    """As `Accelerator.gather_for_metrics`."""
    check_samples(values, num_rows(values) if valid_samples is None else valid_samples, 0)
    announce_structure("gather_for_metrics", values, world)
    kept, count = valid_rows(values, valid_samples, world)
    with torch.no_grad(), world.timeline.loop().span(REDUCE):
        gathered = gather_samples(kept, count, 0, world.comm.all_gather, world)
    for each in tensors(gathered) if world.world_size > 1 else ():
        world.state.part(_Gathered).note(each, True)
    return gathered


class _Gathered(StorageMap[bool]):
    """The memory of rows of all ranks."""


def valid_rows(values: Any, valid_samples: int | None, world: World) -> tuple[Any, int]:
    """Return the rows that count, and their number. A small collective, unless `valid_samples` gives the number.

    Args:
        values: a tensor, or a nesting of tensors, with samples along dim 0.
        valid_samples: the number of leading rows that count; `values` are then returned unchanged.

    Raises:
        ValueError: on all ranks: the values belong to batches of which different rows count; or it is unknown which of
            them count; or the tensors differ in their number of rows.
        TypeError: a value is not a tensor with rows.
        CollectiveMismatchError: the ranks received those batches in different rounds.
    """
    if valid_samples is not None:
        return values, valid_samples
    count, deliveries = num_rows(values), world.state.deliveries
    known = deliveries.find_rows(values, count)
    recent = [each for each in deliveries.recent() if each.last]
    newest = recent[0] if recent else Loop()
    counts = {batch.samples for batch in known}
    ways = _ways(count, recent)
    mark = known[0].mark if known else 0
    matches = any(count in (each.last.rows, each.rows.num_rows) for each in recent)
    # One reduction: the least of each, and the greatest of those sent negated.
    sent = [min(len(counts), 1), -len(counts), newest.rows.is_sized, mark, -mark, newest.mark, -newest.mark, -matches]
    sent += [each is not None for each in ways]
    least, most, is_sized, first, last, first_new, last_new, is_near, *found = world.comm.all_reduce(
        torch.tensor([int(each) for each in sent], device=HOST), "min"
    ).tolist()
    if most < -1:
        raise ValueError(
            f"values with {count} samples are of several batches, of which, on this rank or another, different rows "
            f"count (here {' or '.join(map(str, counts))}); gather each batch separately, or pass valid_samples"
        )
    if least:
        _check_rounds(first == -last, world)
        for batch in known:
            batch.loop.rows.gathered = max(batch.loop.rows.gathered, batch.number)
        return _cut(values, [(0, known[0].samples)], count)
    if not is_sized:
        if world.world_size == 1:
            return values, count
        raise ValueError(
            f"values with {count} samples: the batches of this loop do not say how many samples they hold (objects, "
            "packed sequences, lists of samples), on this rank or another, so it is unknown which of them count; pass "
            "valid_samples, len(batch) for example, and 0 where loader.valid_samples is 0; or let the loader give "
            "tensors with the samples along their first dimension"
        )
    way = next((way for way, is_open in zip(ways, found, strict=True) if is_open), None)
    if way is None:
        raise (ValueError if is_near else NoSuchBatchError)(
            f"it is unknown which of these {count} samples count: "
            + ("some batch has repeated samples, on this rank or another" if recent else "no prepared loader has read")
            + "; gather each batch in its turn, with labels as a prepared loader has delivered them or outputs of a "
            "prepared model, which identify it, or pass valid_samples"
        )
    _check_rounds(first_new == -last_new, world)
    if way is not ways[-1]:
        newest.rows.gathered = newest.num_batches
    return _cut(values, way, count)


def _ways(count: int, recent: Sequence[Loop]) -> list[Stretches | None]:
    """The rows that count if they are those of the last batch; of the whole last loop; or of any batches, none of which
    repeats a sample. None where that cannot be."""
    if not recent:
        return [None] * 3
    newest, *others = recent
    others = [each for each in others if each.is_open or not each.rows.gathered]
    last = [(0, newest.last.samples)] if newest.last.rows == count else None
    whole = newest.rows.stretches() if newest.rows.num_rows == count else None
    if any(each.rows.repeated and _may_have(each, count, newest) for each in others):
        last = whole = None
    if newest.rows.gathered < newest.num_batches - 1:  # it may be one of those that are left
        last = None
    return [last, whole, None if any(each.rows.repeated for each in (newest, *others)) else [(0, count)]]


def _may_have(other: Loop, count: int, newest: Loop) -> bool:
    """Whether the values may be of this loop: one that has ended, or is open beside the newest, for the same end."""
    if not other.is_open:
        return other.rows.num_rows == count
    return other.is_evaluation == newest.is_evaluation and count in (other.rows.num_rows, other.last.rows)


def _cut(values: Any, stretches: Stretches, count: int) -> tuple[Any, int]:
    """These rows, of `count`, and their number."""
    if list(stretches) == [(0, count)]:
        return values, count
    cut = tree_map(lambda leaf: torch.cat([leaf[start:stop] for start, stop in stretches]), values)
    return cut, sum(stop - start for start, stop in stretches)


def _check_rounds(are_same: bool, world: World) -> None:
    """Refuse rows of batches of different rounds: some samples would count twice, others not at all."""
    if not are_same:
        raise CollectiveMismatchError(
            f"rank {world.rank} gathers the samples of a batch for a metric, and another rank those of a batch of "
            "another round; every rank must loop over each prepared loader equally often, in the same order: under "
            "`if is_rank_zero():`, loop over a loader that is not prepared; and an iterable of batches must yield the "
            "same ones on each rank, or be DeviceLoader(batches, already_sharded=True)"
        )


# torchmetrics supports only torch.distributed: ranks that are threads would each compute a metric of their own samples.


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
            each.distributed_available_fn = lambda: world.world_size > 1
            each.update = wraps(each.update)(partial(_update, each, each.update, world))


def _update(metric: Any, update: Callable[..., Any], world: World, *args: Any, **kwargs: Any) -> Any:
    """Update a metric with this rank's rows; ValueError if they are those of all ranks."""
    gathered = world.state.part(_Gathered)
    if getattr(metric, "sync_on_compute", True) and any(map(gathered.find, tensors((args, kwargs)))):
        raise ValueError(
            f"the {type(metric).__name__} is updated with what gather_for_metrics has returned, and gathers over the "
            f"ranks itself: each sample would count {world.world_size} times; update it with the rank's own (count = "
            "loader.valid_samples; metric.update(scores[:count], labels[:count])), or pass it sync_on_compute=False"
        )
    return update(*args, **kwargs)


def _gather_state(world: World, own: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of a metric's state from all ranks, in rank order. They may differ in shape, and be empty."""
    parts: list[torch.Tensor] = all_gather_object(own.detach().cpu(), world)
    return [part.to(own.device) for part in parts]
