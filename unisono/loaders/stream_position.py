"""How much of each part of a stream was taken: the position in an iterable dataset.

A part has an address (what cuts the stream, for how many ranks and loader workers of each, and the part's number) and a
position (how many of its samples were delivered). Part w of rank r is number `r * workers + w`.

Invariants:
1. A position counts samples that were delivered, not those that were read ahead.
2. A stream that is cut by stride can continue with other numbers of ranks and workers; one that is cut otherwise needs
   the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from unisono.errors import StateError
from unisono.loaders.resume import State

Cutter = Literal["caller", "dataset", "worker", "stride"]
"""What cuts a stream into parts; `streams.py` explains which of them does when."""

_REMEMBERED = 1024  # rows; more than one reader is ahead of another


class Layer(NamedTuple):
    """The number of samples that were taken of each part, of those of `ranks` ranks with `workers` loader workers each.

    When the numbers of ranks or workers change, a second layer divides the samples that the first left over, and so on.
    """

    ranks: int
    workers: int
    taken: tuple[int, ...]


class Seen(NamedTuple):
    """What was read of a stream that is cut by stride: the same for all parts, as all of them read all of it.

    Attributes:
        first: a fingerprint of the first sample.
        rows: the number of rows read so far; a row is one sample for each part.
        mark: a fingerprint of the rows' first samples.
    """

    first: int = 0
    rows: int = 0
    mark: int = 0


class Read(NamedTuple):
    """What a batch took: `samples` of a part of a stream that is cut `by`.

    `state` is the dataset's own state after it, None if it has none. `seen` is None if the stream was not read from its
    beginning, or is not cut by stride.
    """

    part: int
    samples: int
    by: Cutter = "stride"
    seen: Seen | None = None
    state: Any = None


@dataclass(frozen=True)
class Taken:
    """A position in a stream.

    Attributes:
        by: what cut it.
        layers: the samples that were taken; the last layer is that of the current ranks and workers.
        last: the worker of each rank that delivered last.
        mark: `Seen.first` of the stream; None if unknown.
        states: the dataset's own states after those samples, by part, if it has any.
    """

    by: Cutter
    layers: tuple[Layer, ...]
    last: tuple[int, ...]
    mark: int | None = None
    states: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def nothing(cls, by: Cutter, ranks: int, workers: int) -> Taken:
        """The beginning: as if the last worker had just delivered, so that worker 0 is next."""
        return cls(by, (Layer(ranks, workers, (0,) * (ranks * workers)),), (workers - 1,) * ranks)

    @classmethod
    def of_state(cls, state: State) -> Taken:
        """Read what `to_state` returned.

        Raises:
            StateError: it is not a position in a stream.
        """
        try:
            layers = tuple(Layer(ranks, workers, tuple(taken)) for ranks, workers, taken in state["layers"])
            states = {int(part): each for part, each in state.get("states", {}).items()}
            found = cls(state["by"], layers, tuple(state["last"]), state.get("mark"), states)
            is_right = all(len(each.taken) == each.ranks * each.workers and min(each.taken) >= 0 for each in layers)
            is_right = is_right and len(found.last) == layers[-1].ranks and found.by in get_args(Cutter)
        except (KeyError, TypeError, ValueError, IndexError):
            is_right = False
        if not is_right:
            raise StateError("the state does not say what was read of which part: it is not the state of a stream")
        return found

    def to_state(self, offset: int) -> State:
        """The position as plain data, after `offset` samples of the epoch."""
        layers = [[layer.ranks, layer.workers, list(layer.taken)] for layer in self.layers]
        state = {"offset": offset, "by": self.by, "layers": layers, "last": list(self.last), "mark": self.mark}
        return {**state, "states": self.states} if self.states else state

    @property
    def here(self) -> Layer:
        """The layer of the current ranks and workers."""
        return self.layers[-1]

    @property
    def is_begun(self) -> bool:
        """Whether anything was taken."""
        return any(any(layer.taken) for layer in self.layers)

    def is_read_again(self, part: int) -> bool:
        """Whether the reader of this part must read samples that were taken before."""
        is_taken = any(any(layer.taken) for layer in self.layers[:-1]) or self.here.taken[part] > 0
        return is_taken and part not in self.states

    def after(self, reads: Iterable[Read]) -> Taken:
        """The position after these batches, but for the states of their datasets."""
        ranks, workers, before = self.here
        taken, last, by, mark = list(before), list(self.last), self.by, self.mark
        for read in reads:
            by = read.by
            taken[read.part] += read.samples
            last[read.part // workers] = read.part % workers
            mark = mark or (read.seen and read.seen.first)
        layers = (*self.layers[:-1], Layer(ranks, workers, tuple(taken)))
        return replace(self, by=by, layers=layers, last=tuple(last), mark=mark)

    def with_state(self, read: Read) -> Taken:
        """The same position, with the dataset's own state after a batch."""
        return self if read.state is None else replace(self, states={**self.states, read.part: read.state})

    def cut_again(self, ranks: int, workers: int) -> Taken:
        """The same position, with what is left cut for these numbers of ranks and workers."""
        if self.here[:2] == (ranks, workers):
            return self
        rest = Taken.nothing(self.by, ranks, workers)
        return replace(rest, layers=(*self.layers, *rest.layers), mark=self.mark)

    def check_cut(self, by: Cutter) -> None:
        """Check that no sample is lost if `by` cuts the stream from here on.

        Raises:
            StateError: something else has cut it before; or the numbers of ranks and workers have changed, and it is
                not cut by stride.
        """
        here = self.here[:2]
        # A stream that the dataset cut for a rank is cut by stride among its workers, so their number may change.
        numbers = {(layer.ranks, layer.workers if by != "dataset" else here[1]) for layer in self.layers}
        if not self.is_begun or (by == self.by and (by == "stride" or numbers == {here})):
            return
        before = next(layer for layer in self.layers if any(layer.taken))
        raise StateError(
            f"the state was saved by {before.ranks} rank(s) with {before.workers} loader worker(s) each over a stream "
            f"that was cut by the {self.by}; here are {here[0]} with {here[1]}, and it is cut by the {by}: only what "
            "is cut by stride continues with other numbers. Who cuts is decided when a pass begins: the dataset's "
            "shard (split_dataset_by_node for HuggingFace's), then its __iter__, if it asks get_worker_info() for "
            "num_workers, else the stride. Resume with the same numbers, or restart the epoch with set_epoch"
        )


class SameStream:
    """Compares what the readers of a stream that is cut by stride have seen, and what was seen before a state.

    Args:
        saved: `Taken.mark` of the state from which the pass continues.
    """

    def __init__(self, saved: int | None) -> None:
        self._saved = saved
        self._first = saved
        self._by_rows: dict[int, Seen] = {}  # the latest last

    def compare(self, seen: Seen | None) -> None:
        """Add what one reader has seen.

        Raises:
            StateError: the state was saved over another stream.
            RuntimeError: another reader has seen another stream.
        """
        if seen is None:
            return
        self._first = self._first or seen.first
        if self._saved not in (None, seen.first):
            raise StateError(
                "the state was saved over another stream: the first samples differ; load it over the same data, in the "
                "same order"
            )
        if self._first != seen.first or self._by_rows.setdefault(seen.rows, seen) != seen:
            raise RuntimeError(
                "the ranks or loader workers read different streams (their samples differ), so cutting them by stride "
                "would lose some samples and repeat others; shuffle by the epoch (set_epoch), or with the global "
                "generators in loader workers (num_workers=1), which are seeded alike; or let the dataset cut itself, "
                "by get_worker_info() or by shard(num_shards, index); where each has its own part already, pass "
                "already_sharded=True"
            )
        if len(self._by_rows) > _REMEMBERED:
            del self._by_rows[next(iter(self._by_rows))]
