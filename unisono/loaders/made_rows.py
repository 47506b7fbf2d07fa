"""Rows that a `collate_fn` has made: it may drop samples, or make several rows of one. A batch counts as many samples
as it has rows; where other processes make other batches, their total is summed when a pass claims it
(`parallel/claims.py`). Positions in the epoch count samples.

*Threads:* the reader's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.nn.utils.rnn import PackedSequence

from unisono.loaders.fetcher import Listed, Request, few
from unisono.loaders.sharding import Claim, Piece, Rule
from unisono.outcome import Outcome
from unisono.tree import can_cut, children, is_array, is_container, may_list_samples, size_along, take, tensors


class Job(NamedTuple):
    """One piece to load."""

    request: Request
    claim: Claim
    position: Any

    def piece(self, batch: Any) -> Piece:
        return Piece(batch, self.claim, self.position)


Made = tuple[Job, Any]  # what was to be loaded, and the batch


def unlisted(batch: Any) -> Any:
    return batch.batch if type(batch) is Listed else batch


def num_rows(batch: Any, samples: int, dim: int = 0) -> int | None:
    """The number of rows of a batch that was made of so many samples; None if it may be one or another.

    What a mapping, a dataclass, a tuple or a list holds are fields. All must agree, or most have a row of each sample;
    if none shows a size, there is a row of each sample. A list of records, or of lists, may hold samples instead.
    """
    if type(batch) is Listed and batch.holds_samples:
        return len(batch.batch)
    if batch is None or (is_container(batch) and not children(batch)):
        return 0
    held = children(batch) if type(batch) in (list, tuple) else []
    batch = unlisted(batch)
    if held and (may_list_samples(batch) or all(type(each) in (list, tuple) for each in held)):
        return samples if samples in (len(held), *map(len, held)) else None
    sizes = Counter(_sizes_in_fields(batch, samples, dim))
    if type(batch) is list and {*sizes} != {samples} and len({*map(_kind, held)}) == 1:
        return samples if len(held) == samples and len(sizes) > 1 else None  # of several sizes; or may be fields
    if len(sizes) > 1:
        return samples if 2 * sizes[samples] > max(sizes.total(), 3) else None
    rows = next(iter(sizes), samples)
    # Where a row of each sample lies along the next dimension, `batch_dim=1` may have been left out.
    is_across = dim == 0 and bool(found := tensors(batch)) and all(size_along(each, 1) == samples for each in found)
    return None if is_across and rows != samples else rows


def _sizes_in_fields(batch: Any, samples: int, dim: int) -> Iterator[int]:
    """The numbers of rows that fields show: a tensor or an array along `dim`, a list by what it holds of each row."""
    left = children(batch) if is_container(batch) else [batch]
    while left:
        node = left.pop()
        if (size := size_along(node, dim)) is not None:
            yield size
        elif isinstance(node, PackedSequence):
            yield int(node.batch_sizes[0])
        elif type(node) in (list, tuple) and node:
            parts = {size_along(each, dim) for each in node}
            if None in parts or len(parts) > 1 or len(node) == samples:
                yield len(node)
            else:  # fields
                left.extend(node)
        elif is_container(node):
            left.extend(children(node))


def _kind(node: Any) -> Any:
    return (node.dtype, node.ndim) if is_array(node) else type(node)


class RowCounter:
    """Counts the rows, along `dim`, of one pass's pieces. `has_own`: a `collate_fn` of the user's makes the batches;
    else a dataset that fetches many samples at once."""

    def __init__(self, has_own: bool, dim: int, rule: Rule) -> None:
        self._rule, self._dim = rule, dim
        self._is_alone = rule.count * rule.shards == 1
        self._is_apart = rule.count * rule.shards > len(rule.kept)  # other processes make the other batches
        # Datasets that fetch many are common, and lose none: they are not worth a collective in each step.
        self._is_summed = self._is_apart and has_own
        self._spare: Piece | None = None  # a row, to be repeated where a batch has none

    def count(self, made: Iterator[list[Made]]) -> Iterator[list[Piece]]:
        """The pieces of each round, with the rows that they have; ValueError if their number is not allowed. On several
        ranks, a batch without any becomes a row of another one that does not count."""
        waiting: list[list[Piece]] = []  # rounds in which a batch has no row, until there is one
        for jobs in made:
            waiting.append([self._count(job.request, job.piece(batch)) for job, batch in jobs])
            if not self._is_alone and self._spare is None:
                self._spare = next(filter(_has_rows, waiting[-1]), None)
                if self._spare and can_cut(self._spare.batch, self._dim):
                    self._spare = Piece(take(self._spare.batch, [0], self._dim), Claim(1, None))
            if self._is_alone or self._spare is not None:
                yield from map(self._finish, waiting)
                waiting = []
        yield from map(self._finish, waiting)

    def _finish(self, pieces: list[Piece]) -> list[Piece]:
        if not self._is_alone:
            pieces = [each if _has_rows(each) else self._fill(each) for each in pieces]
        if self._is_apart and not self._is_summed:
            return pieces
        total = None if self._is_summed else sum(each.claim.samples for each in pieces)
        return [each._replace(claim=each.claim._replace(total=total, is_summed=self._is_summed)) for each in pieces]

    def _count(self, request: Request, piece: Piece) -> Piece:
        if type(piece.batch) is Outcome:
            return piece
        samples, claim = len(request.indices), piece.claim
        rows = num_rows(piece.batch, samples, self._dim)
        piece = piece._replace(batch=unlisted(piece.batch))
        if rows == samples:
            return piece
        if rows is None:
            counting = int(claim.samples > 0)  # it may only repeat another batch
            claim = claim._replace(samples=counting, total=1, is_sized=False, is_guess=counting > 0)
            return piece._replace(claim=claim)
        what = f"collate_fn returned {rows} rows of {samples} samples ({few(request.indices)})"
        if self._rule.tail == "pad" or self._rule.fixed_batch_size:
            raise ValueError(
                f"{what}, and tail='pad' and fixed_batch_size=True promise batches of one size; let it return one row "
                "of each sample, or leave these options out"
            )
        if self._is_apart and not self._is_summed:
            raise ValueError(f"{what}, as the dataset's __getitems__ did; drop or add rows in a collate_fn instead")
        counting = rows if claim.samples else 0
        return piece._replace(claim=claim._replace(samples=counting, repeated=rows - counting))

    def _fill(self, piece: Piece) -> Piece:
        if self._spare is None:
            return piece
        batch, claim, _ = self._spare
        return Piece(batch, piece.claim._replace(samples=0, repeated=claim.samples + claim.repeated), piece.position)


def _has_rows(piece: Piece) -> bool:
    return piece.claim.samples + piece.claim.repeated > 0
