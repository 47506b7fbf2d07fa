"""Which samples go to which rank: pure functions over rounds of batches.

A *round* is one batch per rank, taken in order from one sequence of batches: batch i goes to rank i % count. That
sequence is a function of (seed, epoch) alone, so the global batches do not depend on who loads them. Two ranks, a
loader with batches of two, ten samples 0..9, not shuffled:

    round   rank 0   rank 1        global batch
      0     0 1      2 3           0 1 2 3
      1     4 5      6 7           4 5 6 7
      2     8        9             8 9              <- the tail, one batch for two ranks, is split

The tail, a round that is short of batches, is split so that every rank makes the same number of steps and every sample
is delivered exactly once. A rank for which no sample is left gets a repeated one that counts as 0 samples. So does one
that would get a part of a batch that cannot be cut with certainty: its neighbour takes it whole. A loader made with
drop_last=True drops the tail instead, so that all batches have one size; it drops the same samples on any
number of ranks.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from unisono.tree import batch_size, can_cut, is_array, leaves, take

logger = logging.getLogger(__name__)

B = TypeVar("B")


@dataclass(frozen=True)
class Shard:
    """One of `count` equal claims on a sequence of batches."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"Shard(index={self.index}, count={self.count}): the index must be in 0 .. count - 1")


class Part(NamedTuple):
    """What one rank takes of a round: samples `start` to `stop` of the round's batch number `batch`.

    `samples` of the round's `total` samples are this rank's; 0 when the part only repeats a sample to keep step.
    """

    batch: int
    start: int
    stop: int
    samples: int
    total: int


class Claim(NamedTuple):
    """What a batch counts in its round: `samples` of the `total` of all ranks, None where nobody knows that.

    `mark` is the same on all ranks where they stand in the same round, and most probably not where they do not.
    `repeated` samples of the batch only repeat others, and come behind those that count.
    """

    samples: int
    total: int | None
    mark: int = 0
    repeated: int = 0


class Piece(NamedTuple):
    """A batch for one rank with its claim, and the position of the source behind its round."""

    batch: Any
    claim: Claim
    position: Any = None


class Size(NamedTuple):
    """How many samples a batch holds, and whether it can be cut into them."""

    samples: int
    can_be_cut: bool = True


def deal(sizes: Sequence[Size], count: int) -> list[Part]:
    """Deal a round of `len(sizes)` batches, 1 to `count` of them, to `count` ranks.

    A full round gives each rank one batch whole. In a short one, neighbouring ranks share a batch as evenly as it
    goes, the earlier ones taking the larger parts; no part is larger than its batch.
    """
    total = sum(size.samples for size in sizes)
    parts = []
    for rank in range(count):
        batch = rank * len(sizes) // count
        first = -(-batch * count // len(sizes))  # the first rank that shares this batch, and the one after the last
        after = -(-(batch + 1) * count // len(sizes))
        place, samples = rank - first, sizes[batch].samples
        if not sizes[batch].can_be_cut:
            parts.append(Part(batch, 0, samples, 0 if place else samples, total))
            continue
        share, more = divmod(samples, after - first)
        start = place * share + min(place, more)
        stop = start + share + (place < more)
        parts.append(Part(batch, start, stop, stop - start, total) if start < stop else Part(batch, 0, 1, 0, total))
    return parts


class Round(NamedTuple, Generic[B]):
    """The batches of one round, their sizes, and who takes what of them."""

    batches: list[B]
    sizes: list[Size]
    parts: list[Part]


def rounds(
    batches: Iterable[B],
    count: int,
    size_of: Callable[[B], Size],
    fixed_batch_size: bool = False,
    drop_tail: bool = False,
) -> Iterator[Round[B]]:
    """Group a sequence of batches into rounds of `count`.

    Args:
        size_of: measures a batch.
        drop_tail: leave out the tail instead of splitting it.
        fixed_batch_size: end before the first round that is short or holds a batch of another size than the first
            batch of all; what is left out is logged.
    """
    source = iter(batches)
    reference: int | None = None
    number = 0
    while group := list(islice(source, count)):
        if drop_tail and len(group) < count:
            return
        sizes = [size_of(batch) for batch in group]
        reference = sizes[0].samples if number == 0 else reference
        if fixed_batch_size and (len(group) < count or any(size.samples != reference for size in sizes)):
            logger.warning(
                "fixed_batch_size=True ends the epoch before round %d: its batches have %s samples where %d batches of "
                "%d are wanted; these samples and what follows are left out",
                number, [size.samples for size in sizes], count, reference,
            )  # fmt: skip
            return
        yield Round(group, sizes, deal(sizes, count))
        number += 1


def measure(batch: Any, dim: int, known: int | None = None) -> Size:
    """The size of a loaded batch, `known` where it is; one that does not tell counts as one sample."""
    size = batch_size(batch, dim)
    if known is not None:
        return Size(known, can_be_cut=size == known and can_cut(batch, dim))
    return Size(1, can_be_cut=False) if size is None else Size(size, can_cut(batch, dim))


def cut(dealt: Round[Any], rank: int, dim: int, mark: int = 0) -> Piece:
    """One rank's piece of a round of loaded batches."""
    part = dealt.parts[rank]
    batch = dealt.batches[part.batch]
    if (part.start, part.stop) != (0, dealt.sizes[part.batch].samples):
        batch = take(batch, part.start, part.stop, dim)
    return Piece(batch, Claim(part.samples, part.total, mark, int(not part.samples)))


def mark_of(*content: Any) -> int:
    """A mark of a round, from what is the same on all ranks: 32 bits of a hash of its text."""
    return zlib.crc32(repr(content).encode())


def glimpse(batch: Any) -> list[Any]:
    """A little of a loaded batch, by which to tell it from another one, at little cost: some whole numbers and texts.

    Fractions and single bytes are not looked at. They may be images, which each rank may augment in its own way.
    """
    seen = (_corner(leaf) if is_array(leaf) else leaf for leaf in leaves(batch))
    return list(islice((each for each in seen if isinstance(each, str | int | list)), 4))


def _corner(array: Any) -> Any:
    """A few whole numbers of a plain tensor or array, None where it has none."""
    if isinstance(array, torch.Tensor):
        is_whole = array.dtype in (torch.int16, torch.int32, torch.int64)
        if not is_whole or array.layout is not torch.strided or array.is_nested or array.is_meta:
            return None
    elif array.dtype.kind not in "iU" or array.itemsize < 2:
        return None
    return array[(slice(0, 1),) * (array.ndim - 1) + (slice(0, 8),) * (array.ndim > 0)].tolist()
