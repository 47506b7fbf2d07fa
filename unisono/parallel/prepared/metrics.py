"""Which rows of a tensor count, where its rows are the samples of batches that a loop has received.

A tensor does not tell which loop it comes from. It is told by its number of rows, on all ranks: so many batches, the
same number on each rank, must have had just these rows.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.deliveries import REMEMBERED, Loop, Rows
from unisono.tree import leaves, tree_map
from unisono.world import World


def valid_rows(values: Any, valid_samples: int | None, world: World) -> tuple[Any, int]:
    """The rows that count, and how many they are. A small collective, where nothing tells how many count.

    They are taken for those of the batch that the loop has just received; else of a whole loop, one of evaluation, and
    one of which no metric was gathered, before others; else of the last few batches that were received.

    Args:
        values: a tensor, or a nesting of tensors, with samples along dim 0.
        valid_samples: how many count, from the front; None asks the loop's batches.

    Raises:
        ValueError: the rows are those of no last few batches, or may be of two loops that count differently; on all
            ranks. Or the tensors differ in rows.
        TypeError: a value is no tensor with rows.
    """
    if valid_samples is not None:
        return values, valid_samples
    count = _num_rows(values)
    recent = world.state.deliveries.recent()
    best = _best(_fitting(count, recent, world), recent[0] if recent else None)
    if not best:
        rows = recent[0].recent_rows() if recent else []
        raise ValueError(
            f"values with {count} samples are, on this rank or another, those of no last few batches, which had {rows} "
            "samples, the latest last; gather the outputs of whole batches, or pass valid_samples"
        )
    differ = any(rows.counted != best[0][1].counted for _, rows in best)
    if len(best) > 1 and world.comm.all_reduce(torch.tensor(int(differ), device=world.device), "max"):
        counts = " or ".join(str(len(rows.counted)) for _, rows in best)
        raise ValueError(
            f"values with {count} samples may be those of several loops, and {counts} of them count here; gather what "
            "a loop has made before the next one begins, or pass valid_samples"
        )
    loop, (kept, _) = best[0]
    loop.is_gathered = True
    if len(kept) == count:
        return values, count
    return tree_map(lambda leaf: leaf[torch.tensor(kept, device=leaf.device, dtype=torch.long)], values), len(kept)


def _num_rows(values: Any) -> int:
    rows = set()
    for leaf in leaves(values):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            what = "a tensor of no dimension" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            raise TypeError(f"values hold {what}, which has no samples; gather it with gather(), or leave it out")
        rows.add(len(leaf))
    if not rows:
        raise TypeError(f"values={values!r} hold no tensor; pass one, or a nesting of them")
    if len(rows) > 1:
        raise ValueError(f"values have {sorted(rows)} rows; each tensor must have one row for each sample")
    return rows.pop()


def _fitting(count: int, recent: list[Loop], world: World) -> list[tuple[Loop, Rows]]:
    """The loops, the last one first, some last batches of which have so many rows, in as many batches on each rank."""
    found = [each.last_rows(count) for each in recent]
    batches = [rows.batches if rows is not None else 0 for rows in found]
    batches += [0] * (REMEMBERED - len(batches))
    least = world.comm.all_reduce(torch.tensor([*batches, *(-each for each in batches)], device=world.device), "min")
    are_alike = (least[:REMEMBERED] == -least[REMEMBERED:]).tolist()
    return [
        (loop, rows)
        for loop, rows, is_alike in zip(recent, found, are_alike, strict=False)
        if rows is not None and is_alike
    ]


def _best(fitting: list[tuple[Loop, Rows]], newest: Loop | None) -> list[tuple[Loop, Rows]]:
    """Those that are likely; several where there is nothing to choose by."""
    present = [each for each in fitting if each[0].is_open and each[1].batches == 1]
    whole = [each for each in fitting if each[1].batches == each[0].num_batches]
    waiting = [each for each in whole if not each[0].is_gathered]
    evaluations = [each for each in waiting if each[0].is_evaluation]
    if present and present[0][0] is newest:
        return present[:1] + [each for each in evaluations if each is not present[0]]
    return evaluations or waiting or whole[:1] + present[:1] or [each for each in fitting if each[0] is newest]
