"""How much was taken of each part of a stream, and ranks that take their parts in step, though these end unevenly.

A part has an address and a position. The address is its number (part w of rank r is number `r * workers + w`) and the
row of parts that take turns in one stream: all of them, if it is cut by stride. The position is the number of its
samples that were delivered, and a mark of the stream up to there: of the first sample of each of the stream's rows, by
its integers and texts; `rest` marks the other values, as long as those are the same in all of these samples.

Each rank announces which batches it has ready: at least one, or its end. So all know how many rounds they can take
before they must meet again. A rank whose part has ended repeats a sample, which does not count.

*Threads:* the loop's; without other ranks, the reader's.

Invariants:
1. All ranks meet before the same rounds, since each rank knows what all others have offered. None waits for a batch
   that it does not need yet.
2. An error of one rank's source ends the loop on all ranks, after the rounds that were complete.
3. After its end, for whatever reason, a loop meets no other rank: it ends in the same way again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import starmap
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import torch

from unisono.comm.outcome import copy_error
from unisono.errors import BrokenWorldError, CollectiveMismatchError, StateError
from unisono.loading.channel import EndOfChannel
from unisono.loading.pipeline import Delivery, Lane, Stamps
from unisono.loading.sharding import Claim, Rule, mark_of
from unisono.loading.sources import State
from unisono.tree import all_have_rows, batch_size, can_cut, take, tree_map
from unisono.world import World

Cutter = Literal["caller", "dataset", "worker", "stride"]  # `streams.py` says which of them does when

_SHARED_EVERY = 16  # batches: at most these are read again where other ranks continue, or this one by another's state
_REMEMBERED = 1024  # positions; more than one reader is ahead of another
_ALIKE = 8  # samples whose integers are the same: those of the whole stream may well be
_DIFFERENT = (
    "the ranks or loader workers read different streams, so that taking turns in them would lose and repeat samples; "
    "if the dataset gives each loader worker a part by get_worker_info().id, let it ask for num_workers, too; if it "
    "gives each rank a part of its own, pass DeviceLoader(loader, already_sharded=True); if it shuffles, do so by the "
    "epoch (set_epoch), or with the global generators in one loader worker (num_workers=1)"
)


class Position(NamedTuple):
    """A number of samples, the marks of the stream up to there, and the dataset's own state, if any. `rest` is 0 if
    only `mark` distinguishes the samples: other values may be augmented at random."""

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
        """The parts that take turns in the stream that `part` reads: all; its rank's, where the dataset has cut the
        stream by ranks; or itself alone."""
        if by == "stride":
            return range(len(self.parts))
        size = self.workers if by == "dataset" else 1
        return range(part - part % size, part - part % size + size)


class Read(NamedTuple):
    """What a batch leaves: the position of a part of a stream that is cut `by`, and the dataset's own state there.
    `earlier` are positions before it, by which parts are compared that were never seen at the same one."""

    part: int
    position: Position
    by: Cutter = "stride"
    state: Any = None  # known to the part's rank only
    earlier: tuple[Position, ...] = ()


class StreamPosition(NamedTuple):
    """A position in a stream that was cut `by`. The last layer is that of the current ranks and workers, if it is cut
    by stride, or by the caller; else that of those that began the pass, whose parts the current ones share."""

    by: Cutter = "stride"
    layers: tuple[Layer, ...] = ()
    is_of_rank: bool = False  # whether the dataset was cut by ranks, before loader workers cut it
    before: int = 0  # samples before these layers, which the dataset skips by itself
    own: Any = None  # what the order of such a dataset depends on

    @classmethod
    def of_state(cls, state: State) -> StreamPosition:
        """Read what `to_state` returned, or the beginning; StateError if it is not a position in a stream."""
        if not state["offset"]:
            return cls()
        try:
            layers = [Layer(ranks, row, tuple(starmap(Position, parts))) for ranks, row, parts in state["layers"]]
            of_rank = state.get("is_of_rank", state["by"] == "dataset")
            return cls(state["by"], tuple(layers), of_rank, state.get("before", 0), state.get("own"))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError("the state does not say what was read of each part: it is not a stream's") from error

    def to_state(self) -> State:
        """The position as plain data."""
        layers = [[*layer[:2], [[*each] for each in layer.parts]] for layer in self.layers]
        more = {"before": self.before, "own": self.own} if self.own is not None else {}
        return {"offset": self.offset, "by": self.by, "layers": layers, "is_of_rank": self.is_of_rank, **more}

    @property
    def here(self) -> Layer:
        return self.layers[-1]

    @property
    def offset(self) -> int:
        return self.before + sum([each.taken for layer in self.layers for each in layer.parts])

    @property
    def keeps_parts(self) -> bool:
        """Whether the pass has begun, and other ranks and workers would continue it by the same parts."""
        return self.offset > self.before and self.by in ("dataset", "worker")

    def parts_of(self, rank: int, ranks: int, workers: int) -> list[list[int]]:
        """The parts of each loader worker of a rank, in the order in which they deliver: from the one that is due."""
        count, parts = len(self.here.parts), self.here.parts
        own = [part for part in range(count) if part * ranks // count == rank]
        own.sort(key=lambda part: parts[part].taken)
        return [own[worker::workers] for worker in range(workers)]

    def after(self, reads: Iterable[Read]) -> StreamPosition:
        parts, by = list(self.here.parts), self.by
        for read in reads:
            # An earlier state will do: what follows it is read again up to the position.
            state = parts[read.part].state if read.state is None else read.state
            by, parts[read.part] = read.by, read.position._replace(state=state)
        return self._replace(by=by, layers=(*self.layers[:-1], self.here._replace(parts=tuple(parts))))

    def cut_for(self, ranks: int, workers: int) -> StreamPosition:
        """The same position, with what is left cut for these numbers of ranks and workers."""
        if self.layers and (self.here[:2] == (ranks, workers) or self.keeps_parts):
            return self
        # No state of the dataset's own fits other parts.
        before = [each._replace(parts=tuple(part._replace(state=None) for part in each.parts)) for each in self.layers]
        return self._replace(layers=(*before, Layer(ranks, workers, (Position(),) * (ranks * workers))))

    def check_cut(self, by: Cutter) -> None:
        """Check that no sample is lost if `by` cuts the stream from here on. StateError if something else has cut it
        before; or if the numbers of ranks and workers have changed, and it is not cut by stride."""
        if self.offset > self.before and (by != self.by or (by != "stride" and len(self.layers) > 1)):
            before, here = self.layers[0], self.here
            raise StateError(
                f"the state was saved by {before.ranks} rank(s) with {before.workers} loader worker(s) each, over a "
                f"stream cut by the {self.by}; here are {here.ranks} with {here.workers}, and it is cut by the {by}; "
                "resume with the same (only the stride continues with other numbers), or restart the epoch by set_epoch"
            )


class StreamProgress:
    """How much was delivered of all parts. Those that are read from one stream are compared: by their marks at the same
    number of samples, and at the end by their lengths, which may differ by `slack`."""

    def __init__(self, position: StreamPosition, slack: int = 1) -> None:
        self.position, self._slack = position, slack
        self._marks: dict[tuple[int, int], Position] = {}  # by the row's first part and the number; the latest last

    def add(self, reads: Iterable[Read]) -> None:
        """Count what batches have left; CollectiveMismatchError if another reader has seen another stream."""
        for read in reads:
            first = self.position.here.row_of(read.by, read.part).start
            for position in (*read.earlier, read.position):
                seen = position if position.taken >= _ALIKE else position._replace(rest=0)
                if self._marks.setdefault((first, seen.taken), seen).is_of_another(seen):
                    raise CollectiveMismatchError(_DIFFERENT)
            while len(self._marks) > _REMEMBERED:
                del self._marks[next(iter(self._marks))]
        self.position = self.position.after(reads)

    def check_ends(self) -> None:
        """Check, at the end of all parts, that the streams that they were cut from by stride were of one length. Parts
        take turns, so the first ones have one sample more, or, if incomplete batches are dropped, any has `slack`."""
        taken = [each.taken for each in self.position.here.parts]
        is_in_turn = taken == sorted(taken, reverse=True) or self._slack > 1
        if self.position.by == "stride" and not (is_in_turn and max(taken) - min(taken) <= self._slack):
            raise CollectiveMismatchError(_DIFFERENT)


class _Offer(NamedTuple):
    """A rank's contribution to the next rounds."""

    start: tuple[int, int]  # the number of the epoch's samples before these rounds, and that of the rank's workers
    batches: list[tuple[int, Read]]  # the samples of those that are ready; none if its part has ended, or failed
    has_sample: bool  # to repeat
    failure: str | None  # the error that its source raised


class Lockstep:
    """The batches of one rank's lane, of which `ahead` may wait here, in step with the other ranks'. `stream` is the
    same on every rank, but for the states of the rank's own parts."""

    def __init__(self, lane: Lane, world: World, rule: Rule, dim: int, ahead: int, stream: StreamProgress) -> None:
        self._lane, self._world, self._rule, self._dim, self._ahead = lane, world, rule, dim, ahead
        self._stream = stream
        self._own: deque[Delivery] = deque()
        self._rounds: deque[list[tuple[int, Read] | None]] = deque()
        self._spare: Delivery | None = None  # to be repeated
        self._num_unshared = 0  # batches since one was offered with the dataset's state
        self._end: BaseException | None = None

    def receive(self) -> Delivery:
        """Return the next batch, or a repeated sample; as `Lane.receive`. EndOfChannel if no rank has more; otherwise
        an error is that of `_check_offers`, or CollectiveMismatchError if the ranks read different streams."""
        if self._end is not None:
            raise copy_error(self._end)
        try:
            # Batches of rounds that were agreed on before are here already: there is no wait to divide.
            stamps = Stamps() if self._rounds else self._agree_on_rounds()
            return self._take_round(self._rounds.popleft(), stamps)
        except Exception as error:
            self._end = copy_error(error).with_traceback(None)  # its frames would keep the loader workers alive
            self._own.clear()
            self._lane.cancel()  # this rank may have more batches
            raise

    def _take_round(self, offered: list[tuple[int, Read] | None], stamps: Stamps) -> Delivery:
        """Return this rank's batch of a round, or its substitute."""
        ready = [each for each in offered if each is not None]
        sizes, reads = [size for size, _ in ready], [read for _, read in ready]
        if offered[self._world.rank] is not None:
            own = self._own.popleft()
            reads.append(own.position)  # with the dataset's state, which the offer lacks
        else:
            assert self._spare is not None
            own = self._spare_of(self._spare)  # a copy, since the loop may write to its batches
        self._stream.add(reads)
        position = self._stream.position.to_state()
        dealt = sum(map(bool, sizes))
        claim = own.claim._replace(total=sum(sizes), mark=mark_of(position["offset"]), dealt=dealt)
        return own._replace(claim=claim, position=position, stamps=stamps)

    def _agree_on_rounds(self) -> Stamps:
        """Announce what is ready here, and determine the rounds that all ranks can take."""
        failure = self._receive_ready()
        stamps = (self._own[0].stamps if self._own else Stamps())._replace(ready_at=perf_counter_ns())
        # Mostly without the datasets' states, by which other ranks could continue these parts.
        batches = [(each.claim.samples, each.position._replace(state=None)) for each in self._own]
        self._num_unshared += len(batches)
        if self._num_unshared >= _SHARED_EVERY and batches:
            batches[0] = batches[0][0], self._own[0].position
            self._num_unshared = 0
        start = self._stream.position.offset, self._stream.position.here.workers
        offer = _Offer(start, batches, self._spare is not None, failure)
        offers: list[_Offer] = self._world.comm.all_gather_object(offer)
        # Only after the exchange, in which the peers learn of it: without this rank's offer they would wait.
        if failure is not None:
            self._lane.receive()  # raises it again
        _check_offers(offers)
        going = [offer for offer in offers if offer.batches]
        if not going:
            self._stream.check_ends()
        if not going or (len(going) < len(offers) and (self._rule.tail == "drop" or self._rule.fixed_batch_size)):
            raise EndOfChannel
        for place in range(min(len(offer.batches) for offer in going)):
            self._rounds.append([offer.batches[place] if offer.batches else None for offer in offers])
        # All ranks decide this from the same offers, so either all or none take part in the broadcast.
        if not all(offer.has_sample for offer in offers):
            self._share_sample(offers.index(going[0]))
        return stamps

    def _receive_ready(self) -> str | None:
        """Receive the batches that are ready, at least one. Return the source's error if no batch precedes it; if one
        does, the error waits: the lane raises it again at each call."""
        try:
            # Beyond the first, only batches that are in the lane already: the peers must not wait for more.
            while not self._own or (len(self._own) < self._ahead and self._lane.sent > self._lane.received):
                self._own.append(self._lane.receive())
                if self._spare is None:
                    self._spare = self._spare_of(self._own[0])
        except EndOfChannel:
            pass
        except Exception as error:
            if not self._own:
                return f"{type(error).__name__}: {error}"
        return None

    def _spare_of(self, own: Delivery) -> Delivery:
        """Return a sample of a batch, as often as the rule pads batches to, or the batch if it cannot be cut."""
        size = batch_size(own.batch, self._dim) or 1
        if can_cut(own.batch, self._dim) and all_have_rows(own.batch, self._dim):  # else it may be one sample
            size = size if self._rule.tail == "pad" else 1
            self._lane.backend.wait_ready(own.token)
            own = own._replace(batch=take(own.batch, [0] * size, self._dim))
        return own._replace(claim=Claim(0, None, repeated=size))

    def _share_sample(self, root: int) -> None:
        """Send one sample to the ranks that have never received any."""
        world, sample = self._world, None
        if world.rank == root:
            assert self._spare is not None
            self._lane.backend.wait_ready(self._spare.token)
            # Via the host: a pickled tensor would name the root's device, and each rank moves it to its own.
            sample = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, self._spare.batch)
        sample = world.comm.broadcast_object(sample, root)
        if self._spare is None:
            batch, token = world.backend.to_device(sample, self._lane.device)
            self._spare = Delivery(batch, token, Claim(0, None), {}, Stamps())


def _check_offers(offers: list[_Offer]) -> None:
    """Check that the ranks can take these rounds. All of them see the same offers, so all raise or none does."""
    first, row = offers[0].start
    for rank, offer in enumerate(offers):
        if offer.failure is not None:
            raise BrokenWorldError(f"the loader of rank {rank} failed with {offer.failure}")
        if offer.start != (first, row):
            raise CollectiveMismatchError(
                f"rank 0 asks for what comes after {first} samples of the stream with {row} loader worker(s), rank "
                f"{rank} after {offer.start[0]} with {offer.start[1]}; every rank must have as many workers, loop over "
                "the loader equally often, and leave it at the same batch"
            )
    cutters = sorted({offer.batches[0][1].by for offer in offers if offer.batches})
    if len(cutters) > 1:
        raise RuntimeError(
            f"the ranks' streams are cut in different ways, by the {' and by the '.join(cutters)}, so samples would be "
            "lost and repeated; let shard and split be the same on all ranks"
        )
