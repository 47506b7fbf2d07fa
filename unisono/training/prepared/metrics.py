"""The rows of a tensor that count for a metric, if its rows are the samples of a batch that a loop has received; and
metrics of torchmetrics, which gather over the ranks.

Values belong to the batch whose memory one of them shares: labels, or outputs of prepared models (`deliveries.py`).
Those computed from them (an argmax) belong to the batch delivered last, if they have as many rows and earlier batches
were gathered. Where no batch has repeated a sample, all rows count, whatever they are. Otherwise it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch

from unisono.batches.deliveries import Loop
from unisono.batches.storages import StorageMap
from unisono.comm.operations import HOST
from unisono.errors import CollectiveMismatchError, NoSuchBatchError
from unisono.report.timeline import REDUCE
from unisono.training.collectives import (
    all_gather_object,
    announce_structure,
    check_samples,
    gather_samples,
    num_rows,
    refuse_within_round,
)
from unisono.training.means import Mean
from unisono.training.strategies.sharded import loaded_class
from unisono.tree import tensors
from unisono.world import World


def gather_rows(values: Any, valid_samples: int | None, world: World) -> Any:
    """As `Accelerator.gather_for_metrics`."""
    refuse_within_round("gather_for_metrics", world, is_of_batch=True)
    check_samples(values, num_rows(values) if valid_samples is None else valid_samples, 0)
    announce_structure("gather_for_metrics", values, world)
    count = _num_valid(values, world) if valid_samples is None else valid_samples
    with torch.no_grad(), world.timeline.loop().span(REDUCE):
        gathered = gather_samples(values, count, 0, world.comm.all_gather, world)
    for each in tensors(gathered) if world.world_size > 1 else ():
        world.state.part(_Gathered).note(each, True)
    return gathered


class _Gathered(StorageMap[bool]):
    """The memory of rows of all ranks."""


def _num_valid(values: Any, world: World) -> int:
    """How many rows count, from the front. A small collective; on all ranks, ValueError where it is unknown on one, and
    CollectiveMismatchError if they received the batches in different rounds."""
    count, deliveries = num_rows(values), world.state.deliveries
    recent = [each for each in deliveries.recent() if each.last]
    loops = [*recent[:1], *(each for each in recent[1:] if each.is_open or not each.gathered)]
    newest = loops[0] if loops else Loop()
    known = deliveries.find_rows(values, count) or ([newest.last] if _are_of_last(count, loops) else [])
    counts, mark = {batch.samples for batch in known}, known[0].mark if known else 0
    matches = any(count in (each.last.rows, each.num_rows) for each in recent)
    all_count = bool(loops) and not any(each.has_repeated for each in loops)
    # One reduction: the least of each, and the greatest of those sent negated.
    sent = [min(len(counts), 1), -len(counts), newest.is_sized, mark, -mark, newest.mark, -newest.mark]
    least, most, is_sized, first, last, first_new, last_new, may_all, is_near = world.comm.all_reduce(
        torch.tensor([int(each) for each in (*sent, all_count, -matches)], device=HOST), "min"
    ).tolist()
    if most < -1:
        raise ValueError(
            f"values with {count} samples come from several batches, and on this rank or another different rows of "
            f"them count (here {' or '.join(map(str, counts))}); gather each batch separately, or pass valid_samples"
        )
    if least:
        _check_rounds(first == -last, world)
        for batch in known:
            batch.note_metric()
        return known[0].samples
    if not is_sized and world.world_size > 1:
        raise ValueError(
            f"values with {count} samples: the batches of this loop do not say how many samples they hold (objects, "
            "packed sequences, lists of samples), on this rank or another, so it is unknown which of them count; pass "
            "valid_samples, len(batch) for example, and 0 where loader.valid_samples is 0; or let the loader give "
            "tensors with the samples along their first dimension"
        )
    if is_sized and not may_all:
        raise (ValueError if is_near else NoSuchBatchError)(
            f"it is unknown which of these {count} samples count: "
            + ("some batch has repeated samples, on this rank or another" if loops else "no prepared loader has read")
            + "; gather each batch in its turn, with labels as a prepared loader has delivered them or outputs of a "
            "prepared model, which identify it; or keep the first loader.valid_samples rows of each batch, and pass "
            "valid_samples, the number of those kept"
        )
    _check_rounds(first_new == -last_new, world)
    return count


def _are_of_last(count: int, loops: Sequence[Loop]) -> bool:
    """Whether computed values of that many rows can only belong to the batch delivered last: not to one before it, nor
    to another loop that repeats samples, whether all of that loop or, if it has the same end, its last batch."""
    if not loops or loops[0].last.rows != count:
        return False
    if loops[0].last.draw is not None and loops[0].is_open:  # of virtual ranks, one batch at a time
        return True
    if loops[0].gathered < loops[0].num_batches - 1:
        return False
    return not any(
        count == each.num_rows or (count == each.last.rows and each.is_evaluation == loops[0].is_evaluation)
        for each in loops[1:]
        if each.has_repeated
    )


def _check_rounds(are_same: bool, world: World) -> None:
    """Refuse rows of batches of different rounds: some samples would count twice, others not at all."""
    if not are_same:
        raise CollectiveMismatchError(
            f"rank {world.rank} gathers a batch's samples for a metric, and another rank those of a batch from "
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
            each.update = wraps(each.update)(partial(_update_samples, each, each.update, world))


def _update_samples(metric: Any, update: Callable[..., Any], world: World, *args: Any, **kwargs: Any) -> Any:
    """Update a metric with this rank's rows; ValueError if they are those of all ranks. No rows, or those of a batch
    that counts nowhere, change nothing."""
    loop = next(iter(world.state.deliveries.open_loops()), None)
    draw = None if loop is None or loop.last is None else loop.last.draw
    given = [len(each) for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.ndim]
    if (draw is not None and not draw.counts) or (given and not any(given)):
        return None
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
