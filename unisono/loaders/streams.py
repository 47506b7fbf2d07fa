"""A DataLoader over an iterable dataset: each rank, and each of its loader workers, reads its own part of the stream.

The stream is cut into parts by the first of these that can:
1. the caller: with `already_sharded=True` every rank and every worker reads its stream unchanged;
2. the dataset's own `shard` method (HuggingFace's `split_dataset_by_node`), into one part for each rank;
3. the dataset itself, if it asks `get_worker_info()` for the number of workers before it yields its first sample: the
   answer counts the workers of all ranks as one row;
4. the stride: part p of P takes the samples p, P + p, 2P + p, ... of the stream that all of them read.

The stride assumes that all parts read the same stream. So the workers' random number generators are seeded alike, and
what the parts have seen is compared.

*Threads:* the reader's; `stream_parts.py` runs in loader workers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeGuard

from torch.utils.data import DataLoader, IterableDataset

from unisono.loaders.made_rows import num_rows, unlisted
from unisono.loaders.sharding import Rule
from unisono.loaders.sources import Begun, Loaded, Source, State, makes_batches_alike, rounds_of_loaded
from unisono.loaders.stream_parts import Cutter, Made, PartReader, Read, SameStream, StreamPosition
from unisono.loaders.workers import WorkerPool
from unisono.randomness import seed_of

logger = logging.getLogger(__name__)


class StreamSource(Source):
    """A DataLoader over an iterable dataset, epoch after epoch. The user's loader is neither modified nor kept alive:
    the caller of `begin` holds it. If `seed` is None, it is that of the loader's generator, or 0.

    *Threads:* several may begin a pass.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, ranks: int, dim: int, seed: int | None) -> None:
        own_seed = loader.generator.initial_seed() if loader.generator else 0
        length = None
        with suppress(TypeError, NotImplementedError):
            length = range(len(loader.dataset))  # type: ignore[arg-type]
        super().__init__(length, own_seed if seed is None else seed)
        self._loader = weakref.ref(loader)
        self._rank, self._ranks, self._dim = rank, ranks, dim
        self._workers = max(loader.num_workers, 1)
        self.is_uneven = ranks > 1
        self._persistent: tuple[Any, WorkerPool, PartReader] | None = None

    def _open(self, epoch: int, position: State, rule: Rule) -> Begun:
        """The loader workers are started in the calling thread. With several ranks, the position of a piece is the
        `Read` of its batch, for `Lockstep`.

        Raises:
            ValueError: the ranks cannot share a global batch equally.
        """
        offset, loader = position["offset"], self._require_loader()
        before = StreamPosition.of_state(position) if offset else None
        dataset, by = self._cut_by_rank(loader.dataset, rule, before)
        start = taken = (before or StreamPosition(by)).cut_for(self._ranks, self._workers)
        if by in ("caller", "dataset"):  # what cuts the others is known only with their first sample
            taken.check_cut(by)
        if offset and any(taken.here.parts[part].state is None for part in taken.parts_of(self._rank)):
            words = (
                "rank %d resumes the stream by reading and discarding what was delivered before: no state_dict of it"
            )
            logger.warning(words + " was saved for these workers", self._rank)
        size = loader.batch_size
        if size is not None and rule.shares_batches and not rule.is_cut:
            if size % self._ranks:
                raise ValueError(
                    f"batch_size={size} with split='global' does not divide among world_size={self._ranks}, as it must "
                    "over an iterable dataset; pass a batch_size that is a multiple of it, or split='rank'"
                )
            size //= self._ranks
        drop_last = loader.drop_last or rule.tail == "drop"
        slack = size if drop_last and size else 1
        init = loader.worker_init_fn
        reader = PartReader(dataset, loader.collate_fn, size, drop_last, init, self._rank, by, self.seed, taken)
        made, full = self._make_batches(loader, reader, epoch), size if rule.tail == "pad" else None
        read: Read | None = None  # of the last batch

        def loaded() -> Iterator[Loaded]:
            nonlocal taken, read
            same = SameStream(start.here)
            for batch, samples, read in made:
                if not self.is_uneven:  # otherwise these are matters of all ranks
                    same.compare(read)
                    taken = taken.after([read])
                yield unlisted(batch), None if samples is None else num_rows(batch, samples, self._dim)
            if not self.is_uneven:
                same.check_ends(taken, slack)

        def behind(offset: int, *_: int) -> Any:
            return read if self.is_uneven else taken.to_state(offset)

        # The ranks' rounds are made in lockstep.
        pieces = rounds_of_loaded(loaded(), Rule() if self.is_uneven else rule, self._dim, offset, behind, full)
        return Begun(epoch, start.to_state(offset), pieces, full, slack)

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """As in `Source`: the position says how much was read of each part."""
        if position["offset"]:
            StreamPosition.of_state(position)
        super().seek(epoch, position if position["offset"] else {"offset": 0}, rule)

    def num_rounds(self, rule: Rule) -> int:
        return rule.rounds_of(len(self._require_loader()))

    def _require_loader(self) -> DataLoader[Any]:
        loader = self._loader()
        assert loader is not None
        return loader

    def _cut_by_rank(self, dataset: Any, rule: Rule, before: StreamPosition | None) -> tuple[Any, Cutter]:
        """This rank's stream, and what cuts it; `before` is the position in an epoch that has begun."""
        rank, ranks = self._rank, self._ranks
        if rule.is_cut:
            return dataset, "caller"
        # An epoch begun by stride goes on by stride: parts that the dataset cuts hold other samples.
        if ranks == 1 or (before is not None and before.by == "stride"):
            return dataset, "stride"
        if getattr(dataset, "_distributed", None) is not None or _cuts_by_node(dataset, rank, ranks):
            return dataset, "dataset"  # by datasets.distributed.split_dataset_by_node, or by itself
        if hasattr(dataset, "_distributed") and type(dataset).__module__.startswith("datasets."):
            by_node: Any = import_module("datasets.distributed")  # `shard` would leave ranks empty if files are few
            return by_node.split_dataset_by_node(dataset, rank, ranks), "dataset"
        # By name: under other names the numbers may mean something else. By stride if it fails: every rank reads all.
        with suppress(Exception):
            if isinstance(part := dataset.shard(num_shards=ranks, index=rank), Iterable):
                return part, "dataset"
        return dataset, "stride"

    def _make_batches(self, loader: DataLoader[Any], reader: PartReader, epoch: int) -> Iterator[Made]:
        if not loader.num_workers:
            return reader.made(epoch)
        key, is_begun = (reader.by, reader.size), reader.taken.is_begun
        before, pool, kept = self._persistent or (None, None, reader)
        if pool is not None and pool.is_idle and before == key and not is_begun:
            reader = kept
        else:
            pool = WorkerPool(loader, reader, reader.start)
            # A resumed pass has other parts than the next one.
            self._persistent = (key, pool, reader) if loader.persistent_workers and not is_begun else None
        reader.set_epoch(epoch)
        return pool.serve(seed_of(self.seed, epoch, "workers"))


def is_stream(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether the loader is a DataLoader over an iterable dataset whose batches are made here."""
    return makes_batches_alike(loader) and isinstance(loader.dataset, IterableDataset)


def _cuts_by_node(dataset: Any, rank: int, ranks: int) -> bool:
    """Whether it is a webdataset pipeline that splits its shards by node, or a dataset of mosaicml-streaming, which has
    found the rank. It cannot be noticed otherwise: cut again, each rank would miss samples."""
    stages = getattr(dataset, "pipeline", ())
    if type(dataset).__module__.startswith("webdataset.") and isinstance(stages, list | tuple):
        webdataset: Any = import_module("webdataset")
        splits = any(stage is webdataset.split_by_node for stage in stages)
        return splits and webdataset.utils.pytorch_worker_info()[:2] == (rank, ranks)
    if not any(kind.__module__.startswith("streaming.base.") for kind in type(dataset).__mro__):
        return False
    seen: Any = import_module("streaming.base.world").World.detect()
    return (seen.rank, seen.num_ranks) == (rank, ranks)
