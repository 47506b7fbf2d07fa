"""Which samples go to which rank: pure functions over rounds, and what makes a DataLoader follow them.

A *round* is one batch per rank, taken in order from one sequence of batches: batch i goes to rank i % count. That
sequence is a function of (seed, epoch) alone, so the global batches do not depend on who loads them. Two ranks, a
loader with batches of two, ten samples 0..9, not shuffled:

    round   rank 0   rank 1        global batch
      0     0 1      2 3           0 1 2 3
      1     4 5      6 7           4 5 6 7
      2     8        9             8 9              <- the tail, one batch for two ranks, is split

The tail, a round that is short of batches, is split so that every rank makes the same number of steps and every sample
is delivered exactly once. A rank for which no sample is left gets a repeated one that counts as 0 samples. A loader
made with drop_last=True drops the tail instead, so that all batches have one size; it drops the same samples on any
number of ranks.

A DataLoader over a map-style dataset is cut at its indices: each rank loads its own samples only. Any other iterable is
cut at its batches: each rank reads all of it and keeps its own.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from unisono.errors import BusyError
from unisono.tree import batch_size, take

logger = logging.getLogger(__name__)

B = TypeVar("B")

_BUSY_S = 10.0


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


class Piece(NamedTuple):
    """A batch for one rank, with its claim on the round; `total` is None where nobody knows it."""

    batch: Any
    samples: int
    total: int | None


def deal(sizes: Sequence[int], count: int) -> list[Part]:
    """Deal a round of `len(sizes)` batches, 1 to `count` of them, to `count` ranks.

    A full round gives each rank one batch whole. In a short one, neighbouring ranks share a batch as evenly as it
    goes, the earlier ones taking the larger parts; no part is larger than its batch.
    """
    total = sum(sizes)
    parts = []
    for rank in range(count):
        batch = rank * len(sizes) // count
        first = -(-batch * count // len(sizes))  # the first rank that shares this batch, and the one after the last
        after = -(-(batch + 1) * count // len(sizes))
        place, (share, more) = rank - first, divmod(sizes[batch], after - first)
        start = place * share + min(place, more)
        stop = start + share + (place < more)
        parts.append(
            Part(batch, start, stop, stop - start, total) if start < stop else Part(batch, 0, 1, samples=0, total=total)
        )
    return parts


class Round(NamedTuple, Generic[B]):
    """The batches of one round and who takes what of them."""

    batches: list[B]
    parts: list[Part]


def rounds(
    batches: Iterable[B],
    count: int,
    size_of: Callable[[B], int | None],
    fixed_batch_size: bool = False,
    drop_tail: bool = False,
) -> Iterator[Round[B]]:
    """Group a sequence of batches into rounds of `count`.

    Args:
        size_of: the number of samples of a batch; one that returns None counts as one sample and is not cut.
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
        sizes = [1 if (size := size_of(batch)) is None else size for batch in group]
        reference = sizes[0] if number == 0 else reference
        if fixed_batch_size and (len(group) < count or any(size != reference for size in sizes)):
            logger.warning(
                "fixed_batch_size=True ends the epoch before round %d: its batches have %s samples where %d batches of "
                "%d are wanted; these samples and what follows are left out",
                number, sizes, count, reference,
            )  # fmt: skip
            return
        yield Round(group, deal(sizes, count))
        number += 1


def cut(dealt: Round[Any], rank: int, dim: int) -> Piece:
    """One rank's piece of a round of loaded batches."""
    part = dealt.parts[rank]
    batch = dealt.batches[part.batch]
    size = batch_size(batch, dim)
    if size is not None and (part.start, part.stop) != (0, size):
        batch = take(batch, part.start, part.stop, dim)
    return Piece(batch, part.samples, part.total)


def is_indexed(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether the loader is a DataLoader whose samples are named by index, so that their order can be set."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )


def drops_tail(loader: Any) -> bool:
    """Whether the loader was made with drop_last=True."""
    return bool(getattr(getattr(loader, "batch_sampler", None), "drop_last", False))


def is_sharded(loader: Any) -> bool:
    """Whether the loader's own sampler gives each rank a part already, so that it must not be cut again."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


class IndexedLoader:
    """A map-style DataLoader that yields one shard's pieces, epoch after epoch.

    The order of an epoch depends on (seed, epoch) only: samplers that draw from a generator draw from one seeded so. A
    sampler without one is taken as it is, and must itself give every rank the same order.

    *Threads:* passes may overlap, since one that was left early ends in its own time. Persistent loader workers serve
    one pass at a time, so there the next pass waits for that end.

    Args:
        loader: the user's loader, which is not touched. One with batch_size=None has no batches to be cut, only an
            order, so its shard is `Shard(0, 1)`.
        shard: whose pieces these are.
        seed: of the order; None takes the seed of the loader's generator, and 0 where it has none.
    """

    def __init__(self, loader: DataLoader[Any], shard: Shard, seed: int | None) -> None:
        self._shard = shard
        self._batch_sampler: Any = loader.batch_sampler
        self._sampler: Any = getattr(self._batch_sampler, "sampler", loader.sampler)
        generator = getattr(self._sampler, "generator", None) or loader.generator
        self._seed = seed if seed is not None else generator.initial_seed() if generator is not None else 0
        self._generator = torch.Generator()  # from which the DataLoader seeds its workers
        self._batches = _NextPass()
        self._loader = _rebuilt(loader, self._batches, self._generator)
        self._begins = threading.Lock()
        self._persistent = threading.Lock() if loader.persistent_workers else None
        self.epoch = 0

    def pieces(self, fixed_batch_size: bool = False) -> Iterator[Piece]:
        """The pieces of the next epoch. The DataLoader's iterator is made here, in the calling thread.

        Args:
            fixed_batch_size: as for `rounds`.

        Raises:
            BusyError: the loader's persistent workers serve another pass.
        """
        if self._persistent is not None and not self._persistent.acquire(timeout=_BUSY_S):
            raise BusyError(
                "this loader's persistent workers serve another loop, and they serve one at a time; end that loop "
                "first, or pass persistent_workers=False"
            )
        claims: deque[tuple[int, int]] = deque()
        try:
            with self._begins:
                epoch = self.epoch
                self.epoch += 1
                order = torch.Generator().manual_seed(epoch_seed(self._seed, epoch))
                # Each rank's workers draw numbers of their own: no two samples of a round are augmented alike.
                self._generator.manual_seed(epoch_seed(self._seed, epoch, self._shard.index))
                self._batches.indices = self._indices(claims, order, fixed_batch_size)
                batches = iter(self._loader)
        except BaseException:
            if self._persistent is not None:
                self._persistent.release()
            raise
        return _Pass(batches, claims, self._persistent)

    def _indices(
        self, claims: deque[tuple[int, int]], generator: torch.Generator, fixed_batch_size: bool
    ) -> Iterator[Any]:
        """What the DataLoader is to load in one pass, leaving the claim of each batch behind."""
        sampler, batch_sampler = self._sampler, self._batch_sampler
        if hasattr(sampler, "generator"):
            sampler = copy.copy(sampler)
            sampler.generator = generator
            if type(batch_sampler) is BatchSampler:
                batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)
        if batch_sampler is None:
            for index in sampler:
                claims.append((1, 1))
                yield index
            return
        drop_tail = bool(getattr(batch_sampler, "drop_last", False))
        for dealt in rounds(batch_sampler, self._shard.count, len, fixed_batch_size, drop_tail):
            part = dealt.parts[self._shard.index]
            claims.append((part.samples, part.total))
            yield dealt.batches[part.batch][part.start : part.stop]


class _NextPass:
    """A sampler that hands the next iterator of the DataLoader the indices laid ready for it."""

    indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _Pass:
    """The pieces of one epoch: each loaded batch with the claim that its indices left."""

    def __init__(self, batches: Iterator[Any], claims: deque[tuple[int, int]], lock: threading.Lock | None) -> None:
        self._batches = batches
        self._claims = claims
        self._lock = lock

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Piece:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._claims:
                raise
            left = len(self._claims)
            self._claims.clear()
            raise RuntimeError(  # a StopIteration in user code looks like the end of the data
                f"the loader ended {left} or more batches early: its dataset or collate_fn raised StopIteration"
            ) from None
        return Piece(batch, *self._claims.popleft())

    def __del__(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _rebuilt(loader: DataLoader[Any], indices: Any, generator: torch.Generator) -> DataLoader[Any]:
    """The same DataLoader over other indices; batches come in order, as their claims do."""
    sampling: dict[str, Any] = {"batch_sampler": indices}
    if loader.batch_sampler is None:
        sampling = {"sampler": indices, "batch_size": None}
    return DataLoader(
        loader.dataset,
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def epoch_seed(seed: int, *place: int) -> int:
    """A seed for one epoch, or for one rank in it. Hashed, so that neighbouring seeds and epochs share no order."""
    return random.Random("/".join(map(str, (seed, *place)))).getrandbits(63)
