"""What was to be loaded, and the pieces that come of it: with as many rows as a `collate_fn` has made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from unisono.loading.fetcher import Request, few
from unisono.loading.made_rows import Collated
from unisono.loading.sharding import Claim, Piece, Rule
from unisono.tree import can_cut, take


class Job(NamedTuple):
    """One piece to load."""

    request: Request
    claim: Claim
    position: Any

    def piece(self, batch: Any) -> Piece:
        return Piece(batch, self.claim, self.position)


Made = tuple[Job, Any]  # what was to be loaded, and the batch


def pieces_of(made: list[Made]) -> list[Piece]:
    """Of one round. To be used by `map`, since a generator would hold each batch while the next one is made."""
    return [job.piece(batch) for job, batch in made]


def count_rows(made: Iterator[list[Made]], dim: int, rule: Rule) -> Iterator[list[Piece]]:
    """The pieces of each round, which a `collate_fn` has made, with the rows that they have; ValueError if their number
    is not allowed. On several ranks, a batch without any becomes a row that does not count."""
    # By `map`, as `pieces_of`.
    if rule.virtual is not None:
        return map(_all_as_dealt, made)
    is_summed = rule.count * rule.shards > len(rule.kept)  # other processes make the other batches
    counted = map(partial(_all_counted, rule), made)
    dealt = counted if rule.count * rule.shards == 1 else _filled(counted, dim)
    return map(partial(_with_total, is_summed), dealt)


def _all_as_dealt(made: list[Made]) -> list[Piece]:
    return [_as_dealt(job, batch) for job, batch in made]


def _all_counted(rule: Rule, made: list[Made]) -> list[Piece]:
    return [_counted(job, batch, rule) for job, batch in made]


def _with_total(is_summed: bool, pieces: list[Piece]) -> list[Piece]:
    total = None if is_summed else sum(each.claim.samples for each in pieces)
    return [each._replace(claim=each.claim._replace(total=total, is_summed=is_summed)) for each in pieces]


def _as_dealt(job: Job, made: Any) -> Piece:
    if type(made) is not Collated:  # a failure
        return job.piece(made)
    indices = job.request.indices
    if made.rows != len(indices):
        rows = "an unknown number of" if made.rows is None else made.rows
        raise ValueError(
            f"collate_fn returned {rows} rows of {len(indices)} samples ({few(indices)}), and with virtual_ranks what "
            "counts in a round is known when it is dealt; let it return tensors with a row of each sample"
        )
    return job.piece(made.batch)


def _counted(job: Job, made: Any, rule: Rule) -> Piece:
    if type(made) is not Collated:  # a failure
        return job.piece(made)
    piece, claim, rows, indices = job.piece(made.batch), job.claim, made.rows, job.request.indices
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
