"""A DataLoader over an iterable dataset: each rank, and each of its loader workers, reads its own part of the stream.

The stream is cut into parts by the first of these that can:
1. the caller: with `already_sharded=True` every rank and every worker reads its stream unchanged;
2. the dataset's own `shard` method (HuggingFace's `split_dataset_by_node`), into one part for each rank;
3. the dataset itself, if it asks `get_worker_info()` for the number of workers before it yields its first sample: the
   answer counts the workers of all ranks as one row;
4. the stride: part p of P takes the samples p, P + p, 2P + p, ... of the stream that all of them read.

On a single rank nothing is cut, and loader workers read what they read with torch; but where all of them begin with the
same sample, though each knows its number, they read one stream, and the stride gives each its part.

Parts that the dataset has cut stay as they are until the epoch ends: other ranks and workers that continue it share
them, and each reads its own one after another. `stream_parts.py` makes the dataset of any of them.

The stride assumes that all parts read the same stream. So the workers' random number generators are seeded alike, and
what the parts have seen is compared. `lockstep.py` says what a part is, and counts what was
taken of each; `part_reader.py` reads one.

*Threads:* the reader's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from unisono.devices.randomness import seed_of, seeded
from unisono.errors import StateError
from unisono.loading.comparison import has_parts
from unisono.loading.lockstep import Cutter, Read, StreamPosition, StreamProgress
from unisono.loading.part_reader import Made, PartReader
from unisono.loading.sharding import Rule, check_sizes_known, fingerprint, measure
from unisono.loading.sources import LOOKED_AT, Begun, Loaded, Source, State, rounds_of_loaded
from unisono.loading.stream_parts import (
    continues_anywhere,
    cuts_by_node,
    is_of,
    is_sized_by_rank,
    move,
    part_of,
    why_not_cut,
)
from unisono.loading.workers import WorkerPool
from unisono.world import World

logger = logging.getLogger(__name__)


class StreamSource(Source):
    """A DataLoader over an iterable dataset, epoch after epoch. The user's loader is neither modified nor kept alive:
    the caller of `begin` holds it. If `seed` is None, it is that of the loader's generator, or 0."""

    def __init__(self, loader: DataLoader[Any], rank: int, ranks: int, dim: int, seed: int | None) -> None:
        own_seed = loader.generator.initial_seed() if loader.generator else 0
        super().__init__(loader.dataset, own_seed if seed is None else seed)
        self._loader: Callable[[], Any] = weakref.ref(loader)
        self._rank, self._ranks, self._dim = rank, ranks, dim
        self.is_uneven = ranks > 1
        self._has_own: bool | None = (
            None  # whether a single rank's loader workers read streams of their own; or unknown
        )
        self._is_part: bool | None = None  # whether the dataset has cut itself by rank; None before that is compared
        self._persistent: tuple[Rule, WorkerPool, PartReader] | None = None

    def _open(self, epoch: int, position: State, rule: Rule) -> Begun:
        """The loader workers are started in the calling thread. With several ranks, the position of a piece is the
        `Read` of its batch, for `Lockstep`."""
        before, loader = StreamPosition.of_state(position), self._loader()
        if continues_anywhere(loader.dataset, self._rank, self._ranks):
            own = move(loader.dataset, epoch, before.offset, before.own)
            before = StreamPosition(before=before.offset, own=own)
        dataset, by = self._cut_by_rank(loader.dataset, rule, before)
        is_begun = before.offset > before.before
        taken = before if is_begun else before._replace(by=by, is_of_rank=by == "dataset")
        taken = taken.cut_for(self._ranks, max(loader.num_workers, 1))
        parts = taken.parts_of(self._rank, self._ranks, max(loader.num_workers, 1))
        datasets = self._datasets_of(parts, taken, dataset)
        if is_begun and any(taken.here.parts[part].state is None for each in parts for part in each):
            logger.warning("rank %d resumes the stream by reading and discarding what was delivered", self._rank)
        size, sharing = loader.batch_size, self._ranks if rule.split == "global" and not rule.is_cut else 1
        if size and size % sharing:
            raise ValueError(
                f"batch_size={size} with split='global' does not divide among world_size={sharing}, as it must over an "
                "iterable dataset; pass a batch_size that is a multiple of it, or split='rank'"
            )
        size = size and size // sharing
        drop_last = loader.drop_last or rule.tail == "drop"
        init, dim = loader.worker_init_fn, self._dim
        reader = PartReader(dataset, loader.collate_fn, dim, size, drop_last, init, self._rank, by, self.seed, taken)
        reader.parts, reader.datasets = parts, datasets
        shows_first = by == "worker" and self._has_own is None and not is_begun
        made = self._make_batches(loader, reader, rule, epoch, shows_first)
        if shows_first:
            first = [read for _, _, read in islice(made, loader.num_workers)]
            self._has_own = len({(read.position.mark, read.by) for read in first}) > 1 or first[0].by == "worker"
            if not self._has_own:  # all loader workers read the same: from the beginning again, each its part of it
                made, self._persistent = iter(()), None  # ends these workers
                return self._open(epoch, position, rule)
        stream = StreamProgress(taken, size if drop_last and size else 1)
        read: Read | None = None  # of the last batch

        def loaded() -> Iterator[Loaded]:
            nonlocal read
            for batch, rows, read in made:
                if self.is_uneven:  # `Lockstep` counts what all ranks have taken
                    check_sizes_known([measure(batch, dim, rows, is_cut=False)])
                else:
                    stream.add([read])
                yield batch, rows
            if not self.is_uneven:
                stream.check_ends()

        def after(*_: int) -> Any:
            return read if self.is_uneven else stream.position.to_state()

        if self.is_uneven:  # a round is one batch of this rank
            rule = Rule(tail=rule.tail, fixed_batch_size=rule.fixed_batch_size)
        full = size if rule.tail == "pad" else None
        pieces = rounds_of_loaded(loaded(), rule, dim, before.offset, after, full, are_items=size is None)
        return Begun(epoch, taken.to_state(), pieces, stream)

    def compare(self, world: World) -> None:
        """Let the ranks compare their datasets before the first pass, unless these are shards for certain. A
        collective; RuntimeError if they differ."""
        if self._is_part is None and self._cut_by_rank(self._loader().dataset, Rule(), StreamPosition())[1] == "stride":
            self._is_part = has_parts(self._loader().dataset, world, self._look)

    def _look(self, know_ranks: bool) -> int | None:
        """As `has_parts` wants it. In the loop's process a dataset is read only if it may have cut itself: what is read
        in another process has no consequence in this one."""
        loader, workers = self._loader(), self._loader().num_workers
        if not workers and not know_ranks:
            return None
        taken, size = StreamPosition().cut_for(1, max(workers, 1)), loader.batch_size
        init, dim = loader.worker_init_fn, self._dim
        reader = PartReader(loader.dataset, loader.collate_fn, dim, size, False, init, 0, "stride", self.seed, taken)

        def read() -> list[Any]:
            reader.set_epoch(self.epoch)
            seed = seed_of(self.seed, self.epoch, "workers")
            made = WorkerPool(loader, reader, reader.start).serve(seed) if workers else reader.made(self.epoch)
            with nullcontext() if workers else seeded(seed):
                return [batch for batch, *_ in islice(made, -(-LOOKED_AT // (size or 1)))]

        return fingerprint(read(), read())

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """As in `Source`: the position says how much was read of each part."""
        StreamPosition.of_state(position)
        super().seek(epoch, position, rule)

    @property
    def length(self) -> int | None:
        """As in `Source`; None of a dataset that knows only its rank's, which is another one on other ranks."""
        return None if self._is_sized_by_rank else super().length

    @property
    def _is_sized_by_rank(self) -> bool:
        return is_sized_by_rank(self._sized, self._rank, self._ranks)

    def num_rounds(self, rule: Rule) -> int:
        return (Rule() if self._is_sized_by_rank else rule).rounds_of(len(self._loader()))

    def _cut_by_rank(self, dataset: Any, rule: Rule, before: StreamPosition) -> tuple[Any, Cutter]:
        """This rank's stream from `before` on, and what cuts it."""
        rank, ranks = self._rank, self._ranks
        if rule.is_cut:
            return dataset, "caller"
        is_begun = before.offset > before.before
        if before.keeps_parts:
            return (dataset, "dataset") if before.is_of_rank else (part_of(dataset, 0, 1), "stride")
        # An epoch that began by stride continues by stride: parts that the dataset cuts hold other samples.
        if is_begun and before.by == "stride":
            return part_of(dataset, 0, 1), "stride"
        if ranks == 1:
            # What torch gives: only loader workers that read the same are given parts.
            has_own = self._loader().num_workers > 1 and self._has_own is not False
            return dataset, "worker" if has_own else "stride"
        is_part = self._is_part or getattr(dataset, "_distributed", None) is not None
        if is_part or cuts_by_node(dataset, rank, ranks):
            return dataset, "dataset"  # by datasets.distributed.split_dataset_by_node, or by itself
        # By stride if it cannot be cut: every rank reads all.
        if is_of(dataset, "webdataset"):
            return part_of(dataset, 0, 1) or dataset, "stride"
        part = part_of(dataset, rank, ranks)
        return (dataset, "stride") if part is None else (part, "dataset")

    def _datasets_of(self, parts: list[list[int]], taken: StreamPosition, dataset: Any) -> dict[int, Any]:
        """The datasets of parts that were cut by ranks when the pass began, by rank; StateError if they cannot be cut
        so here."""
        if not taken.keeps_parts:
            return {}
        ranks, workers = taken.here[:2]
        if self._rank == 0 and len(taken.here.parts) % self._ranks:
            least, more = divmod(len(taken.here.parts), self._ranks)
            logger.warning(
                "this epoch was cut into %d parts: %d rank(s) read %d and the others %d, so these repeat samples, "
                "which do not count, once theirs have ended; the next epoch is cut evenly",
                len(taken.here.parts), more, least + 1, least,
            )  # fmt: skip
        found: dict[int, Any] = {}
        has_cut = ranks == self._ranks and bool(self._is_part or cuts_by_node(dataset, self._rank, ranks))
        # Those of all ranks: what one of them cannot make is an error on each, or the others would wait for it.
        count = max(self._loader().num_workers, 1)
        for reader in range(self._ranks if taken.is_of_rank else 0):
            own = chain.from_iterable(taken.parts_of(reader, self._ranks, count))
            for rank in sorted({part // workers for part in own}):
                part = dataset if has_cut and rank == reader else part_of(dataset, rank, ranks)
                if part is None:
                    raise StateError(
                        f"the state was saved by {ranks} rank(s) that each read a part of their own, and here are "
                        f"{self._ranks}; {why_not_cut(dataset)}; or resume with {ranks} rank(s), or restart the epoch "
                        "by set_epoch"
                    )
                if reader == self._rank:
                    found[rank] = part
        return found

    def _make_batches(
        self, loader: DataLoader[Any], reader: PartReader, rule: Rule, epoch: int, shows_first: bool
    ) -> Iterator[Made]:
        number = loader.num_workers
        if not number and reader.goes_on == "worker" and reader.row > 1:
            number = 1  # elsewhere, nothing can say to the dataset which part it reads
            if self._rank == 0:
                logger.warning("the stream was cut by the numbers of loader workers: one reads it until the epoch ends")
        if not number:
            return reader.made(epoch)
        kept = None if reader.taken.offset else self._persistent  # a resumed pass has other parts than the next one
        if kept is not None and kept[0] == rule and kept[1].is_idle:
            _, pool, reader = kept
        else:
            pool = WorkerPool(loader, reader, reader.start)
            stay = loader.persistent_workers and not reader.taken.offset
            self._persistent = (rule, pool, reader) if stay else None
        reader.set_epoch(epoch)
        reader.cell[1] = shows_first
        return pool.serve(seed_of(self.seed, epoch, "workers", self._rank), number=number)
