"""What makes a DataLoader over a map-style dataset follow the rounds: it is cut at its indices.

Each rank loads its own samples only, in an order that depends on (seed, epoch) alone.
"""

from __future__ import annotations

import copy
import random
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from unisono.errors import BusyError
from unisono.loaders.sharding import Claim, Piece, Shard, Size, mark_of, rounds
from unisono.outcome import chain_of

_BUSY_S = 10.0

_lock = threading.Lock()
_twins: weakref.WeakKeyDictionary[Any, dict[tuple[Shard, int | None], IndexedLoader]] = weakref.WeakKeyDictionary()
"""The cut twins of the users' loaders. They live as long as the loader, so its epochs go on from one pass to the next,
whichever object makes the pass, and persistent loader workers stay."""


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
        claims: deque[tuple[int, int, int]] = deque()
        try:
            with self._begins:
                epoch = self.epoch
                self.epoch += 1
                order = torch.Generator().manual_seed(epoch_seed(self._seed, epoch))
                # Each rank's workers draw numbers of their own: no two samples of a round are augmented alike.
                self._generator.manual_seed(epoch_seed(self._seed, epoch, self._shard.index))
                self._batches.indices = self._indices(epoch, claims, order, fixed_batch_size)
                batches = iter(self._loader)
                self._batches.indices = iter(())  # in a pass that is left early they would hold the dataset
        except BaseException:
            if self._persistent is not None:
                self._persistent.release()
            raise
        return _Pass(batches, claims, self._persistent)

    def _indices(
        self, epoch: int, claims: deque[tuple[int, int, int]], generator: torch.Generator, fixed_batch_size: bool
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
                claims.append((1, 1, 0))
                yield index
            return
        drop_tail = bool(getattr(batch_sampler, "drop_last", False))
        dealt_rounds = rounds(batch_sampler, self._shard.count, _num_indices, fixed_batch_size, drop_tail)
        for number, dealt in enumerate(dealt_rounds):
            part = dealt.parts[self._shard.index]
            claims.append((part.samples, part.total, mark_of(epoch, number, dealt.batches)))
            yield dealt.batches[part.batch][part.start : part.stop]


class _NextPass:
    """A sampler that hands the next iterator of the DataLoader the indices laid ready for it."""

    indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _Pass:
    """The pieces of one epoch: each loaded batch with the claim that its indices left."""

    def __init__(
        self, batches: Iterator[Any], claims: deque[tuple[int, int, int]], lock: threading.Lock | None
    ) -> None:
        self._batches = batches
        self._claims = claims
        self._lock = lock

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Piece:
        try:
            batch = next(self._batches)
        except StopIteration as stop:
            if not self._claims:
                raise
            left = len(self._claims)
            self._claims.clear()
            raise RuntimeError(  # a StopIteration in user code looks like the end of the data
                f"the loader ended {left} or more batches early: its dataset or collate_fn raised StopIteration"
            ) from stop
        return Piece(batch, Claim(*self._claims.popleft()))

    def __del__(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _num_indices(indices: list[int]) -> Size:
    return Size(len(indices))


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


def twin_of(loader: DataLoader[Any], shard: Shard, seed: int | None) -> IndexedLoader:
    """The loader that cuts `loader` for that shard; the same one each time."""
    with _lock:
        twins = _twins.setdefault(loader, {})
        key = (shard, seed)
        if key not in twins:
            twins[key] = IndexedLoader(loader, shard, seed)
        return twins[key]


def whole_batches(loader: DataLoader[Any], seed: int | None) -> Iterator[tuple[Any, int | None]]:
    """Every batch of the loader, uncut, in the order of its next epoch, with the number of its samples.

    That is None for a loader with batch_size=None, whose dataset may make batches itself.
    """
    pieces = twin_of(loader, Shard(0, 1), seed).pieces()
    return ((piece.batch, None if loader.batch_sampler is None else piece.claim.samples) for piece in pieces)


def with_plain_errors(source: Iterator[list[Piece]]) -> Iterator[list[Piece]]:
    """The pieces of a DataLoader with workers, whose errors are told better.

    The frames of such an error are torch's own; they hold the workers, and the error in a circle with itself, which the
    garbage collector would resolve by waiting 5 s for each worker. So they are freed at once. And a worker that is
    killed takes the batches with it that it has loaded, of which torch says no more than that a socket was closed.
    """
    try:
        yield from source
    except Exception as error:
        for each in chain_of(error):
            traceback.clear_frames(each.__traceback__)
        if isinstance(error, EOFError | ConnectionError) and "DataLoader worker" not in str(error):
            raise RuntimeError(
                "a DataLoader worker died before its batch was received; the usual reason is a lack of memory"
            ) from error
        raise
