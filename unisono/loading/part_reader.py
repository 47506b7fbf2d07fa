"""Reads one part of a stream: in a loader worker, or in the reader's thread.

*Threads:* the reader's, and the main threads of loader workers. Those may seed the process's generators; the reader's
must not.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from unisono.comm.outcome import Outcome, add_note_once
from unisono.devices.randomness import mixed, seed_all, seed_of
from unisono.errors import StateError
from unisono.loading.lockstep import Cutter, Position, Read, StreamPosition
from unisono.loading.made_rows import collated
from unisono.loading.packing import Packed
from unisono.loading.sharding import glimpse, mark_of
from unisono.loading.sources import is_stateful
from unisono.loading.stream_parts import (
    has_shuffle_buffer,
    hide_workers,
    is_of,
    twin_of,
)
from unisono.loading.workers import use_worker_info
from unisono.world import answer_as_one_rank

logger = logging.getLogger(__name__)

_END: Any = object()
_OTHER = (
    "the state was saved over another stream: what was delivered is not what is read now; load it over the same data "
    "in the same order (shuffled by the epoch, or by the global generators with num_workers=1), or restart by set_epoch"
)

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
        if self.goes_on == "stride":  # this process reads the whole stream
            number, row = 0, 1
        asked = AskedInfo(number=number, row=row, seed=seed, dataset=dataset, worker=worker)
        use_worker_info(asked)
        if self.init is not None:
            self.init(part % self.taken.here.workers if self.by != "stride" else part)
        return asked

    @property
    def row(self) -> int:
        """The number of loader workers that a dataset in one of them sees."""
        return len(self.taken.here.parts) if self.by == "stride" else self.taken.here.workers

    @property
    def goes_on(self) -> Cutter | None:
        """What has cut the stream where the pass continues; None where it begins."""
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
            add_note_once(error, f"after {part.seen[0][0]} samples of the stream that part {part.number} reads")
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
