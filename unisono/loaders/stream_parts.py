"""The parts of a stream, and how much of each was taken: the position in an iterable dataset.

A part has an address and a position. The address is its number (part w of rank r is number `r * workers + w`) and the
row of parts that take turns in one stream: all of them, if it is cut by stride. The position is the number of its
samples that were delivered, and a mark of the stream up to there: of the first sample of each of the stream's rows, by
its integers and texts; `rest` marks the other values, as long as those are the same in all of these samples.

*Threads:* `PartReader` runs in a loader worker, in its main thread, which may seed the process's generators; or in
process in the reader's, which must not.

Invariants:
1. Every sample of every part is yielded once, in the part's own order.
2. A position counts samples that were delivered, not those that were read ahead.
3. Parts of one stream that are at the same number have the same mark, and so has who reads the stream again: what is
   read again is compared before anything that follows it is yielded.
4. A stream that is cut by stride can continue with other numbers of ranks and workers; one that is cut otherwise needs
   the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, starmap
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from unisono.errors import StateError
from unisono.loaders.fetcher import collated
from unisono.loaders.packing import Packed
from unisono.loaders.sharding import glimpse, mark_of, values_of
from unisono.loaders.sources import State, is_stateful
from unisono.loaders.workers import use_worker_info
from unisono.randomness import mixed, seed_all, seed_of
from unisono.world import answer_as_one_rank

Cutter = Literal["caller", "dataset", "worker", "stride"]
"""What cuts a stream into parts; `streams.py` explains which of them does when."""

_END: Any = object()
_REMEMBERED = 1024  # positions; more than one reader is ahead of another
_ALIKE = 8  # samples whose integers are the same: those of the whole stream may well be


class Position(NamedTuple):
    """A number of samples, the marks of the stream up to there, and the dataset's own state there, if any: known to the
    part's rank only. `rest` is 0 if `mark` alone tells the samples apart: other values may be augmented at random."""

    taken: int = 0
    mark: int = 0
    rest: int = 0
    state: Any = None

    def is_of_another(self, other: Position) -> bool:
        """Whether the two, at the same number, are positions of different streams."""
        return self.mark != other.mark or (self.rest != other.rest and 0 not in (self.rest, other.rest))


class Layer(NamedTuple):
    """The positions of the parts of `ranks` ranks with `workers` loader workers each. When these numbers change, a
    second layer divides the samples that the first left over, and so on."""

    ranks: int
    workers: int
    parts: tuple[Position, ...]

    def row_of(self, by: Cutter, part: int) -> range:
        """The parts that take turns in the stream that `part` reads."""
        if by == "stride":
            return range(len(self.parts))
        # All of the stream is the part's own, unless the dataset has cut it for the rank: then its workers take turns.
        size = self.workers if by == "dataset" else 1
        return range(part - part % size, part - part % size + size)


class Read(NamedTuple):
    """What a batch leaves: the position of a part of a stream that is cut `by`."""

    part: int
    position: Position
    by: Cutter = "stride"


class StreamPosition(NamedTuple):
    """A position in a stream that was cut `by`: the last layer is that of the current ranks and workers."""

    by: Cutter
    layers: tuple[Layer, ...] = ()

    @classmethod
    def of_state(cls, state: State) -> StreamPosition:
        """Read what `to_state` returned; StateError if it is not a position in a stream."""
        try:
            layers = [Layer(ranks, row, tuple(starmap(Position, parts))) for ranks, row, parts in state["layers"]]
            if layers and all(len(each.parts) == each.ranks * each.workers for each in layers):
                return cls(state["by"], tuple(layers))
        except (KeyError, TypeError, ValueError):
            pass
        raise StateError("the state does not say what was read of which part: it is not the state of a stream")

    def to_state(self, offset: int) -> State:
        """The position as plain data, after `offset` samples of the epoch."""
        layers = [[*layer[:2], [[*each] for each in layer.parts]] for layer in self.layers]
        return {"offset": offset, "by": self.by, "layers": layers}

    @property
    def here(self) -> Layer:
        return self.layers[-1]

    @property
    def is_begun(self) -> bool:
        return any(each.taken for layer in self.layers for each in layer.parts)

    def parts_of(self, rank: int) -> list[int]:
        """The parts of a rank, in the order in which they deliver: worker by worker, from the one that is due."""
        workers = self.here.workers
        own = range(rank * workers, (rank + 1) * workers)
        return sorted(own, key=lambda part: self.here.parts[part].taken)

    def after(self, reads: Iterable[Read]) -> StreamPosition:
        parts, by = list(self.here.parts), self.by
        for read in reads:
            by, parts[read.part] = read.by, read.position
        return StreamPosition(by, (*self.layers[:-1], self.here._replace(parts=tuple(parts))))

    def cut_for(self, ranks: int, workers: int) -> StreamPosition:
        """The same position, with what is left cut for these numbers of ranks and workers."""
        if self.layers and self.here[:2] == (ranks, workers):
            return self
        # No state of the dataset's own fits other parts.
        before = [each._replace(parts=tuple(part._replace(state=None) for part in each.parts)) for each in self.layers]
        return self._replace(layers=(*before, Layer(ranks, workers, (Position(),) * (ranks * workers))))

    def check_cut(self, by: Cutter) -> None:
        """Check that no sample is lost if `by` cuts the stream from here on. StateError if something else has cut it
        before; or if the numbers of ranks and workers have changed, and it is not cut by stride."""
        if not self.is_begun or (by == self.by and (by == "stride" or len(self.layers) == 1)):
            return
        before, here = self.layers[0], self.here
        raise StateError(
            f"the state was saved by {before.ranks} rank(s) with {before.workers} loader worker(s) each over a stream "
            f"that was cut by the {self.by}; here are {here.ranks} with {here.workers}, and it is cut by the {by}: "
            "only the stride continues with other numbers; resume with the same, or restart the epoch with set_epoch"
        )


_DIFFERENT = (
    "the ranks or loader workers read different streams, so cutting them by stride would lose samples and repeat "
    "others; shuffle by the epoch (set_epoch), or with the global generators in loader workers (num_workers=1), which "
    "are seeded alike; or let the dataset cut itself, by get_worker_info() or shard(num_shards, index); or pass "
    "already_sharded=True if each has its own part"
)


class SameStream:
    """Compares the marks of parts that are read from one stream, at the same number of samples."""

    def __init__(self, here: Layer) -> None:
        self._here = here
        self._marks: dict[tuple[int, int], Position] = {}  # by the row's first part and the number; the latest last

    def compare(self, read: Read) -> None:
        """Add the position that one batch has left; RuntimeError if another reader has seen another stream."""
        position = read.position if read.position.taken >= _ALIKE else read.position._replace(rest=0)
        place = self._here.row_of(read.by, read.part).start, position.taken
        if self._marks.setdefault(place, position).is_of_another(position):
            raise RuntimeError(_DIFFERENT)
        if len(self._marks) > _REMEMBERED:
            del self._marks[next(iter(self._marks))]

    def check_ends(self, ended: StreamPosition, slack: int) -> None:
        """Check, at the end of all parts, that the streams that they were cut from by stride were of one length. Parts
        take turns, so the first ones have one sample more, or, if incomplete batches are dropped, any has `slack`."""
        taken = [each.taken for each in ended.here.parts]
        is_in_turn = taken == sorted(taken, reverse=True) or slack > 1
        if ended.by == "stride" and not (is_in_turn and max(taken) - min(taken) <= slack):
            raise RuntimeError(_DIFFERENT)


Made = tuple[Any, int | None, Read]
"""A batch of one part, its number of samples, if that is known without looking at it, and what it leaves."""


@dataclass(eq=False)
class PartReader(IterableDataset[Packed]):
    """The dataset that a loader worker sees: packed batches of its part. In process, `made` yields them unpacked."""

    dataset: Any
    collate: Callable[[Any], Any]
    size: int | None  # None if each item of the dataset is a batch
    drop_last: bool
    init: Callable[[int], None] | None  # the user's worker_init_fn
    rank: int
    by: Cutter  # "stride" becomes "worker" if the dataset turns out to use `get_worker_info()`
    seed: int
    taken: StreamPosition  # where the pass begins for which the workers are started

    def __post_init__(self) -> None:
        # The epoch, shared with persistent workers. On the CPU even if the user has set another default device.
        self.cell = torch.zeros(1, dtype=torch.int64, device=torch.default_generator.device).share_memory_()

    def part(self, worker: int) -> int:
        return self.taken.parts_of(self.rank)[worker]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the workers' next pass, before they begin it. The dataset's, too: workers that share its
        memory (HuggingFace's) would change it all at once, and add it up."""
        self.cell.fill_(epoch)
        _set_epoch(self.dataset, epoch)

    def start(self, worker: int) -> None:
        """The worker_init_fn: tell the dataset which part it reads, seed, then call the user's function."""
        info: Any = get_worker_info()
        part, row = self.part(worker), self.taken.here.workers
        number = part % row
        if self.by == "stride":
            number, row = part, len(self.taken.here.parts)
            answer_as_one_rank()
        use_worker_info(AskedInfo(id=number, row=row, seed=info.seed, dataset=self.dataset, worker=worker))
        # Different in each worker, for the user's function; `PartSamples` seeds all alike before the stream is opened.
        seed_all(mixed(seed_of(self.seed, "workers"), part))
        if self.init is not None:
            self.init(number)

    def __iter__(self) -> Iterator[Packed]:
        info: Any = get_worker_info()
        try:
            for made in self.made(int(self.cell), info.worker, info):
                yield Packed(made, f"samples of a stream, read for part {self.part(info.worker)},")
        except Exception as error:
            # Yielded, not raised: torch would send it as text, and lose its type.
            yield Packed(error=error)

    def made(self, epoch: int, worker: int = 0, asked: AskedInfo | None = None) -> Iterator[Made]:
        """The batches of the part that `worker` reads. `asked` records whether the dataset uses `get_worker_info()`."""
        part = PartSamples(self, epoch, self.part(worker), asked)
        samples = part.samples()
        try:
            while chunk := list(islice(samples, self.size or 1)):
                if self.size is None:
                    yield self.collate(chunk[0]), None, part.read()
                elif len(chunk) == self.size or not self.drop_last:
                    yield collated(self.collate, chunk), len(chunk), part.read()
        except Exception as error:
            error.add_note(f"after {part.seen[0][0]} samples of the stream that part {self.part(worker)} reads")
            raise


class AskedInfo(SimpleNamespace):
    """The result of `get_worker_info()` in a worker over a stream, which is number `worker` of its rank. It records
    whether `num_workers` was read. If the stream is common to all ranks, their workers count as one row."""

    was_asked = False

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return int(self.row)


class PartSamples:
    """The samples of one part of a stream that were not taken before."""

    def __init__(self, reader: PartReader, epoch: int, part: int, asked: AskedInfo | None) -> None:
        self._reader, self._dataset, self._part, self._asked = reader, reader.dataset, part, asked
        self._layers = reader.taken.layers
        self._position = reader.taken.here.parts[part]
        # For each layer: the samples that have reached it, their marks, and a mark of the first of them.
        self.seen = [(0, 0, 0, 0)] * len(self._layers)
        self._by: Cutter | None = None  # known once the first sample is read, and so are
        self._rows: list[range] = []  # those of each layer
        self._has_ended = False
        self._seed, self._own_seed = seed_of(reader.seed, epoch), seed_of(reader.seed, epoch, part)
        if asked is not None:
            # Before `iter`, in which many datasets shuffle: the stride needs the same order in all parts.
            seed_all(self._seed)
        _set_epoch(self._dataset, epoch)
        buffers = _has_shuffle_buffer(getattr(self._dataset, "_ex_iterable", None))
        self._is_stateful = is_stateful(self._dataset) and not buffers
        if (state := self._position.state) is not None:
            self.seen = [tuple(each) for each in state["seen"]]
            self._has_ended = state["dataset"] is None
            if not self._has_ended:
                self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self._source = iter(()) if self._has_ended else iter(self._dataset)

    def samples(self) -> Iterator[Any]:
        while True:
            if self._asked is not None:  # until the first one is read, all parts are seeded alike
                # A stream that goes on is cut as it was.
                by = self._by or (self._reader.taken.by if self._reader.taken.is_begun else None)
                seed = self._seed if by in (None, "stride") else self._own_seed
                seed_all(mixed(seed, self.seen[0][0]))
            if (sample := next(self._source, _END)) is _END:
                break
            self._see_who_cuts()
            if self._is_own(sample):
                yield sample
        if not self._has_ended:
            self._has_ended = True
            self._check_end()

    def read(self) -> Read:
        """What the samples leave that were yielded so far."""
        state = None
        if self._is_stateful:
            # Copied: a dataset may return its live state, which changes as reading continues. At the end it may already
            # be that of a new beginning.
            own = None if self._has_ended else copy.deepcopy(self._dataset.state_dict())
            state = {"dataset": own, "seen": [list(each) for each in self.seen]}
        return Read(self._part, self._position._replace(state=state), self._by or self._reader.by)

    def _see_who_cuts(self) -> None:
        was_asked = self._asked is not None and self._asked.was_asked and self._reader.by != "caller"
        by: Cutter = "worker" if was_asked else self._reader.by
        if self._by is None:
            self._reader.taken.check_cut(by)
            self._by, self._rows = by, [layer.row_of(by, self._part) for layer in self._layers]
        elif by != self._by:
            raise RuntimeError(
                f"the {type(self._dataset).__name__} asks get_worker_info() for the number of workers only after it "
                "has yielded samples; let it ask before the first, or pass already_sharded=True"
            )

    def _is_own(self, sample: Any) -> bool:
        """Count a sample as read. Return whether it belongs to this part and was not taken before."""
        part, position = self._part, self._position
        for place, (layer, row) in enumerate(zip(self._layers, self._rows, strict=True)):
            # Each layer numbers the samples that the layers before it left over; its parts take turns.
            number, mark, rest, first = self.seen[place]
            turn, part = number // len(row), row[number % len(row)]
            if part == row.start:
                known = glimpse(sample) or values_of(sample)
                mark, own = mark_of(mark, known), mark_of(known)
                first = first or own
                rest = mark_of(rest, values_of(sample)) if own == first and (rest or not number) else 0
            self.seen[place] = number + 1, mark, rest, first
            position, before = Position(turn + 1, mark, rest), layer.parts[part]
            if position.taken <= before.taken:
                if position.taken == before.taken and position.is_of_another(before):
                    raise StateError(self._explain_other(part))
                return False
        if part == self._part:
            self._position = position
        return part == self._part

    def _check_end(self) -> None:
        """Check that the stream was as long as what was delivered of it."""
        if self._by is None:
            self._see_who_cuts()
        for (number, *_), layer, row in zip(self.seen, self._layers, self._rows, strict=True):
            for turn, part in enumerate(row):
                if number <= (layer.parts[part].taken - 1) * len(row) + turn:
                    raise StateError(self._explain_other(part))

    def _explain_other(self, part: int) -> str:
        return (
            f"the state was saved over another stream: what was delivered of its part {part} is not what is read now; "
            "load it over the same data in the same order (shuffle by the epoch, or with the global generators "
            "in loader workers, num_workers=1), or restart the epoch with set_epoch"
        )


def _set_epoch(dataset: Any, epoch: int) -> None:
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)


def _has_shuffle_buffer(examples: Any) -> bool:
    """Whether a streamed HuggingFace dataset shuffles in a buffer, whose contents its state does not include."""
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    is_buffer = "BufferShuffled" in type(examples).__name__
    return is_buffer or any(_has_shuffle_buffer(each) for each in inner if each is not None)
