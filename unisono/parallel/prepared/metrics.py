"""Finds the rows of a tensor that count, if its rows are the samples of batches that a loop has received.

The memory of labels, and of outputs of prepared models, identifies their batch (`deliveries.py`); one such tensor
identifies the batch of the structure that contains it. Tensors computed from them (an argmax, a concatenation) are
recognised by their number of rows, on all ranks: consecutive batches of which nothing was gathered, or a whole loop,
must have exactly that many rows, the same number of batches on each rank. It is an error if other batches match, too,
but different rows of them count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from unisono.comm.operations import HOST
from unisono.deliveries import REMEMBERED, Batch, Loop
from unisono.errors import CollectiveMismatchError
from unisono.parallel.collectives import check_samples, gather_samples
from unisono.parallel.prepared.metric_sync import note_gathered
from unisono.parallel.structures import announce_structure
from unisono.rows import Rows, num_rows
from unisono.timeline import REDUCE
from unisono.tree import tree_map
from unisono.world import World


class NoSuchBatchError(ValueError):
    """The rows match no batch. Raised on all ranks."""


def gather_rows(values: Any, valid_samples: int | None, world: World) -> Any:
    """As `Accelerator.gather_for_metrics`."""
    check_samples(values, num_rows(values) if valid_samples is None else valid_samples, 0)
    announce_structure("gather_for_metrics", values, world)
    kept, count = valid_rows(values, valid_samples, world)
    with torch.no_grad(), world.timeline.loop().span(REDUCE):
        gathered = gather_samples(kept, count, 0, world.comm.all_gather, world)
    note_gathered(gathered, world)
    return gathered


def valid_rows(values: Any, valid_samples: int | None, world: World) -> tuple[Any, int]:
    """Return the rows that count, and their number. A small collective, unless `valid_samples` gives the number.

    The values belong to the batch whose memory they share. If there is none, they are attributed to the batch that the
    loop has just received; else to consecutive batches of which nothing was gathered; else to a whole loop,
    preferably one of evaluation.

    Args:
        values: a tensor, or a nesting of tensors, with samples along dim 0.
        valid_samples: the number of leading rows that count; `values` are then returned unchanged. None derives it from
            the loop's batches.

    Raises:
        ValueError: on all ranks, if the values belong to batches of which different rows count; if their rows match no
            recent batches; if they match several, or two loops, of which different rows count; or if the loop's
            batches have no known size. Also if the tensors differ in their number of rows.
        TypeError: a value is not a tensor with rows.
        CollectiveMismatchError: the ranks received those batches in different rounds.
    """
    if valid_samples is not None:
        return values, valid_samples
    count = num_rows(values)
    deliveries = world.state.deliveries
    known, recent = deliveries.find_rows(values, count), deliveries.recent()
    is_known, is_sized, are_same, fitting = _compare(count, known, recent, world)
    if is_known:
        _check_rounds(are_same, world)
        for batch in known:
            batch.loop.rows.gather(batch.number)
        return _counted_rows(values, range(known[0].samples), count)
    if not is_sized:
        if world.world_size == 1:
            return values, count
        raise ValueError(
            f"values with {count} samples: the batches of this loop do not say how many samples they hold (objects, "
            "packed sequences, lists of samples), on this rank or another, so it is unknown which of them count; pass "
            "valid_samples, len(batch) for example, and 0 where loader.valid_samples is 0; or let the loader give "
            "tensors with the samples along their first dimension"
        )
    best = _best(fitting, recent[0] if recent else None)
    _check_best(best, recent, count, world)
    _check_rounds(all(each.is_same for each in best), world)
    best[0].loop.rows.gather(best[0].rows.end if len(best) == 1 else 0)
    return _counted_rows(values, best[0].rows.counted, count)


def _check_best(best: list[_Fit], recent: list[Loop], count: int, world: World) -> None:
    """Check that `count` rows are of known batches. A small collective if several match."""
    if not best:
        if not recent:
            raise NoSuchBatchError(
                f"no prepared loader has delivered a batch, so it is unknown which of {count} samples count; "
                "prepare(loader), or pass valid_samples"
            )
        rows = recent[0].rows.recent()
        raise NoSuchBatchError(
            f"values with {count} samples match no recent batches, which had {rows} samples on this rank, the latest "
            "last (or do not on another rank); gather the outputs of whole batches, or pass valid_samples"
        )
    if any(each.is_ambiguous for each in best):
        raise ValueError(
            f"values with {count} samples may be those of several batches that were drawn, of which, on this rank or "
            "another, different rows count; gather them together with labels as the loader has delivered them, or with "
            "outputs of a prepared model, which identify their batch, or pass valid_samples"
        )
    differ = any(each.rows.counted != best[0].rows.counted for each in best)
    if len(best) > 1 and world.comm.all_reduce(torch.tensor(int(differ), device=HOST), "max"):
        counts = " or ".join(str(len(each.rows.counted)) for each in best)
        raise ValueError(
            f"values with {count} samples may be those of several loops, and {counts} of them count here; gather the "
            "outputs of a loop before the next one begins, or pass valid_samples"
        )
    loop = best[0].loop
    total = loop.last.total
    # In training, a loss of each rank is as likely as a row of each sample.
    if count == best[0].rows.batches == 1 and loop.is_trained and total is not None and total < world.world_size:
        raise ValueError(
            f"values with one row on each rank, after a round with {total} samples for {world.world_size} ranks, "
            "may be one value of each rank, or those samples; pass valid_samples (1 for a value of each rank), or"
            " gather them together with labels as the loader has delivered them, or with outputs of a prepared model"
        )


class _Fit(NamedTuple):
    """Batches of a loop that match the rows of the values.

    Attributes:
        is_new: whether no metric was gathered of these batches, on any rank.
        is_ambiguous: whether, on some rank, other batches of the loop match, too, and different rows of them count.
        is_same: whether the loop's last batch is of the same round on all ranks.
    """

    loop: Loop
    rows: Rows
    is_new: bool
    is_ambiguous: bool
    is_same: bool


def _counted_rows(values: Any, counted: Sequence[int], count: int) -> tuple[Any, int]:
    """The rows that count, of `count` rows, and their number."""
    if len(counted) == count:
        return values, count
    stretches = _stretches(counted)
    return tree_map(lambda leaf: torch.cat([leaf[start:stop] for start, stop in stretches]), values), len(counted)


def _stretches(places: Iterable[int]) -> list[tuple[int, int]]:
    """Merge consecutive indices into ranges, to slice rows on their device: a list of indices would have to be copied
    to the device, with a sync."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found or [(0, 0)]


def _compare(count: int, known: list[Batch], recent: list[Loop], world: World) -> tuple[bool, bool, bool, list[_Fit]]:
    """Whether every rank has identified the batch; whether the batches of the last loop have known sizes on every rank;
    whether the identified batches are of the same round; and the loops that match on all ranks, latest first. A small
    collective.

    A loop matches if some of its batches have that many rows, the same number of batches on each rank.

    Raises:
        ValueError: the batches that some rank has identified count differently.
    """
    found = [each.rows.fitting(count, each.is_open or each is recent[0]) for each in recent]
    # The ranks may remember different numbers of loops, and what they send must have one size.
    missing = REMEMBERED - len(found)
    found += [None] * missing
    batches = [rows.batches if rows else 0 for rows in found]
    are_new = [rows is not None and rows.is_new for rows in found]
    marks = [each.mark for each in recent] + [0] * missing
    state = len({batch.samples for batch in known})  # 0 if none is identified; more than 1 is an error
    is_sized = not recent or recent[0].rows.is_sized
    mark = known[0].mark if known else 0
    # One reduction gives the least of each number, and the greatest of those that are sent negated.
    sent = [min(state, 1), -state, is_sized, mark, -mark, *batches, *(-each for each in batches), *are_new]
    sent += [*(-(rows is not None and rows.is_ambiguous) for rows in found), *marks, *(-each for each in marks)]
    least, most, are_sized, least_mark, most_mark, *others = world.comm.all_reduce(
        torch.tensor(sent, device=HOST), "min"
    ).tolist()
    if most < -1:
        counts = " or ".join(str(batch.samples) for batch in known)
        raise ValueError(
            f"values with {count} samples belong to several batches, of which, on this rank or another, different rows "
            f"count (here {counts}); gather those of each batch separately, or pass valid_samples"
        )
    least_batches, most_batches, new, doubts, least_marks, most_marks = (
        others[start : start + REMEMBERED] for start in range(0, len(others), REMEMBERED)
    )
    return (
        least > 0,
        bool(are_sized),
        least_mark == -most_mark,
        [
            _Fit(loop, rows, bool(new[place]), doubts[place] < 0, least_marks[place] == -most_marks[place])
            for place, (loop, rows) in enumerate(zip(recent, found, strict=False))
            if rows and least_batches[place] == -most_batches[place]
        ],
    )


def _check_rounds(are_same: bool, world: World) -> None:
    """Refuse rows of batches that the ranks received in different rounds: some samples would count twice, others not at
    all."""
    if not are_same:
        raise CollectiveMismatchError(
            f"rank {world.rank} gathers the samples of a batch for a metric, and another rank those of a batch of "
            "another round; every rank must loop over each prepared loader equally often, in the same order: under "
            "`if is_rank_zero():`, loop over a loader that is not prepared; and an iterable of batches must yield the "
            "same ones on each rank, or be DeviceLoader(batches, already_sharded=True)"
        )


def _best(fitting: list[_Fit], newest: Loop | None) -> list[_Fit]:
    """The most likely of the loops that match; several if nothing distinguishes them."""
    present = [each for each in fitting if each.loop.is_open and each.rows.batches == 1]
    whole = [each for each in fitting if each.rows.batches == each.loop.num_batches]
    waiting = [
        each
        for each in fitting
        if (each.is_new if each.loop is newest else each in whole and not each.loop.rows.is_gathered)
    ]
    evaluations = [each for each in waiting if each.loop.is_evaluation]
    if present and present[0].loop is newest:
        beside = [each for each in present if each.loop.is_evaluation == newest.is_evaluation]
        return beside + [each for each in evaluations if each not in beside]
    return evaluations or waiting or whole[:1] + present[:1] or [each for each in fitting if each.loop is newest]
