"""Rows that a `collate_fn` has made: it may drop samples, or make several rows of one.

What a batch counts is then known when it is made: n are its rows. N is their sum where one process makes the batches of
all ranks; elsewhere it is summed over the ranks when a pass claims it (`parallel/claims.py`). Positions in the epoch
count samples, so the order and a resume do not depend on rows.

*Threads:* the reader's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.nn.utils.rnn import PackedSequence

from unisono.loaders.fetcher import Listed, Request, few
from unisono.loaders.sharding import Claim, Piece, Rule
from unisono.tree import (
    PLAIN,
    can_cut,
    children,
    is_array,
    is_container,
    is_plain,
    may_list_samples,
    pick,
    size_along,
    tensors,
)


class Job(NamedTuple):
    """One piece to load."""

    request: Request
    claim: Claim
    position: Any

    def piece(self, batch: Any) -> Piece:
        return Piece(batch, self.claim, self.position)


Made = tuple[Job, Any]
"""What was to be loaded, and the batch."""


def unlisted(batch: Any) -> tuple[Any, bool | None]:
    """The batch itself; and whether its list holds samples, where that is known."""
    return (batch.batch, batch.holds_samples) if type(batch) is Listed else (batch, None)


def num_rows(batch: Any, samples: int, dim: int = 0, holds_samples: bool | None = None) -> int | None:
    """The number of rows of a batch that was made of so many samples; None if it may be one or another.

    What a mapping, a dataclass, a tuple or a list holds are fields: a tensor or an array has rows along `dim`, a list
    in a field has one of each row. All fields must agree, or most of them have a row of each sample; lists of texts
    and numbers count only if they decide. A list may hold samples instead, as they are, or `zip(*samples)`. If nothing
    shows a size, there is a row of each sample.
    """
    if holds_samples:
        return len(batch)
    if batch is None or (is_container(batch) and not children(batch)):
        return 0
    held = children(batch) if type(batch) in (list, tuple) and holds_samples is None else []
    if held and (may_list_samples(batch) or all(type(each) in (list, tuple) for each in held)):
        whole = {size_along(each, dim) for each in tensors(batch)}
        lengths = _lengths_of_lists(batch)
        shown = lengths | (whole if len(whole) == 1 else set())
        return samples if samples in lengths else shown.pop() if len(shown) == 1 else None
    sizes, texts, is_across = _sizes_in_fields(batch, samples, dim)
    if len(held) > 1 and type(batch) is list and {*sizes} != {samples} and len({*map(_kind, held)}) == 1:
        return samples if len(held) == samples and len(sizes) > 1 else None  # of several sizes; or may be fields
    if len(sizes) > 1 and 2 * sizes[samples] > max(sizes.total(), 3):
        return samples
    found = {*sizes}
    if len(found) > 1 and len(found & texts) == 1:
        found &= texts
    found = found or texts or {samples}
    return None if len(found) > 1 or (is_across and found != {samples}) else found.pop()


def _sizes_in_fields(batch: Any, samples: int, dim: int) -> tuple[Counter[int], set[int], bool]:
    """The numbers of rows that tensors and lists show, and how often; those of lists of texts and numbers; and whether,
    along the dimension after theirs, all tensors have one of each sample, as with `batch_dim=1` left out."""
    sizes, texts, is_across = Counter[int](), set[int](), dim == 0
    left = children(batch) if is_container(batch) else [batch]
    while left:
        node = left.pop()
        if (size := size_along(node, dim)) is not None:
            sizes[size] += 1
            is_across = is_across and size_along(node, 1) == samples
        elif isinstance(node, PackedSequence):
            sizes[int(node.batch_sizes[0])] += 1
        elif type(node) in (list, tuple) and node:
            if is_plain(node) or all(isinstance(each, PLAIN) for each in node):
                texts.add(len(node))
                continue
            parts = {size_along(each, dim) for each in node}
            if None in parts or len(parts) > 1 or len(node) in (samples, *sizes):  # one of each row
                sizes[len(node)] += 1
            else:  # fields
                left.extend(node)
        elif is_container(node):
            left.extend(children(node))
    return sizes, texts, is_across and bool(sizes)


def _kind(node: Any) -> Any:
    return (node.dtype, node.ndim) if is_array(node) else type(node)


def _lengths_of_lists(batch: Any) -> set[int]:
    """The number of samples, if containers are these; and that of their elements, if each has one of each sample."""
    found = {len(batch)} if may_list_samples(batch) else set()
    if all(type(each) in (list, tuple) for each in batch):
        kinds = [[*map(_kind, part)] for part in batch]
        if type(batch) is list and all(each == kinds[0] for each in kinds):
            found.add(len(batch))
        if all(len({*each}) == 1 and len(each) == len(kinds[0]) for each in kinds):
            found.add(len(kinds[0]))
    return found


class RowCounter:
    """Counts the rows of one pass's pieces, round by round.

    Args:
        has_own: whether a `collate_fn` of the user's makes the batches. If not, other numbers of rows come only of a
            dataset that fetches many samples at once.
        dim: along which the rows lie.
    """

    def __init__(self, has_own: bool, dim: int, rule: Rule) -> None:
        self._rule, self._dim = rule, dim
        self._is_alone = rule.count * rule.shards == 1
        self._is_apart = rule.count * rule.shards > len(rule.kept)  # other processes make the other batches
        # Datasets that fetch many are common, and lose none: they are not worth a collective in each step.
        self._is_summed = self._is_apart and has_own
        self._spare: Piece | None = None  # a row, to be repeated where a batch has none
        self._lengths = set[int]()  # of lists of fields or samples

    def count(self, made: Iterator[list[Made]]) -> Iterator[list[Piece]]:
        """The pieces of each round, with the rows that they have. On one of several ranks, a batch without any becomes
        a row of another one, if there is any; it does not count. ValueError if the number of rows is not known, or not
        allowed."""
        waiting: list[list[Piece]] = []  # rounds in which a batch has no row, until there is one
        for jobs in made:
            waiting.append([self._count(job.request, job.piece(batch)) for job, batch in jobs])
            if not self._is_alone:
                rows = (self._one_row(each) for each in waiting[-1] if _has_rows(each))
                self._spare = self._spare or next(rows, None)
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
        samples, claim = len(request.indices), piece.claim
        batch, listed = unlisted(piece.batch)
        piece = piece._replace(batch=batch)
        # Fields are as many in each batch.
        self._lengths |= {len(batch)} if listed is not None else set()
        rows = num_rows(batch, samples, self._dim, None if listed is False and len(self._lengths) > 1 else listed)
        if rows == samples:
            return piece
        if rows is None:
            return piece._replace(claim=claim._replace(samples=1, total=1, is_sized=False, is_guess=True))
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

    def _one_row(self, piece: Piece) -> Piece:
        if not can_cut(piece.batch, self._dim):
            return piece
        return Piece(pick(piece.batch, [0], self._dim), Claim(1, None))

    def _fill(self, piece: Piece) -> Piece:
        if self._spare is None:
            return piece
        batch, claim, _ = self._spare
        return Piece(batch, piece.claim._replace(samples=0, repeated=claim.samples + claim.repeated), piece.position)


def _has_rows(piece: Piece) -> bool:
    return piece.claim.samples + piece.claim.repeated > 0
