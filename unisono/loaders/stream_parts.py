"""One part of a stream: which of its samples a loader worker, or the in-process reader, collates into batches.

*Threads:* in a loader worker the main one, which may seed the process's generators; in process the reader's, which must
not.

Invariants:
1. Every sample of every part is yielded once, in the part's own order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from unisono.loaders import fetcher
from unisono.loaders.packing import Merged, Packed, can_surely_be_sent, has_many
from unisono.loaders.resume import is_stateful
from unisono.loaders.sharding import fingerprint, glimpse, mark_of
from unisono.loaders.stream_position import Cutter, Layer, Read, Seen, Taken
from unisono.loaders.workers import use_worker_info
from unisono.randomness import mixed, seed_all, seed_of
from unisono.world import answer_as_one_rank


@dataclass(frozen=True)
class Cut:
    """How one rank's pass over a stream is cut, and where it begins. Every part's reader receives it.

    Attributes:
        rank: the rank that reads these parts.
        by: "caller" or "dataset" if each rank has its own stream, else "stride", which becomes "worker" if the dataset
            turns out to use `get_worker_info()`.
        seed, epoch: of the pass.
        taken: where it begins; the last layer is that of the current ranks and workers.
        shift: the part, counted within the rank, that worker 0 reads.
    """

    rank: int
    by: Cutter
    seed: int
    epoch: int
    taken: Taken
    shift: int = 0

    def part(self, worker: int) -> int:
        """The part that a worker reads."""
        workers = self.taken.here.workers
        return self.rank * workers + (worker + self.shift) % workers


class Made(NamedTuple):
    """A batch of one part.

    Attributes:
        samples: their number; None if only the batch itself shows it.
        read: what it took; None if there is no batch, because drop_last has left the samples out.
    """

    batch: Any
    samples: int | None
    read: Read | None


class PartReader(IterableDataset[Packed]):
    """The dataset that a loader worker sees: the packed batches of its part. In process, `made` yields them unpacked.

    Args:
        size: samples in a batch; None if each item of the dataset is one.
        cut: that of the pass for which the workers are started.

    Attributes:
        cell: the epoch, in memory that is shared with persistent workers.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], size: int | None, drop_last: bool, cut: Cut
    ) -> None:
        self.dataset = dataset
        self.size = size
        self.cut = cut
        # On the CPU even if the user has set another default device.
        self.cell = torch.tensor([cut.epoch], device=torch.default_generator.device).share_memory_()
        self._collate = collate
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[Packed]:
        info: Any = get_worker_info()
        try:
            # Persistent workers keep the cut that they were started with; the cell holds the epoch of the current pass.
            for made in self.made(replace(self.cut, epoch=int(self.cell)), info.worker, info):
                if can_surely_be_sent(made.batch) and has_many(made.batch):
                    made = made._replace(batch=Merged(made.batch))
                yield Packed(made, f"samples of a stream, read for part {self.cut.part(info.worker)},")
        except Exception as error:
            # Yielded, not raised: torch would send it as text, and lose its type.
            yield Packed(error=error)

    def made(self, cut: Cut, worker: int = 0, asked: AskedInfo | None = None) -> Iterator[Made]:
        """The batches of the part that `worker` reads. `asked` records whether the dataset uses `get_worker_info()`."""
        samples = PartSamples(self.dataset, cut, cut.part(worker), asked)
        while chunk := list(islice(samples, self.size or 1)):
            if self.size is not None and self._drop_last and len(chunk) < self.size:
                yield Made(None, len(chunk), None)
                continue
            read = samples.read(len(chunk))
            try:
                batch = self._collate(chunk[0] if self.size is None else chunk)
            except Exception as error:
                error.add_note(f"while samples up to number {samples.index - 1} of the stream were collated")
                raise
            yield Made(batch, None if self.size is None else len(chunk), read)


class AskedInfo:
    """The result of `get_worker_info()` in a worker over a stream. It records whether `num_workers` was read.

    Attributes:
        id, num_workers, seed, dataset: as in torch; if the stream is common to all ranks, `id` and `num_workers` count
            the workers of all ranks as one row.
        worker: the worker's number within its rank.
        was_asked: whether `num_workers` was read.
    """

    def __init__(self, worker: int, number: int, num_workers: int, seed: int, dataset: Any) -> None:
        self.worker = worker
        self.id = number
        self.seed = seed
        self.dataset = dataset
        self.was_asked = False
        self._num_workers = num_workers

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self._num_workers


class StreamStart:
    """The worker_init_fn over a stream: tell the dataset which part it reads, seed, then call the user's function."""

    def __init__(self, reader: PartReader, init: Callable[[int], None] | None) -> None:
        self._reader = reader
        self._init = init

    def __call__(self, worker: int) -> None:
        info, cut = get_worker_info(), self._reader.cut
        assert info is not None
        part, (ranks, workers, _) = cut.part(worker), cut.taken.here
        number, row = (part, ranks * workers) if cut.by == "stride" else (part % workers, workers)
        use_worker_info(AskedInfo(worker, number, row, info.seed, self._reader.dataset))
        if cut.by == "stride":
            answer_as_one_rank()
        # Different in each worker, for the user's function; `PartSamples` seeds all alike before the stream is opened.
        seed_all(mixed(seed_of(cut.seed, "workers"), part))
        if self._init is not None:
            self._init(number)


class PartSamples:
    """The samples of one part of a stream that were not taken before.

    Attributes:
        index: the number of samples read from the stream, of all parts.
    """

    def __init__(self, dataset: Any, cut: Cut, part: int, asked: AskedInfo | None) -> None:
        self._dataset = dataset
        self._cut = cut
        self._part = part
        self._asked = asked
        self._by: Cutter | None = None  # known once the first sample is read
        self._rows: list[tuple[int, int, tuple[int, ...]]] = []  # for each layer; known with `_by`
        self._has_ended = False
        self._counts = [0] * len(cut.taken.layers)  # the samples that have reached each layer
        self._seed = seed_of(cut.seed, cut.epoch)
        self._own_seed = seed_of(cut.seed, cut.epoch, part)
        state = cut.taken.states.get(part)
        self._seen = Seen() if state is None else None
        if asked is not None:
            # Before `iter`, in which many datasets shuffle: the stride needs the same order in all parts.
            seed_all(self._seed)
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(cut.epoch)
        self._source = self._open_iterator(state)

    @property
    def index(self) -> int:
        return self._counts[0]

    def __iter__(self) -> PartSamples:
        return self

    def __next__(self) -> Any:
        while True:
            number = fetcher.at[0] = self.index
            self._seed_for(number)
            try:
                sample = next(self._source)
            except StopIteration:
                self._has_ended = True
                raise
            except Exception as error:
                error.add_note(f"in sample number {number} of the stream that part {self._part} reads")
                raise
            self._see_who_cuts()
            _, row, _ = self._rows[-1]
            if self._seen is not None and number % row == 0:
                first, rows, mark = self._seen
                first = first or mark_of(glimpse(sample)) or 1  # 0 stands for "not read"
                self._seen = Seen(first, rows + 1, mark_of(mark, fingerprint(sample)))
            if self._is_own():
                return sample

    def read(self, samples: int) -> Read:
        """What a batch of the last samples took."""
        return Read(self._part, samples, self._by or self._cut.by, self._seen, self._dataset_state())

    def _dataset_state(self) -> Any:
        """The dataset's own state after the last sample; None if it has none."""
        if not is_stateful(self._dataset) or has_shuffle_buffer(getattr(self._dataset, "_ex_iterable", None)):
            return None
        # Copied: a dataset may return its live state, which changes as reading continues. At the end it may already be
        # that of a new beginning.
        own = None if self._has_ended else copy.deepcopy(self._dataset.state_dict())
        return {"dataset": own, "counts": list(self._counts)}

    def _open_iterator(self, state: Any) -> Iterator[Any]:
        """The dataset's iterator, after the samples that precede a state that `_dataset_state` returned."""
        if state is None:
            return iter(self._dataset)
        self._counts = list(state["counts"])
        if state["dataset"] is None:  # the part had ended
            return iter(())
        self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        return iter(self._dataset)

    def _seed_for(self, number: int) -> None:
        """Seed the worker's generators for a sample. Until the first one is read, all parts are seeded alike."""
        if self._asked is not None:
            seed = self._seed if self._by in (None, "stride") else self._own_seed
            seed_all(mixed(seed, number if self._by else 0))

    def _see_who_cuts(self) -> None:
        was_asked = self._asked is not None and self._asked.was_asked and self._cut.by != "caller"
        by: Cutter = "worker" if was_asked else self._cut.by
        if self._by is None:
            self._cut.taken.check_cut(by)
            self._by = by
            self._seen = self._seen if by == "stride" else None
            self._rows = [(*self._row_of(by, layer), layer.taken) for layer in self._cut.taken.layers]
        elif by != self._by:
            raise RuntimeError(
                f"the {type(self._dataset).__name__} asks get_worker_info() for the number of workers only after it "
                "has yielded samples, so it is unknown whether it shards itself; let it ask before the first, or pass "
                "already_sharded=True"
            )

    def _row_of(self, by: Cutter, layer: Layer) -> tuple[int, int]:
        """The first of the parts that take turns in the stream that is read here, and their number."""
        if by in ("worker", "caller"):  # all of the stream is this part's own
            return self._part, 1
        return (0, layer.ranks * layer.workers) if by == "stride" else (self._cut.rank * layer.workers, layer.workers)

    def _is_own(self) -> bool:
        """Count a sample as read. Return whether it belongs to this part and was not taken before."""
        number = first = 0
        row = 1
        for place, (first, row, taken) in enumerate(self._rows):
            # Each layer numbers the samples that the layers before it left over; of a row of n, part p took numbers p,
            # p + n, and so on.
            number, self._counts[place] = self._counts[place], self._counts[place] + 1
            if number // row < taken[first + number % row]:
                return False
        return number % row == self._part - first


def has_shuffle_buffer(examples: Any) -> bool:
    """Whether a streamed HuggingFace dataset shuffles in a buffer, whose contents its state does not include."""
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    is_buffer = "BufferShuffled" in type(examples).__name__
    return is_buffer or any(has_shuffle_buffer(each) for each in inner if each is not None)
