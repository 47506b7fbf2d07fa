"""Rows that a `collate_fn` has made: it may drop samples, or make several rows of one. A batch counts as many samples
as it has rows; where other processes make other batches, their total is summed when a pass claims it
(`parallel/claims.py`). Positions in the epoch count samples.

*Threads:* the reader's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from unisono.loaders.fetcher import Listed, few
from unisono.loaders.sharding import Claim, Piece, Rule
from unisono.outcome import Outcome
from unisono.tree import can_cut, children, is_container, size_along, take, tensors


def unlisted(batch: Any) -> Any:
    return batch.batch if type(batch) is Listed else batch


def num_rows(batch: Any, samples: int, dim: int = 0) -> int | None:
    """The number of rows of a batch that was made of so many samples; None if it may be one or another.

    It is the one that all fields may have; or that of the samples, if more than half of the fields have it, or none
    shows any. A list of alike elements that is not known to hold samples, or fields, must have a row of each sample.
    """
    if type(batch) is Listed and batch.holds_samples:
        return len(batch.batch)
    fields = children(unlisted(batch)) if is_container(unlisted(batch)) else [batch]
    if batch is None or not fields:
        return 0
    kinds = {(type(each), getattr(each, "dtype", None), getattr(each, "ndim", None)) for each in fields}
    is_open = type(batch) is list and len(kinds) == 1
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


def count_rows(made: Iterator[list[tuple[Sequence[Any], Piece]]], dim: int, rule: Rule) -> Iterator[list[Piece]]:
    """The pieces of each round, made by a `collate_fn` of samples with these indices, with the rows that they have;
    ValueError if their number is not allowed. On several ranks, a batch without any becomes a row that counts not."""
    is_summed = rule.count * rule.shards > len(rule.kept)  # other processes make the other batches
    counted = ([_counted(*each, dim, rule) for each in pieces] for pieces in made)
    for pieces in counted if rule.count * rule.shards == 1 else _filled(counted, dim):
        total = None if is_summed else sum(each.claim.samples for each in pieces)
        yield [each._replace(claim=each.claim._replace(total=total, is_summed=is_summed)) for each in pieces]


def _counted(indices: Sequence[Any], piece: Piece, dim: int, rule: Rule) -> Piece:
    rows = len(indices) if type(piece.batch) is Outcome else num_rows(piece.batch, len(indices), dim)
    claim, piece = piece.claim, piece._replace(batch=unlisted(piece.batch))
    if rows == len(indices):
        return piece
    if rows is None:
        counting = int(claim.samples > 0)  # it may only repeat another batch
        return piece._replace(claim=claim._replace(samples=counting, is_sized=False, is_guess=counting > 0))
    if rule.tail == "pad" or rule.fixed_batch_size:
        raise ValueError(
            f"collate_fn returned {rows} rows of {len(indices)} samples ({few(indices)}), and tail='pad' and "
            "fixed_batch_size=True promise batches of one size; let it return one row of each sample, or leave these "
            "options out"
        )
    counting = rows if claim.samples else 0
    return piece._replace(claim=claim._replace(samples=counting, repeated=rows - counting))


def _filled(rounds: Iterator[list[Piece]], dim: int) -> Iterator[list[Piece]]:
    """The rounds; a batch without a row is replaced by a row of another one, the first that has any."""
    spare: Piece | None = None
    waiting: list[list[Piece]] = []
    for pieces in rounds:
        waiting.append(pieces)
        if spare is None and (spare := next(filter(_rows_of, pieces), None)) and can_cut(spare.batch, dim):
            spare = Piece(take(spare.batch, [0], dim), Claim(1, None))
        if spare is not None:
            for each in waiting:
                yield [piece if _rows_of(piece) else _repeated(spare, piece) for piece in each]
            waiting.clear()
    yield from waiting


def _repeated(spare: Piece, piece: Piece) -> Piece:
    return spare._replace(claim=piece.claim._replace(repeated=_rows_of(spare)), position=piece.position)


def _rows_of(piece: Piece) -> int:
    return piece.claim.samples + piece.claim.repeated
