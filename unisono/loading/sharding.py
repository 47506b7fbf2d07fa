"""Which samples go to which rank: pure functions over rounds of batches.

A *round* is one batch per rank, all taken from one sequence of batches. That sequence is a function of (seed, epoch)
alone, so the global batches do not depend on which rank loads them. Two ranks, ten samples 0..9, not shuffled:

    split="rank", batches of two                        split="global", batches of four
    batch i goes to rank i % 2                            every batch is split over the ranks

    round   rank 0   rank 1        global batch           rank 0   rank 1        global batch
      0     0 1      2 3           0 1 2 3                0 1      2 3           0 1 2 3
      1     4 5      6 7           4 5 6 7                4 5      6 7           4 5 6 7
      2     8        9             8 9                    8        9             8 9          <- the tail

The tail is the last round if it is incomplete: short of batches, or of samples in its last batch. It is split so that
every rank makes the same number of steps and every sample is delivered exactly once. A rank for which no sample is left
gets a repeated one that counts as 0 samples. So does a rank that would get a part of a batch that cannot be cut with
certainty: its neighbour takes the whole batch. Other policies: "drop" leaves the tail out, so that all batches have one
size; "pad" pads each rank's batch with repeated samples. If some batch of a round is of unknown size, each batch is
taken whole and counts as one, and it is unknown which of its rows count.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Number
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch

from unisono.arguments import check_choice
from unisono.batches.virtual_ranks import Draw, VirtualRanks
from unisono.tree import all_have_rows, batch_size, can_cut, is_array, leaves, may_list_samples, take

logger = logging.getLogger(__name__)

B = TypeVar("B")

Split = Literal["rank", "global"]
Tail = Literal["split", "drop", "pad"]

_SEEN = 16  # values of an array
IN_ROUND = "in round {} of the loader"  # a note to an error


@dataclass(frozen=True)
class Rule:
    """How the rounds of a sequence of batches are distributed."""

    count: int = 1  # of ranks, or lanes
    kept: tuple[int, ...] = (0,)  # which of them belong to this process
    split: Split = "rank"
    tail: Tail = "split"
    fixed_batch_size: bool = False  # end before a round that is incomplete, or of other sizes than the first batch
    is_cut: bool = False  # the sequence is one shard of several, which were cut before
    is_compared: bool = True  # whether the ranks check that they read the same sequence
    shards: int = 1  # with more than one, the whole rounds are not known
    shard: int = 0  # its sample i is sample `i * shards + shard` of all
    virtual: VirtualRanks | None = None  # whose parts this process delivers one after another
    witness_every: int | None = None  # with them: the number of rounds from one with witnesses to the next
    first: int = 0  # with them: the number of a pass's first round, over all epochs

    def __post_init__(self) -> None:
        assert all(0 <= place < self.count for place in self.kept)
        check_choice(self.split, "split", *get_args(Split))
        check_choice(self.tail, "tail", *get_args(Tail))

    def witnesses(self, place: int) -> int | None:
        """How many rounds with witnesses there were before the one at that place of a pass; None if it has none."""
        if self.witness_every is None or not place:  # the first round shows whether the loop trains
            return None
        for number in (self.first + place, self.first)[: 1 + (place == 1)]:  # whose turn it was
            if number % self.witness_every == self.witness_every - 1:
                return number // self.witness_every
        return None

    def kept_of(self, place: int) -> tuple[int, ...]:
        """The parts that belong to this process in the round at that place of a pass, with that of a witness last."""
        number = self.witnesses(place)
        return self.kept if number is None or self.virtual is None else (*self.kept, self.virtual.witness(number))

    def carried_as(self, virtual: VirtualRanks) -> Rule:
        """The same rounds, of virtual ranks that are carried so."""
        return replace(self, virtual=virtual, kept=virtual.own)

    @property
    def batches(self) -> int:
        """The number of batches in a complete round."""
        return 1 if self.split == "global" else self.count

    def rounds_of(self, batches: int) -> int:
        """Return the number of rounds in this many batches."""
        full, more = divmod(batches, self.batches)
        return full + (more > 0 and self.tail != "drop" and not self.fixed_batch_size)


class Part(NamedTuple):
    """One rank's part of a round: samples `start` to `stop` of the round's batch number `batch`.

    `samples` of the round's `total` samples are this rank's; 0 if the part only repeats a sample to keep step. They are
    followed by `padding` samples, which repeat the part from its start. If some batch of the round is of unknown size
    (`is_sized` is False), these are numbers of batches.
    """

    batch: int
    start: int
    stop: int
    samples: int
    total: int
    padding: int = 0
    is_sized: bool = True

    @property
    def repeated(self) -> int:
        own = self.samples if self.is_sized else (self.stop - self.start) * self.samples
        return self.stop - self.start + self.padding - own

    def order(self) -> list[int]:
        """The samples of the batch that make up the part, its padding included."""
        own = self.stop - self.start
        return [self.start + place % own for place in range(own + self.padding)]


class Claim(NamedTuple):
    """A batch's share in its round: `samples` of the `total` of all ranks, None if unknown.

    `mark` is the same on all ranks that are in the same round, and almost certainly different otherwise. `repeated`
    samples of the batch only repeat others, and come after those that count. `dealt` batches of the given loader make
    the round. If `is_sized` is False, the samples are batches, each of which counts as one. If `is_summed`, the total
    is summed over the ranks when a pass claims the batch. If `is_guess`, the batch may have other rows than samples.
    """

    samples: int
    total: int | None
    mark: int = 0
    repeated: int = 0
    dealt: int = 1
    is_sized: bool = True
    is_summed: bool = False
    is_guess: bool = False

    @property
    def valid_samples(self) -> int | None:
        return self.samples if self.is_sized or not self.samples else None

    @property
    def weight(self) -> float | None:
        return self.samples / self.total if self.total else None


class Piece(NamedTuple):
    """A batch for one rank with its claim, and the position of the source after its round. An `Outcome` in its place is
    the failure to make it, after which the loop may go on. `draw` says which one it is, with virtual ranks."""

    batch: Any
    claim: Claim
    position: Any = None
    draw: Draw | None = None


class Size(NamedTuple):
    """How many samples a batch holds, and whether it can be cut into them."""

    samples: int
    can_be_cut: bool = True
    unsized: str = ""  # the class of a batch of unknown size, which counts as one sample


def deal(sizes: Sequence[Size], count: int, fill_to: int = 0) -> list[Part]:
    """Distribute a round of 1 to `count` batches to `count` ranks. In a short round, neighbouring ranks share a batch
    as evenly as possible, the earlier ones take the larger parts. Parts that can be cut are padded to `fill_to`."""
    is_sized = not any(size.unsized for size in sizes)
    total = sum(size.samples for size in sizes) if is_sized else len(sizes)
    if len(sizes) == count and is_sized:
        parts = [Part(batch, 0, size.samples, size.samples, total) for batch, size in enumerate(sizes)]
    else:
        parts = [_share(sizes, rank, count, total, is_sized) for rank in range(count)]
    for rank, part in enumerate(parts):
        own = part.stop - part.start
        if 0 < own < fill_to and sizes[part.batch].can_be_cut:
            parts[rank] = part._replace(padding=fill_to - own)
    return parts


def _share(sizes: Sequence[Size], rank: int, count: int, total: int, is_sized: bool) -> Part:
    batch = rank * len(sizes) // count
    # `-(-a // b)` rounds up: the first rank that shares this batch, and the first with the next one.
    first, after = -(-batch * count // len(sizes)), -(-(batch + 1) * count // len(sizes))
    place, samples = rank - first, sizes[batch].samples
    if not is_sized:
        return Part(batch, 0, samples, int(place == 0), total, is_sized=False)
    if not sizes[batch].can_be_cut:
        return Part(batch, 0, samples, 0 if place else samples, total)
    share, more = divmod(samples, after - first)
    start = place * share + min(place, more)
    stop = start + share + (place < more)
    return Part(batch, start, stop, stop - start, total) if start < stop else Part(batch, 0, 1, 0, total)


class Round(NamedTuple, Generic[B]):
    """The batches of one round, their sizes, and each rank's part: samples `start` to `stop` of the epoch. Rounds of
    equal sizes share one list of parts."""

    batches: list[B]
    sizes: list[Size]
    parts: list[Part]
    start: int
    stop: int


def rounds(
    batches: Iterable[B],
    rule: Rule,
    size_of: Callable[[B, bool], Size],
    nominal: int | None = None,
    start: int = 0,
    first: int | None = None,
) -> Iterator[Round[B]]:
    """Group a sequence of batches into rounds, after `start` samples of the epoch; ValueError if they must have one
    size, and one is of unknown size. `size_of(batch, is_cut)` measures a batch; `nominal` is the size of a complete
    one, if known in advance, and `first` that of the epoch's first one, if it precedes this sequence."""
    source = iter(batches)
    # A resumed epoch began with a batch that is not seen here; a full one, unless its size was saved.
    reference = first or (nominal if start else None)
    largest = nominal or first or 0
    width, before, parts, samples = rule.batches, list[Size](), list[Part](), 0
    while group := list(islice(source, width)):
        is_whole = len(group) == rule.count and rule.tail != "pad"
        sizes = [size_of(batch, not is_whole) for batch in group]
        if sizes == before:  # as most rounds: it passes the same checks, and is dealt equally
            yield Round(group, sizes, parts, start, start := start + samples)
            continue
        if not nominal:
            largest = max(largest, *(size.samples for size in sizes))
        is_tail = len(group) < rule.batches or (nominal is not None and min(sizes).samples < nominal)
        if reference is None:
            reference = sizes[0].samples
        if rule.fixed_batch_size:
            check_sizes_known(sizes)
        if rule.fixed_batch_size and (len(group) < rule.batches or any(size.samples != reference for size in sizes)):
            logger.warning(
                "fixed_batch_size=True ends the epoch at sample %d: the next round has batches of %s samples, and not "
                "%d of size %d; these samples and what follows are left out",
                start, [size.samples for size in sizes], rule.batches, reference,
            )  # fmt: skip
            return
        if is_tail and rule.tail == "drop":
            return
        full = -(-largest // rule.count) if rule.split == "global" else largest
        parts = deal(sizes, rule.count, full if rule.tail == "pad" else 0)
        if not before and 0 in rule.kept and rule.batches < rule.count and not any(size.can_be_cut for size in sizes):
            logger.warning(
                "split='global' (split_batches=True) divides batches, and these do not say what a sample is: one of "
                "%d devices gets all of a batch, the others repeat it without effect; split='rank' gives each its own",
                rule.count,
            )
        before, samples = sizes, sum(size.samples for size in sizes)
        yield Round(group, sizes, parts, start, start := start + samples)


def check_sizes_known(sizes: Sequence[Size]) -> None:
    """Raise ValueError if a batch is of unknown size."""
    if unsized := next((size.unsized for size in sizes if size.unsized), None):
        raise ValueError(
            f"a batch of class {unsized} does not say how many samples it holds, as it must with fixed_batch_size=True "
            "and in a stream of several ranks; let the DataLoader make the batches, by a batch_size, or yield tensors "
            "with the samples along batch_dim, in dicts, lists or tuples"
        )


def measure(batch: Any, dim: int, known: int | None = None, is_cut: bool = True, is_item: bool = False) -> Size:
    """Return the size of a loaded batch, `known` if given. Check whether it can be cut only if `is_cut`; an item of a
    dataset cannot be unless every value in it has rows: else it may be one sample, whose rows are its features."""
    size = batch_size(batch, dim) if known is None or is_cut else known
    if known is None and (size is None or (may_list_samples(batch) and len(batch) != size)):
        return Size(1, False, type(batch).__name__)
    if size is None:
        return Size(known or 0, can_be_cut=False)
    samples = size if known is None else known
    is_certain = not is_item or all_have_rows(batch, dim)
    return Size(samples, can_be_cut=not is_cut or (samples == size and is_certain and can_cut(batch, dim)))


def cut(dealt: Round[Any], rank: int, dim: int, mark: int = 0) -> Piece:
    """One rank's piece of a round of loaded batches."""
    part = dealt.parts[rank]
    batch = dealt.batches[part.batch]
    if part.padding:
        batch = take(batch, part.order(), dim)
    elif (part.start, part.stop) != (0, dealt.sizes[part.batch].samples):
        batch = take(batch, slice(part.start, part.stop), dim)
    return Piece(batch, Claim(part.samples, part.total, mark, part.repeated, len(dealt.batches), part.is_sized))


def mark_of(*content: Any) -> int:
    """Return a mark of a round, from values that are the same on all ranks: 32 bits of a hash of their text."""
    # Not `hash`, which differs between processes for texts.
    return zlib.crc32(repr(content).encode())


def glimpse(batch: Any, of_all: bool = False) -> list[Any]:
    """A few integers and texts of a loaded batch or a sample, which distinguish it from others at little cost; if
    `of_all`, fractions and bytes, too: they may be images, which each rank may augment differently."""
    found = []
    for leaf in leaves(batch):
        seen = _corner(leaf, of_all) if is_array(leaf) else leaf
        if isinstance(seen, str | int | list) or (of_all and isinstance(seen, Number | bytes)):
            found.append(zlib.crc32(seen) if isinstance(seen, bytes) else seen)
    return found[: 8 if of_all else 4]


def fingerprint(read: Sequence[Any], again: Sequence[Any] | None = None) -> int:
    """A mark of loaded batches or samples, by what distinguishes them; 0 if all of them is random."""
    columns, _ = distinguish(read, again)
    return mark_of(columns) if columns else 0


def distinguish(read: Sequence[Any], again: Sequence[Any] | None = None) -> tuple[list[Any], bool]:
    """What distinguishes loaded batches or samples from others, and whether it differs among them: of the values of
    `glimpse`, their integers and texts. Where each of these is the same in all of them (a sampling rate), they show
    nothing, and fractions and bytes count, too. If the same was read `again`, what differs there is random, and does
    not count."""
    columns, differs = [], False
    for of_all in (False, True):
        columns = list(zip(*[glimpse(each, of_all) for each in read], strict=False))
        if again is not None:
            others = zip(*[glimpse(each, of_all) for each in again], strict=False)
            columns = [one for one, other in zip(columns, others, strict=False) if one == other]
        if differs := any(len(set(_values(column))) > 1 for column in columns):
            break
    return columns, differs


def _values(seen: Any) -> list[Any]:
    return [each for part in seen for each in _values(part)] if isinstance(seen, list | tuple) else [seen]


def _corner(array: Any, of_all: bool) -> Any:
    """A few integers of a plain tensor or array, or values from all of it; None if it has none."""
    if isinstance(array, torch.Tensor):
        is_plain = array.layout is torch.strided and not (array.is_nested or array.is_meta or array.is_quantized)
        is_whole = array.dtype in (torch.int16, torch.int32, torch.int64)
    else:
        is_plain = array.dtype.kind in "biufcU"  # another object's text may be its address
        is_whole = array.dtype.kind in "iU" and array.itemsize >= 2
    if not is_plain or not (is_whole or of_all):
        return None
    if of_all:
        return array.reshape(-1)[:: max(math.prod(array.shape) // _SEEN, 1)].tolist()
    return array[(slice(0, 1),) * (array.ndim - 1) + (slice(0, 8),) * (array.ndim > 0)].tolist()
