"""One part of a stream: which of its samples a loader worker, or the in-process reader, collates into batches.

*Threads:* in a loader worker the main one, which may seed the process's generators; in process the reader's, which must
not.

Invariants:
1. Every sample of every part is yielded once, in the part's own order.
2. A position is one count of samples for each part, so a stream that is cut by stride can continue with other numbers
   of ranks and workers; a stream that is cut otherwise needs the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from unisono.errors import StateError
from unisono.loaders import fetcher
from unisono.loaders.packing import Merged, Packed, can_surely_be_sent, has_many
from unisono.loaders.resume import State, is_stateful
from unisono.loaders.sharding import fingerprint, glimpse, mark_of
from unisono.loaders.workers import use_worker_info
from unisono.randomness import mixed, seed_all, seed_of
from unisono.world import answer_as_one_rank

Cutter = Literal["caller", "dataset", "worker", "stride"]
"""What cuts a stream into parts; `streams.py` explains which of them does when."""


class Trail(NamedTuple):
    """What a part has seen of a stream that is cut by stride: equal for all parts that read the same stream.

    Attributes:
        first: a fingerprint of the stream's first sample.
        rows: the number of rows read so far; a row is one sample for each part.
        mark: a fingerprint of the rows' first samples.
    """

    first: int = 0
    rows: int = 0
    mark: int = 0


class Layer(NamedTuple):
    """The number of samples of each part that `ranks` ranks with `workers` loader workers each took from a stream.

    When the numbers of ranks or workers change, a second layer divides the samples that the first left over, and so on.
    """

    ranks: int
    workers: int
    taken: tuple[int, ...]


class Read(NamedTuple):
    """What a batch took: `samples` of a part. `trail` as in `Made`."""

    part: int
    samples: int
    trail: Trail | None = None


def count_reads(position: State, reads: Iterable[Read]) -> State:
    """The position in a stream after these reads, without the samples of the epoch that precede it (its `offset`)."""
    *before, (ranks, workers, taken) = position["layers"]
    taken, last = list(taken), list(position["last"])
    for read in reads:
        taken[read.part] += read.samples
        last[read.part // workers] = read.part % workers
    return {**position, "layers": [*before, [ranks, workers, taken]], "last": last}


@dataclass(frozen=True)
class Cut:
    """How one pass over a stream is cut, and where it begins. Every part's reader receives it.

    Attributes:
        rank, ranks: the rank that reads these parts, and the number of ranks.
        workers: the number of loader workers of a rank, at least 1. Part w of rank r is `r * workers + w`.
        by: "caller" or "dataset" if each rank has its own stream, else "stride", which becomes "worker" if the dataset
            turns out to use `get_worker_info()`.
        seed, epoch: of the pass.
        layers: the samples delivered before; the last layer is that of the current ranks and workers.
        layers_by: what cut the stream then.
        states: the dataset's own states after those samples, by part, if it has any.
        shift: the part, counted within the rank, that worker 0 reads.
    """

    rank: int
    ranks: int
    workers: int
    by: Cutter
    seed: int
    epoch: int
    layers: tuple[Layer, ...]
    layers_by: Cutter = "stride"
    states: dict[int, Any] = field(default_factory=dict)
    shift: int = 0

    def part(self, worker: int) -> int:
        """The part that a worker reads."""
        return self.rank * self.workers + (worker + self.shift) % self.workers

    def is_begun(self, part: int) -> bool:
        """Whether samples were delivered before that this part's reader would read again."""
        return any(map(any, (layer.taken for layer in self.layers[:-1]))) or self.layers[-1].taken[part] > 0

    @property
    def is_resumed(self) -> bool:
        """Whether anything was delivered before."""
        return any(any(layer.taken) for layer in self.layers)


class Made(NamedTuple):
    """A batch of one part.

    Attributes:
        batch: None if the samples were left out, by drop_last.
        samples: their number; None if only the batch itself shows it.
        part, by: the part, and what cut it.
        state: the dataset's own state after the batch.
        trail: None if the stream was not read from its beginning, or is not cut by stride.
        is_left_out: whether drop_last left the samples out.
    """

    batch: Any
    samples: int | None
    part: int
    by: Cutter
    state: Any = None
    trail: Trail | None = None
    is_left_out: bool = False


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
                yield Packed(made, f"samples of a stream, read for part {made.part},")
        except Exception as error:
            # Yielded, not raised: torch would send it as text, and lose its type.
            yield Packed(error=error)

    def made(self, cut: Cut, worker: int = 0, asked: AskedInfo | None = None) -> Iterator[Made]:
        """The batches of the part that `worker` reads. `asked` records whether the dataset uses `get_worker_info()`."""
        part = cut.part(worker)
        samples = _Part(self.dataset, cut, part, asked)
        while chunk := list(islice(samples, self.size or 1)):
            made = Made(None, len(chunk), part, samples.by, samples.state(), samples.trail)
            if self.size is None:
                yield made._replace(batch=self._collate_samples(chunk[0], samples), samples=None)
            elif self._drop_last and len(chunk) < self.size:
                yield made._replace(is_left_out=True)
            else:
                yield made._replace(batch=self._collate_samples(chunk, samples))

    def _collate_samples(self, data: Any, samples: _Part) -> Any:
        try:
            return self._collate(data)
        except Exception as error:
            error.add_note(f"while samples up to number {samples.index - 1} of the stream were collated")
            raise


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
        part = cut.part(worker)
        number, row = (part, cut.ranks * cut.workers) if cut.by == "stride" else (part % cut.workers, cut.workers)
        use_worker_info(AskedInfo(worker, number, row, info.seed, self._reader.dataset))
        if cut.by == "stride":
            answer_as_one_rank()
        # Different in each worker, for the user's function; `_Part` seeds all alike before the stream is opened.
        seed_all(mixed(seed_of(cut.seed, "workers"), part))
        if self._init is not None:
            self._init(number)


class _Part:
    """The samples of one part of a stream that were not delivered before.

    Attributes:
        by: what cuts the stream; final once it has yielded its first sample.
        trail: as in `Made`.
        index: the number of samples read from the stream, of all parts.
    """

    def __init__(self, dataset: Any, cut: Cut, part: int, asked: AskedInfo | None) -> None:
        self._dataset = dataset
        self._cut = cut
        self._part = part
        self._asked = asked
        self.by: Cutter = cut.by
        self.index = 0
        self._has_begun = self._has_ended = False
        self._counts = [0] * len(cut.layers)  # the samples that have reached each layer
        self._seed = seed_of(cut.seed, cut.epoch)
        self._own_seed = seed_of(cut.seed, cut.epoch, part)
        self._is_restored = part in cut.states
        self.trail = Trail() if cut.by == "stride" and not self._is_restored else None
        self._is_buffered = has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))
        if asked is not None:
            # Before `iter`, in which many datasets shuffle: the stride needs the same order in all parts.
            seed_all(self._seed)
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(cut.epoch)
        self._source = self._open_iterator(cut.states.get(part))

    def __iter__(self) -> _Part:
        return self

    def __next__(self) -> Any:
        while True:
            number = self.index
            self._seed_for(number)
            fetcher.at[0] = number
            try:
                sample = next(self._source)
            except StopIteration:
                self._has_ended = True
                raise
            except Exception as error:
                error.add_note(f"in sample number {number} of the stream that part {self._part} reads")
                raise
            self.index += 1
            self._see_who_cuts(sample)
            if self.trail is not None and number % (self._cut.ranks * self._cut.workers) == 0:
                first, rows, mark = self.trail
                first = first or mark_of(glimpse(sample)) or 1  # 0 stands for "not read"
                self.trail = Trail(first, rows + 1, mark_of(mark, fingerprint(sample)))
            if self._is_own(number):
                return sample

    def state(self) -> Any:
        """The state of the stream's iterator, else of the dataset, after the last sample; None if neither has one.

        For a stream that has ended, only the counts are kept: its own state may already be that of a new beginning.
        """
        owners: dict[str, Any] = {"iterator": self._source, "dataset": self._dataset}
        name = next((name for name, owner in owners.items() if is_stateful(owner)), None)
        if name is None or self._is_buffered:
            return None
        # Copied: a dataset may return its live state, which changes as reading continues.
        own = {} if self._has_ended else {name: copy.deepcopy(owners[name].state_dict())}
        return {**own, "index": self.index, "counts": list(self._counts)}

    def _open_iterator(self, state: Any) -> Iterator[Any]:
        """The dataset's iterator, restored to a state that `state()` returned."""
        if state is None:
            return iter(self._dataset)
        self.index, self._counts = state["index"], list(state["counts"])
        if "dataset" in state:
            self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        # With neither, the part had ended when the state was saved.
        source: Any = iter(self._dataset) if {"dataset", "iterator"} & state.keys() else iter(())
        if "iterator" in state:
            source.load_state_dict(copy.deepcopy(state["iterator"]))
        return source  # type: ignore[no-any-return]

    def _seed_for(self, number: int) -> None:
        """Seed the worker's generators for a sample. Until the first one is read, all parts are seeded alike."""
        if self._asked is None:
            return
        is_common = not self._has_begun or self.by == "stride"
        seed_all(mixed(self._seed if is_common else self._own_seed, number if self._has_begun else 0))

    def _see_who_cuts(self, sample: Any) -> None:
        was_asked = self._asked is not None and self._asked.was_asked and self._cut.by != "caller"
        by: Cutter = "worker" if was_asked else self._cut.by
        if not self._has_begun:
            self._has_begun = True
            self.by = by
            self.trail = self.trail if by == "stride" else None
            check_layers(self._cut, by)
        elif by != self.by:
            raise RuntimeError(
                f"the {type(self._dataset).__name__} asks get_worker_info() for the number of workers only after it "
                "has yielded samples, so it is unknown whether it shards itself; let it ask before the first, or pass "
                "already_sharded=True"
            )

    def _is_own(self, number: int) -> bool:
        """Whether sample `number` of the stream belongs to this part and was not taken before."""
        cut = self._cut
        if self.by in ("worker", "caller"):
            # All of the stream is this part's own, and a restored iterator already begins after what was taken.
            return self._is_restored or number >= cut.layers[-1].taken[self._part]
        for place, layer in enumerate(cut.layers):
            first, row = (
                (0, layer.ranks * layer.workers) if self.by == "stride" else (cut.rank * layer.workers, layer.workers)
            )
            # Each layer numbers the samples that the layers before it left over; of a row of n, part p took numbers p,
            # p + n, and so on.
            number, self._counts[place] = self._counts[place], self._counts[place] + 1
            if number // row < layer.taken[first + number % row]:
                return False
        return number % row == self._part - first


def check_layers(cut: Cut, by: Cutter) -> None:
    """Check that continuing with this cut loses no samples.

    Raises:
        StateError: samples were taken, and something else cuts the stream now; or the numbers of ranks and workers have
            changed, and it is not cut by stride.
    """
    before = next((layer for layer in cut.layers if any(layer.taken)), None)
    if before is None:
        return
    # A stream that the dataset cut for a rank is cut by stride among its workers, so their number may change.
    numbers = {(layer.ranks, layer.workers if by != "dataset" else cut.workers) for layer in cut.layers}
    if by == cut.layers_by and (by == "stride" or numbers == {(cut.ranks, cut.workers)}):
        return
    raise StateError(
        f"the state was saved by {before.ranks} rank(s) with {before.workers} loader worker(s) each over a stream that "
        f"was cut by the {cut.layers_by}; here are {cut.ranks} with {cut.workers}, and it is cut by the {by}: only "
        "what is cut by stride continues with other numbers. Who cuts is decided when a pass begins: the dataset's "
        "shard or split (split_dataset_by_node for HuggingFace's), then its __iter__, if it asks get_worker_info() "
        "for num_workers, else the stride. Resume with the same numbers, or restart the epoch with set_epoch"
    )


def untouched(ranks: int, workers: int) -> Layer:
    """The layer of an epoch from which no sample was taken."""
    return Layer(ranks, workers, (0,) * (ranks * workers))


def has_shuffle_buffer(examples: Any) -> bool:
    """Whether a streamed HuggingFace dataset shuffles in a buffer, whose contents its state does not include."""
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return "BufferShuffled" in type(examples).__name__ or any(
        has_shuffle_buffer(each) for each in inner if each is not None
    )
