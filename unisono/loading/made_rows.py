"""Rows that a `collate_fn` has made: it may drop samples, or make several rows of one. A batch counts as many samples
as it has rows; where other processes make other batches, their total is summed when a pass claims it
(`training/claims.py`). Positions in the epoch count samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from unisono.tree import children, is_container, size_along, tensors


class Collated(NamedTuple):
    """A batch, and its number of rows; None if it may be one or another."""

    batch: Any
    rows: int | None


def collated(collate: Callable[[Any], Any], samples: Any, count: int, dim: int) -> Collated:
    """The batch that a `collate_fn` makes of `samples`. It has the number of rows that all fields may have; or
    that of the samples, if more than half of the fields have it, or none shows any. A list holds samples, or a field of
    each; where neither is known, it must have a row of each sample."""
    batch = collate(samples)
    if collate is default_collate:
        return Collated(batch, count)
    is_open = type(batch) is list and bool(batch)
    if is_open and type(samples) is list:
        if batch is samples or {*map(id, samples)}.issuperset(map(id, batch)):
            return Collated(batch, len(batch))
        # Samples made again would be as many as their fields by accident.
        numbers = {len(each) if isinstance(each, tuple | list) else None for each in samples if each is not None}
        is_open = numbers != {len(batch)} or (count == len(batch) and not _stacks_fields(batch, samples))
    return Collated(batch, num_rows(batch, count, dim, is_open))


def _stacks_fields(batch: list[Any], samples: list[Any]) -> bool:
    """Whether each element shows by its shape that it stacks one field of the samples, as `default_collate` does."""
    fields = [getattr(each, "shape", ()) for each in next(each for each in samples if each is not None)]
    return fields.count(fields[0]) < len(fields) and fields == [getattr(each, "shape", ())[1:] for each in batch]


def num_rows(batch: Any, samples: int, dim: int, is_open: bool) -> int | None:
    """The number of rows of a batch made of these samples; if `is_open`, it is a list of samples, or of fields."""
    fields = children(batch) if is_container(batch) else [batch]
    if batch is None or not fields:
        return 0
    kinds = {(type(each), getattr(each, "dtype", None), getattr(each, "ndim", None)) for each in fields}
    is_open = is_open and len(kinds) == 1
    shown = [each for field in fields for each in _shown(field, samples, dim)]
    common = set.intersection(*shown) if shown else set() if is_open else {samples}
    is_most = 2 * shown.count({samples}) > max(len(shown), 3)
    rows = common.pop() if len(common) == 1 else samples if is_most else None
    if is_open and rows != samples:
        return samples if rows is None and len(fields) == samples else None
    # Where a row of each sample lies along the next dimension, `batch_dim=1` may have been left out.
    across = {size_along(each, 1) for each in tensors(batch)} if rows != samples and dim == 0 else set()
    return None if across == {samples} else rows


def _shown(field: Any, samples: int, dim: int) -> Iterator[set[int]]:
    """The numbers of rows that a field may have, and each field within it: a list may hold rows, or fields again."""
    size = int(field.batch_sizes[0]) if isinstance(field, PackedSequence) else size_along(field, dim)
    if size is not None:
        yield {size}
    elif type(field) in (list, tuple) and field:
        sizes = {size_along(each, dim) for each in field} if len(field) != samples else {None}
        yield {len(field), *sizes} - {None} if len(sizes) == 1 else {len(field)}
    elif is_container(field):
        for each in children(field):
            yield from _shown(each, samples, dim)
