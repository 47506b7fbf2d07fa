"""Which samples go to which rank: pure functions over rounds, and what makes a DataLoader follow them.

A *round* is one batch per rank, taken in order from one sequence of batches: batch i goes to rank i % count. That
sequence is a function of (seed, epoch) alone, so the global batches do not depend on who loads them. Two ranks, a
loader with batches of two, ten samples 0..9, not shuffled:

    round   rank 0   rank 1        global batch
      0     0 1      2 3           0 1 2 3
      1     4 5      6 7           4 5 6 7
      2     8        9             8 9              <- the tail, one batch for two ranks, is split

The tail, a round that is short of batches, is split so that every rank makes the same number of steps and every sample
is delivered exactly once. A rank for which no sample is left gets a repeated one that counts as 0 samples.

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
from typing import Any, Generic, NamedTuple, TypeVar

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
        start, stop = (-(-place * sizes[batch] // (after - first)) for place in (rank - first, rank - first + 1))
        parts.append(
            Part(batch, start, stop, stop - start, total) if start < stop else Part(batch, 0, 1, samples=0, total=total)
        )
    return parts


class Round(NamedTuple, Generic[B]):
    """The batches of one round and who takes what of them."""

    batches: list[B]
    parts: list[Part]


def rounds(
    batches: Iterable[B], count: int, size_of: Callable[[B], int | None], fixed_batch_size: bool = False
) -> Iterator[Round[B]]:
    """Group a sequence of batches into rounds of `count`.

    Args:
        size_of: the number of samples of a batch; one that returns None counts as one sample and is not cut.
        fixed_batch_size: end before the first round that is short or holds a batch of another size than the first
            batch of all; what is left out is logged.
    """
    source = iter(batches)
    reference: int | None = None
    number = 0
    while group := list(islice(source, count)):
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


def is_indexed(loader: Any) -> bool:
    """Whether the loader is a DataLoader whose samples are named by index, so that it can be cut there."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


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
        loader: the user's loader, which is not touched.
        shard: whose pieces these are.
        fixed_batch_size: as for `rounds`.
        seed: of the order; None takes the seed of the loader's generator, and 0 where it has none.
    """

    def __init__(self, loader: DataLoader[Any], shard: Shard, fixed_batch_size: bool, seed: int | None) -> None:
        self._shard = shard
        self._fixed_batch_size = fixed_batch_size
        self._batch_sampler: Any = loader.batch_sampler
        sampler = getattr(self._batch_sampler, "sampler", None)
        generator = getattr(sampler, "generator", None) or loader.generator
        self._seed = seed if seed is not None else generator.initial_seed() if generator is not None else 0
        self._generator = torch.Generator()  # from which the DataLoader seeds its workers
        self._batches = _NextPass()
        self._loader = _rebuilt(loader, self._batches, self._generator)
        self._persistent = threading.Lock() if loader.persistent_workers else None
        self.epoch = 0

    def pieces(self) -> Iterator[Piece]:
        """The pieces of the next epoch. The DataLoader's iterator is made here, in the calling thread.

        Raises:
            BusyError: the loader's persistent workers serve another pass.
        """
        if self._persistent is not None and not self._persistent.acquire(timeout=_BUSY_S):
            raise BusyError(
                "this loader's persistent workers serve another loop, and they serve one at a time; end that loop "
                "first, or pass persistent_workers=False"
            )
        seed = epoch_seed(self._seed, self.epoch)
        self.epoch += 1
        self._generator.manual_seed(seed)
        claims: deque[tuple[int, int]] = deque()
        self._batches.indices = self._indices(claims, torch.Generator().manual_seed(seed))
        return _Pass(iter(self._loader), claims, self._persistent)

    def _indices(self, claims: deque[tuple[int, int]], generator: torch.Generator) -> Iterator[list[int]]:
        """What the DataLoader is to load in one pass, leaving the claim of each batch behind."""
        batch_sampler = self._batch_sampler
        if type(batch_sampler) is BatchSampler and hasattr(batch_sampler.sampler, "generator"):
            sampler = copy.copy(batch_sampler.sampler)
            sampler.generator = generator
            batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)
        for dealt in rounds(batch_sampler, self._shard.count, len, self._fixed_batch_size):
            part = dealt.parts[self._shard.index]
            claims.append((part.samples, part.total))
            yield dealt.batches[part.batch][part.start : part.stop]


class _NextPass:
    """A batch sampler that hands the next iterator of the DataLoader the indices laid ready for it."""

    indices: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
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


def _rebuilt(loader: DataLoader[Any], batch_sampler: Any, generator: torch.Generator) -> DataLoader[Any]:
    """The same DataLoader over other batches of indices; batches come in order, as their claims do."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
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


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch. Hashed, so that neighbouring seeds and epochs share no order."""
    return random.Random(f"{seed}/{epoch}").getrandbits(63)
