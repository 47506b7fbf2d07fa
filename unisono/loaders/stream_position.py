"""How much of each part of a stream was delivered: the position in an iterable dataset.

A part has an address and a position. The address is its number (part w of rank r is number `r * workers + w`) and the
row of parts that take turns in one stream: all of them, if it is cut by stride. The position is the number of its
samples that were delivered, and a mark of the stream up to there: of the first sample of each of the stream's rows.

Invariants:
1. A position counts samples that were delivered, not those that were read ahead.
2. Parts of one stream that are at the same number have the same mark, and so has who reads the stream again.
3. A stream that is cut by stride can continue with other numbers of ranks and workers; one that is cut otherwise needs
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

_REMEMBERED = 1024  # positions; more than one reader is ahead of another


class Position(NamedTuple):
    """The number of a part's samples that were delivered, and the mark of its stream up to there."""

    taken: int = 0
    mark: int = 0


class Layer(NamedTuple):
    """The positions of the parts of `ranks` ranks with `workers` loader workers each.

    When the numbers of ranks or workers change, a second layer divides the samples that the first left over, and so on.
    """

    ranks: int
    workers: int
    parts: tuple[Position, ...]

    def row_of(self, by: Cutter, rank: int, part: int) -> range:
        """The parts that take turns in the stream that `part`, of `rank`, reads."""
        if by == "stride":
            return range(len(self.parts))
        # All of the stream is the part's own, unless the dataset has cut it for the rank: then its workers take turns.
        return range(rank * self.workers, (rank + 1) * self.workers) if by == "dataset" else range(part, part + 1)


class Read(NamedTuple):
    """What a batch leaves: the position of a part of a stream that is cut `by`, and the dataset's own state if any."""

    part: int
    position: Position
    by: Cutter = "stride"
    state: Any = None


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream.

    Attributes:
        by: what cut it.
        layers: the positions of its parts; the last layer is that of the current ranks and workers.
        states: the dataset's own states at those positions, by part, if it has any.
    """

    by: Cutter
    layers: tuple[Layer, ...]
    states: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def nothing(cls, by: Cutter, ranks: int, workers: int) -> StreamPosition:
        """The beginning."""
        return cls(by, (Layer(ranks, workers, (Position(),) * (ranks * workers)),))

    @classmethod
    def of_state(cls, state: State) -> StreamPosition:
        """Read what `to_state` returned; StateError if it is not a position in a stream."""
        try:
            layers = tuple(
                Layer(ranks, workers, tuple(Position(taken, mark) for taken, mark in parts))
                for ranks, workers, parts in state["layers"]
            )
            found = cls(state["by"], layers, {int(part): each for part, each in state.get("states", {}).items()})
            is_right = all(
                len(each.parts) == each.ranks * each.workers and min(each.parts) >= (0, 0) for each in layers
            )
            is_right = is_right and len(layers) > 0 and found.by in get_args(Cutter)
        except (KeyError, TypeError, ValueError):
            is_right = False
        if not is_right:
            raise StateError("the state does not say what was read of which part: it is not the state of a stream")
        return found

    def to_state(self, offset: int) -> State:
        """The position as plain data, after `offset` samples of the epoch."""
        layers = [[layer.ranks, layer.workers, [list(each) for each in layer.parts]] for layer in self.layers]
        return {"offset": offset, "by": self.by, "layers": layers, **({"states": self.states} if self.states else {})}

    @property
    def here(self) -> Layer:
        """The layer of the current ranks and workers."""
        return self.layers[-1]

    @property
    def is_begun(self) -> bool:
        """Whether anything was taken."""
        return any(any(each) for layer in self.layers for each in layer.parts)

    def parts_of(self, rank: int) -> list[int]:
        """The parts of a rank, in the order in which they deliver: worker by worker, from the one that is due."""
        workers = self.here.workers
        own = range(rank * workers, (rank + 1) * workers)
        return sorted(own, key=lambda part: self.here.parts[part].taken)

    def is_read_again(self, part: int) -> bool:
        """Whether the reader of this part must read samples that were taken before."""
        return (len(self.layers) > 1 or self.here.parts[part].taken > 0) and part not in self.states

    def after(self, reads: Iterable[Read]) -> StreamPosition:
        """The position after these batches."""
        parts, states, by = list(self.here.parts), dict(self.states), self.by
        for read in reads:
            by, parts[read.part] = read.by, read.position
            if read.state is not None:
                states[read.part] = read.state
        return StreamPosition(by, (*self.layers[:-1], self.here._replace(parts=tuple(parts))), states)

    def cut_again(self, ranks: int, workers: int) -> StreamPosition:
        """The same position, with what is left cut for these numbers of ranks and workers."""
        if self.here[:2] == (ranks, workers):
            return self
        return replace(self, layers=self.layers + StreamPosition.nothing(self.by, ranks, workers).layers, states={})

    def check_cut(self, by: Cutter) -> None:
        """Check that no sample is lost if `by` cuts the stream from here on. StateError if something else has cut it
        before; or if the numbers of ranks and workers have changed, and it is not cut by stride."""
        here = self.here[:2]
        # A stream that the dataset cut for a rank is cut by stride among its workers, so their number may change.
        numbers = {(layer.ranks, layer.workers if by != "dataset" else here[1]) for layer in self.layers}
        if not self.is_begun or (by == self.by and (by == "stride" or numbers == {here})):
            return
        before = next(layer for layer in self.layers if any(map(any, layer.parts)))
        raise StateError(
            f"the state was saved by {before.ranks} rank(s) with {before.workers} loader worker(s) each over a stream "
            f"that was cut by the {self.by}; here are {here[0]} with {here[1]}, and it is cut by the {by}: only what "
            "is cut by stride continues with other numbers. Who cuts is decided when a pass begins: the dataset's "
            "shard (split_dataset_by_node for HuggingFace's), then its __iter__, if it asks get_worker_info() for "
            "num_workers, else the stride. Resume with the same numbers, or restart the epoch with set_epoch"
        )


class SameStream:
    """Compares the marks of parts that are read from one stream, at the same number of samples."""

    def __init__(self, here: Layer) -> None:
        self._here = here
        self._marks: dict[tuple[int, int], int] = {}  # by the row's first part and the number; the latest last

    def compare(self, read: Read) -> None:
        """Add the position that one batch has left; RuntimeError if another reader has seen another stream."""
        row = self._here.row_of(read.by, read.part // self._here.workers, read.part)
        if self._marks.setdefault((row.start, read.position.taken), read.position.mark) != read.position.mark:
            raise RuntimeError(
                "the ranks or loader workers read different streams (their samples differ), so cutting them by stride "
                "would lose some samples and repeat others; shuffle by the epoch (set_epoch), or with the global "
                "generators in loader workers (num_workers=1), which are seeded alike; or let the dataset cut itself, "
                "by get_worker_info() or by shard(num_shards, index); where each has its own part already, pass "
                "already_sharded=True"
            )
        if len(self._marks) > _REMEMBERED:
            del self._marks[next(iter(self._marks))]
