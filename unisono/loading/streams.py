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
what the parts have seen is compared. `lockstep.py` says what a part is, and counts what was taken of each.

*Threads:* the reader's. `PartReader` runs in loader workers too, in their main threads, which may seed the process's
generators; the reader's must not.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono.comm.outcome import Outcome
from unisono.devices.randomness import mixed, seed_all, seed_of, seeded
from unisono.errors import StateError
from unisono.loading.comparison import has_parts
from unisono.loading.lockstep import Cutter, Position, Read, StreamPosition, StreamProgress
from unisono.loading.made_rows import collated
from unisono.loading.packing import Packed
from unisono.loading.sharding import Rule, check_sizes_known, fingerprint, glimpse, mark_of, measure
from unisono.loading.sources import LOOKED_AT, Begun, Loaded, Source, State, is_stateful, rounds_of_loaded
from unisono.loading.stream_parts import (
    PROTOCOL,
    continues_anywhere,
    cuts_by_node,
    has_shuffle_buffer,
    hide_workers,
    is_of,
    is_sized_by_rank,
    move,
    part_of,
    twin_of,
)
from unisono.loading.workers import WorkerPool, use_worker_info
from unisono.world import World, answer_as_one_rank

logger = logging.getLogger(__name__)

_END: Any = object()
_OTHER = (
    "the state was saved over another stream: what was delivered is not what is read now; load it over the same data "
    "in the same order (shuffled by the epoch, or by the global generators with num_workers=1), or restart by set_epoch"
)


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

        def behind(*_: int) -> Any:
            return read if self.is_uneven else stream.position.to_state()

        if self.is_uneven:  # a round is one batch of this rank
            rule = Rule(tail=rule.tail, fixed_batch_size=rule.fixed_batch_size)
        full = size if rule.tail == "pad" else None
        pieces = rounds_of_loaded(loaded(), rule, dim, before.offset, behind, full)
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
        # An epoch begun by stride goes on by stride: parts that the dataset cuts hold other samples.
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
                "this epoch was begun by %d parts, of which %d rank(s) carry %d and the others %d: until it ends, the "
                "others repeat samples that do not count once theirs have ended; the next epoch is cut evenly",
                len(taken.here.parts), more, least + 1, least,
            )  # fmt: skip
        found: dict[int, Any] = {}
        for rank in sorted({part // workers for each in parts for part in each} if taken.is_of_rank else ()):
            is_own = (rank, ranks) == (self._rank, self._ranks)
            is_own = is_own and bool(self._is_part or cuts_by_node(dataset, rank, ranks))
            found[rank] = dataset if is_own else part_of(dataset, rank, ranks)
            if found[rank] is None:
                raise StateError(
                    f"the state was saved by {ranks} rank(s), each of which read its own part, and here are "
                    f"{self._ranks}; of a {type(dataset).__name__}, the part of another rank cannot be made: "
                    f"{PROTOCOL}; or resume with {ranks} rank(s), or restart the epoch by set_epoch"
                )
        return found

    def _make_batches(
        self, loader: DataLoader[Any], reader: PartReader, rule: Rule, epoch: int, shows_first: bool
    ) -> Iterator[Made]:
        number = loader.num_workers
        if not number and reader.goes_on == "worker" and reader.row > 1:
            number = 1  # elsewhere, the dataset cannot be told which part it reads
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


Made = tuple[Any, int | None, Read]  # a batch of one part, its number of rows, if that is known, and what it leaves


@dataclass(eq=False)
class PartReader(IterableDataset[Packed]):
    """The dataset that a loader worker sees: packed batches of its part. In process, `made` yields them unpacked."""

    dataset: Any
    collate: Callable[[Any], Any]
    dim: int  # along which rows lie
    size: int | None  # None if each item of the dataset is a batch
    drop_last: bool
    init: Callable[[int], None] | None  # the user's worker_init_fn
    rank: int
    by: Cutter  # "stride" becomes "worker" if the dataset turns out to use `get_worker_info()`
    seed: int
    taken: StreamPosition  # where the pass begins for which the workers are started
    parts: list[list[int]] = field(default_factory=list)  # those of each worker, which reads them one after another
    datasets: dict[int, Any] = field(default_factory=dict)  # by the rank that each part was cut for, if not `dataset`

    def __post_init__(self) -> None:
        self.parts = self.taken.parts_of(self.rank, *self.taken.here[:2])
        # The epoch, and whether each worker sends a mark of its first sample before its batches; shared with persistent
        # workers. On the CPU even if the user has set another default device.
        self.cell = torch.zeros(2, dtype=torch.int64, device=torch.default_generator.device).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the workers' next pass, before they begin it. The dataset's, too: workers that share its
        memory (HuggingFace's) would change it all at once, and add it up."""
        self.cell[0] = epoch
        for dataset in self.datasets.values() or (self.dataset,):
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(epoch)

    def dataset_of(self, part: int) -> Any:
        return self.datasets.get(part // self.taken.here.workers, self.dataset)

    def start(self, worker: int) -> None:
        """The worker_init_fn."""
        info: Any = get_worker_info()
        self._enter(next(iter(self.parts[worker]), 0), worker, info.seed)

    def _enter(self, part: int, worker: int, seed: int) -> AskedInfo:
        """Tell the dataset, in a loader worker, which part it reads, then call the user's worker_init_fn."""
        row, dataset = self.row, self.dataset_of(part)
        number = part % row
        if self.by == "stride":
            answer_as_one_rank()
        if self.goes_on == "stride":  # whoever asks reads the whole stream
            number, row = 0, 1
        asked = AskedInfo(number=number, row=row, seed=seed, dataset=dataset, worker=worker)
        use_worker_info(asked)
        if self.init is not None:
            self.init(part % self.taken.here.workers if self.by != "stride" else part)
        return asked

    @property
    def row(self) -> int:
        """The number of loader workers that a dataset in one is told."""
        return len(self.taken.here.parts) if self.by == "stride" else self.taken.here.workers

    @property
    def goes_on(self) -> Cutter | None:
        """What has cut the stream where the pass goes on; None where it begins."""
        return self.taken.by if self.taken.offset > self.taken.before and self.by != "caller" else None

    def __iter__(self) -> Iterator[Packed]:
        info: Any = get_worker_info()
        try:
            for made in self.made(int(self.cell[0]), info.worker, info):
                yield Packed(made, "samples of a stream")
        except Exception as error:
            # Yielded, not raised: torch would send it as text, and lose its type.
            yield Packed(error=error)
        finally:
            use_worker_info(info)  # for the next pass

    def made(self, epoch: int, worker: int = 0, asked: AskedInfo | None = None) -> Iterator[Made]:
        """The batches of a worker's parts. `asked` records whether the dataset uses `get_worker_info()`."""
        for place, part in enumerate(self.parts[worker]):
            if place and asked is not None:
                asked = self._enter(part, worker, asked.seed)
            yield from self._made_of(part, epoch, asked)

    def _made_of(self, number: int, epoch: int, asked: AskedInfo | None) -> Iterator[Made]:
        part = PartSamples(self, number, asked)
        samples = part.samples(epoch)
        try:
            if self.cell[1]:
                samples, mark = _begun(samples)
                own = asked is not None and (asked.was_asked or asked.has_told_id)
                yield None, None, Read(part.number, Position(0, mark), "worker" if own else "stride")
            while chunk := list(islice(samples, self.size or 1)):
                if self.size is None:
                    yield self.collate(chunk[0]), None, part.read()
                elif len(chunk) == self.size or not self.drop_last:
                    yield *collated(self.collate, chunk, len(chunk), self.dim), part.read()
        except Exception as error:
            error.add_note(f"after {part.seen[0][0]} samples of the stream that part {part.number} reads")
            raise


def _begun(samples: Iterator[Any]) -> tuple[Iterator[Any], int]:
    """Read the first sample. Return the samples from it on, or the error, and a mark of all of its values."""
    first = Outcome.capture(next, samples, _END)

    def failing() -> Iterator[Any]:
        yield first.unwrap()

    if first.error is not None:
        return failing(), 0
    return chain(() if first.value is _END else (first.value,), samples), mark_of(glimpse(first.value, of_all=True))


class AskedInfo(SimpleNamespace):
    """The result of `get_worker_info()` in a worker over a stream, which is number `worker` of its rank. It records
    whether `num_workers` or `id` was read. If the stream is common to all ranks, their workers count as one row."""

    was_asked = has_told_id = False
    is_late = False  # since the stream was cut otherwise

    @property
    def id(self) -> int:
        self.has_told_id = True
        return int(self.number)

    @property
    def num_workers(self) -> int:
        if self.is_late:
            raise RuntimeError(
                f"the {type(self.dataset).__name__} asks get_worker_info() for the number of workers only after it has "
                "yielded samples; let it ask before the first, or pass DeviceLoader(loader, "
                "already_sharded=True)"
            )
        self.was_asked = True
        return int(self.row)


class PartSamples:
    """The samples of part `number` of a stream that were not taken before, in their order. What is read again is
    compared before anything that follows it is yielded."""

    def __init__(self, reader: PartReader, number: int, asked: AskedInfo | None) -> None:
        self._reader, self.number, self._asked = reader, number, asked
        self._layers, self._position = reader.taken.layers, reader.taken.here.parts[number]
        state = self._position.state
        # For each layer: the samples that have reached it, their marks, and a mark of the first of them.
        self.seen = [tuple(each) for each in state["seen"]] if state else [(0, 0, 0, 0)] * len(self._layers)
        self._has_ended = bool(state) and state["dataset"] is None
        self._dataset = reader.dataset_of(number)
        self._is_stateful = is_stateful(self._dataset) and not has_shuffle_buffer(self._dataset)
        self._first: Position | None = None  # after the first of them
        self._before = self._position  # without the last of them
        self._by: Cutter | None = None  # known once the first sample is read, and so are
        self._rows: list[range] = []  # those of each layer

    def samples(self, epoch: int) -> Iterator[Any]:
        if self._has_ended:
            return
        reader, asked = self._reader, self._asked
        # Until the first sample is read, all parts are seeded alike; then those that read the same stream.
        seed = seed_of(reader.seed, epoch)
        if asked is not None:
            asked.is_late = False
            seed_all(seed)  # before `iter`, in which many datasets shuffle
            if asked.row == 1 and (reader.goes_on == "dataset" or is_of(self._dataset, "datasets")):
                hide_workers()  # as where it was cut, perhaps in the loop's process
        reader.set_epoch(epoch)
        source = None
        if state := self._position.state:
            source = self._continued(state, self._seed(epoch, reader.taken.by) if asked is not None else None)
        if source is not None:
            seed = self._seed(epoch, reader.taken.by)
        else:
            source = iter(self._dataset)
        while True:
            if asked is not None:
                seed_all(mixed(seed, self.seen[0][0]))
            sample = next(source, _END)
            if self._by is None:
                self._by = reader.goes_on or reader.by
                if asked is not None and reader.goes_on is None and reader.by != "caller":
                    asked.is_late = not asked.was_asked and reader.by != "worker"
                    self._by = "worker" if asked.was_asked else reader.by
                reader.taken.check_cut(self._by)
                self._rows = [layer.row_of(self._by, self.number) for layer in self._layers]
                seed = self._seed(epoch, self._by)
            if sample is _END:
                break
            if self._is_own(sample):
                yield sample
        self._has_ended = True
        for (number, *_), layer, row in zip(self.seen, self._layers, self._rows, strict=True):
            # Is the stream shorter than what was delivered of it?
            if number < max((layer.parts[part].taken - 1) * len(row) + turn + 1 for turn, part in enumerate(row)):
                raise StateError(_OTHER)

    def _continued(self, state: Any, seed: int | None) -> Iterator[Any] | None:
        """The samples after a state of the dataset's own; None if it cannot continue there, so that they are read from
        the beginning."""
        is_shared = is_of(self._dataset, "datasets")  # by parts of a rank; and it keeps the state
        dataset = twin_of(self._dataset) if is_shared else self._dataset
        try:
            dataset.load_state_dict(copy.deepcopy(state["dataset"]))
            source = iter(dataset)
            if seed is not None:
                seed_all(mixed(seed, self.seen[0][0]))
            first = next(source, _END)
        except Exception as error:
            if not is_shared:
                raise
            kind = type(dataset).__name__
            # As text: the error would keep the frames, and all that they hold, wherever the record is kept.
            said = repr(error)
            logger.warning("%s cannot continue from its own state (%s): what precedes is read again", kind, said)
            self.seen = [(0, 0, 0, 0)] * len(self._layers)
            return None
        self._dataset = dataset
        return chain(() if first is _END else (first,), source)

    def _seed(self, epoch: int, by: Cutter) -> int:
        return seed_of(self._reader.seed, epoch, self._reader.taken.here.row_of(by, self.number).start)

    def read(self) -> Read:
        """What the samples leave that were yielded so far."""
        state = None
        if self._is_stateful:
            # With a copy, since some datasets return what they go on modifying. At the end there is none: it might
            # be that of a new beginning.
            own = None if self._has_ended else copy.deepcopy(self._dataset.state_dict())
            state = {"dataset": own, "seen": [list(each) for each in self.seen]}
        earlier = [each for each in (self._first, self._before) if each is not None and each.taken]
        return Read(self.number, self._position, self._by or self._reader.by, state, tuple(earlier))

    def _is_own(self, sample: Any) -> bool:
        """Count a sample as read. Return whether it belongs to this part and was not taken before."""
        part, position = self.number, self._position
        for place, (layer, row) in enumerate(zip(self._layers, self._rows, strict=True)):
            # Each layer numbers the samples that the layers before it left over; its parts take turns.
            number, mark, rest, first = self.seen[place]
            turn, part = number // len(row), row[number % len(row)]
            if part == row.start:
                known = glimpse(sample) or glimpse(sample, of_all=True)
                mark, own = mark_of(mark, known), mark_of(known)
                first = first or own
                rest = mark_of(rest, glimpse(sample, of_all=True)) if own == first and (rest or not number) else 0
            self.seen[place] = number + 1, mark, rest, first
            position, before = Position(turn + 1, mark, rest), layer.parts[part]
            if position.taken <= before.taken:
                if position.taken == before.taken and position.is_of_another(before):
                    raise StateError(_OTHER)
                return False
        if part == self.number:
            self._before, self._position = self._position, position
            self._first = self._first or position
        return part == self.number
