"""Rows that a `collate_fn` has made: it may drop samples, or make several rows of one.

What a batch counts is then known when it is made: n are its rows. N is their sum where one process makes the batches of
all ranks; elsewhere it is summed over the ranks when a pass claims it (`parallel/claims.py`). Positions in the epoch
count samples, so the order and a resume do not depend on rows.

*Threads:* the reader's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple

from unisono.loaders.fetcher import Request, few
from unisono.loaders.sharding import Claim, Piece, Rule
from unisono.tree import PLAIN, can_cut, children, is_array, is_container, may_list_samples, nodes, pick, size_along


class Job(NamedTuple):
    """One piece to load."""

    request: Request
    claim: Claim
    position: Any

    def piece(self, batch: Any) -> Piece:
        return Piece(batch, self.claim, self.position)


Made = tuple[Job, Any]
"""What was to be loaded, and the batch."""


def num_rows(batch: Any, samples: int, dim: int = 0) -> int | None:
    """The number of rows of a batch that was made of so many samples; None if it may be one or another.

    It is that of the samples if anything in the batch has this size, or if nothing shows a size. Else it is the size of
    the tensors and arrays; or the length of a list of samples; or, without tensors, that of the lists of texts and
    numbers.
    """
    sizes, lists, texts, is_across = set(), set(), set(), dim == 0
    for node in nodes(batch):
        if (size := size_along(node, dim)) is not None:
            sizes.add(size)
            is_across = is_across and size_along(node, 1) == samples
        elif type(node) in (list, tuple) and node:
            if len(node) == samples and _are_alike(node):
                if samples > 2 or not is_array(node[0]):
                    return samples
                lists.add(samples)  # the images of one or two samples, or the tensors of all
            elif all(isinstance(each, PLAIN) for each in node):
                texts.add(len(node))
        if samples in sizes:
            return samples
    if batch is None or (is_container(batch) and not children(batch)):
        return 0
    if sizes and is_across:  # with `batch_dim=1` left out
        lists.add(samples)
    if type(batch) in (list, tuple) and all(map(is_container, batch)):
        lists |= _lengths_of_lists(batch)
    found = lists | (sizes if len(sizes) == 1 else set()) or (set() if sizes else texts)
    return samples if not found else found.pop() if len(found) == 1 else None


def _are_alike(held: Sequence[Any]) -> bool:
    is_one = len({*map(type, held)} - {NoneType}) < 2
    return is_one and (not is_array(held[0]) or len({*map(_kind, held)} - {NoneType}) < 2)


def _kind(node: Any) -> Any:
    return (node.dtype, node.ndim) if is_array(node) else type(node)


def _lengths_of_lists(batch: Any) -> set[int]:
    """The number of samples, if containers are these; and that of their elements, if each has one of each sample."""
    found = {len(batch)} if may_list_samples(batch) else set()
    if all(type(each) in (list, tuple) for each in batch):
        kinds = [[*map(_kind, part)] for part in batch]
        if all(each == kinds[0] for each in kinds):
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

    def count(self, made: list[Made]) -> list[Piece]:
        """The pieces of a round, with the rows that they have. On one of several ranks, a batch without any becomes a
        row that was made before, if there was one; it does not count.

        Raises:
            ValueError: the number of rows is not known, or not allowed.
        """
        pieces = [self._count(job.request, job.piece(batch)) for job, batch in made]
        if not self._is_alone:
            self._spare = self._spare or next((self._one_row(each) for each in pieces if _has_rows(each)), None)
            pieces = [each if _has_rows(each) else self._fill(each) for each in pieces]
        if self._is_apart and not self._is_summed:
            return pieces
        total = None if self._is_summed else sum(each.claim.samples for each in pieces)
        return [each._replace(claim=each.claim._replace(total=total, is_summed=self._is_summed)) for each in pieces]

    def _count(self, request: Request, piece: Piece) -> Piece:
        samples, claim = len(request.indices), piece.claim
        rows = num_rows(piece.batch, samples, self._dim)
        if rows == samples:
            return piece
        if rows is None and self._is_alone:  # where nothing is weighed by it
            return piece._replace(claim=claim._replace(samples=1, total=1, is_sized=False))
        if rows is None:
            raise ValueError(
                f"collate_fn made a {type(piece.batch).__name__} from {samples} samples, which may be of another number"
                " of rows: the lengths of its lists and tensors do not agree; let it return tensors with the rows along"
                " their first dimension, or pass batch_dim="
            )
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
