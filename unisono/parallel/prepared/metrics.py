"""Which rows of a tensor count, where its rows are the samples of the batches that a loop has received."""

from __future__ import annotations

from typing import Any

import torch

from unisono.tree import leaves, tree_map
from unisono.window import window_of
from unisono.world import World


def valid_rows(values: Any, valid_samples: int | None, world: World) -> tuple[Any, int]:
    """The rows that count, and how many they are.

    Args:
        values: a tensor, or a nesting of tensors, with samples along dim 0.
        valid_samples: how many count, from the front; None asks the loop's batches.

    Raises:
        ValueError: the rows are those of no last few batches, or of one loop or another, or the tensors differ in rows.
        TypeError: a value is no tensor with rows.
    """
    rows = {len(leaf) for leaf in leaves(values) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if valid_samples is not None or not rows:  # without a tensor there is nothing to gather, which is refused behind
        return values, valid_samples or 0
    for leaf in leaves(values):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            what = "a tensor of no dimension" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            raise TypeError(f"values hold {what}, which has no samples; gather it with gather(), or leave it out")
    if len(rows) > 1:
        raise ValueError(f"values have {sorted(rows)} rows; each tensor must have one row for each sample")
    (count,) = rows
    kept = window_of(world).last_rows(count)
    if kept is None:
        recent = window_of(world).recent_rows()
        raise ValueError(
            f"values with {count} samples are those of no last few batches, which had {recent} samples, the latest "
            "last; gather the outputs of whole batches, or pass valid_samples"
        )
    if len(kept) == count:
        return values, count
    return tree_map(lambda leaf: leaf[torch.tensor(kept, device=leaf.device, dtype=torch.long)], values), len(kept)
