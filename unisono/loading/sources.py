"""Sources, from which a loader reads epoch after epoch: the protocol, and the source over any iterable.

A source makes the rounds: one piece for each device of this process, with its claim and the position after the round.
It can begin a pass at any position that it has issued.

A loader's state (`bookmark.py`) is plain data, the same on every rank: `version`, `epoch`, `seed`, `length` (of the
dataset, None if it has none), `order` (the sampler's class), and the position in the epoch: `offset`, the number of
samples that all ranks have taken together, and whatever else the source needs.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from itertools import count, islice, repeat
from time import perf_counter_ns
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import torch
from torch.utils.data import DataLoader

from unisono.arguments import check_integer
from unisono.batches.virtual_ranks import WITNESS, Draw, VirtualRanks
from unisono.comm.outcome import Outcome
from unisono.devices.randomness import drawing, mixed, seed_of
from unisono.errors import StateError
from unisono.loading.sharding import (
    Claim,
    Part,
    Piece,
    Round,
    Rule,
    cut,
    distinguish,
    glimpse,
    mark_of,
    measure,
    rounds,
)
from unisono.tree import take, tree_map

logger = logging.getLogger(__name__)

LOOKED_AT = 8  # samples by which datasets are compared
_ALIGNED = 64  # elements

_COUNTING = ("torchdata.", "streaming.base.", "litdata.")
_OF_LITDATA = "_set_use_streaming_dataloader"  # of datasets whose batches its loader takes apart
_STATE_SHARE = 50  # to take a loader's states costs at most this fraction of a loop's time: one in 50

T = TypeVar("T")

State = dict[str, Any]

Loaded = tuple[Any, int | None]
"""A batch and its number of samples; None if that must be read from the batch."""


class Begun(NamedTuple):
    """A pass: its epoch, the position where it begins, its rounds, and the `StreamProgress`, if it is of a stream."""

    epoch: int
    position: State
    pieces: Iterator[list[Piece]]
    stream: Any = None


class Progress:
    """The progress of one device's loop in a pass: the number of batches that it has received, and the position and
    claim of the last one. Prefetched ones do not count."""

    def __init__(self) -> None:
        self.rounds = 0
        self.position: Any = None
        self.claim = Claim(0, None)
        self.has_ended = False  # at the end of the data
        self.is_left = False

    @property
    def is_open(self) -> bool:
        return self.rounds > 0 and not self.has_ended and not self.is_left


def makes_batches_alike(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether the loader is torch's DataLoader with its own iterator, so that its batches can be made here instead.

    This includes those of libraries that only count in it, for a state of their own: this package's is one of any
    numbers of ranks and loader workers.
    """
    if not isinstance(loader, DataLoader):
        return False
    counts = type(loader).__module__.startswith(_COUNTING) and not hasattr(loader.dataset, _OF_LITDATA)
    return type(loader).__iter__ is DataLoader.__iter__ or counts


def is_stateful(owner: Any) -> bool:
    """Whether `owner` follows torch's `Stateful` protocol, in which `state_dict` needs no arguments."""
    if not all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    with suppress(ValueError):  # of a function in C that has no signature
        try:
            inspect.signature(owner.state_dict).bind()
        except TypeError:  # mosaicml-streaming's wants numbers of samples
            return False
    return True


class Source(ABC):
    """Makes the pieces of a loader's passes; each begun pass is one epoch. `sized` has as many elements as there are
    samples, if it has a length; `order` is the class of the sampler that is followed."""

    is_uneven = False  # whether the ranks' passes may differ in length, since each rank reads its own part

    def __init__(self, sized: Any, seed: int, order: str | None = None) -> None:
        self.seed, self.order, self.epoch = seed, order, 0
        self._sized = sized
        self._position: State = {"offset": 0}
        self._begins = threading.Lock()

    @property
    def length(self) -> int | None:
        """The current number of samples of its dataset; None if unknown."""
        with suppress(TypeError, NotImplementedError):
            return len(self._sized)
        return None

    def begin(self, rule: Rule) -> Begun:
        """Begin the next pass, in the thread that will loop over it. After an error, it can be begun again."""
        with self._begins:
            begun = self._open(self.epoch, self._position, rule)
            self.epoch, self._position = self.epoch + 1, {"offset": 0}
        return begun

    @abstractmethod
    def _open(self, epoch: int, position: State, rule: Rule) -> Begun: ...

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """Let the next pass begin at `position` of `epoch`. StateError if that is not a position of this source."""
        self.epoch, self._position = epoch, position

    def next_position(self) -> tuple[int, State]:
        """The epoch and the position where the next pass begins."""
        return self.epoch, self._position

    @abstractmethod
    def num_rounds(self, rule: Rule) -> int:
        """The number of rounds of a whole epoch. TypeError if it is unknown."""

    def last_parts(self, rule: Rule, position: State) -> list[Part]:
        """The ranks' parts of the last round of a pass from the position on; none if they are not known before."""
        return []


def one_by_one(begun: Begun, rule: Rule, virtual: VirtualRanks, seed: int, reads_here: bool) -> Iterator[list[Piece]]:
    """The pieces of each round one after another; all but the last have the position before the round.

    A rank that carries fewer than others gets a batch again, which does not count; nor does that of a witness.

    Args:
        reads_here: whether the loop's thread reads: what is drawn while a round is read then has a seed of its own, and
            the batch that is delivered seeds the generators again.
    """
    before = begun.position
    for place in count():
        at = seed, begun.epoch, before["offset"]
        with drawing(mixed(seed_of("read", seed, begun.epoch), before["offset"])) if reads_here else nullcontext():
            pieces = next(begun.pieces, None)
        if pieces is None:
            return
        witnesses, after = rule.witnesses(place), pieces[-1].position
        turns = [*zip(rule.kept, pieces, strict=False), *[(rule.count, pieces[0])] * (virtual.turns - len(rule.kept))]
        several = [*enumerate(turns, WITNESS + 1)]
        if witnesses is not None:
            several.insert(0, (WITNESS, (virtual.witness(witnesses), pieces[-1])))
        for turn, (rank, piece) in several:
            draw = Draw(*at, rank, virtual, turn, witnesses, piece.claim.samples)
            made = piece if draw.counts else _uncounted(piece)
            yield [made._replace(position=after if draw.ends_round else before, draw=draw)]
        before = after


def _uncounted(piece: Piece) -> Piece:
    # In memory of its own, by which it is known from the one that counts.
    batch = tree_map(lambda leaf: _copy_of(leaf) if isinstance(leaf, torch.Tensor) else leaf, piece.batch)
    claim = piece.claim
    return piece._replace(batch=batch, claim=claim._replace(samples=0, repeated=claim.samples + claim.repeated))


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, at a place in memory that is divisible alike: a kernel may add in another order where it is not."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_inference():
        return tensor.clone()
    room = tensor.storage_offset() % _ALIGNED
    return tensor.new_empty(room + tensor.numel())[room:].view(tensor.shape).copy_(tensor)


class PlainSource(Source):
    """Any iterable of batches. Every rank reads all of it and keeps its part, so it must be the same on every rank. The
    seed is only saved in the state, and compared on loading."""

    _are_items = False

    def __init__(self, loader: Iterable[Any], dim: int, seed: int | None = None) -> None:
        super().__init__(getattr(loader, "dataset", None), seed or 0)
        self._loader: Any = loader
        self._dim, self._is_stateful = dim, is_stateful(loader)

    def _open(self, epoch: int, position: State, rule: Rule) -> Begun:
        before, first = position.get("batches", 0), position.get("first")
        loaded = self._load(epoch, position, rule)
        kept = KeptState(self._loader, loaded) if self._is_stateful else None

        def after(offset: int, batches: int, first: int) -> State:
            own = {} if kept is None else kept.position()
            return {"offset": offset, "batches": before + batches, "first": first, **own}

        made = loaded if kept is None else iter(kept)
        return Begun(
            epoch, position, rounds_of_loaded(made, rule, self._dim, position["offset"], after, first, self._are_items)
        )

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """As in `Source`: the position must say how many batches precede it."""
        if "batches" not in position and position["offset"]:
            raise StateError("the state lacks the number of batches: it was saved by another kind of loader")
        super().seek(epoch, position, rule)

    def num_rounds(self, rule: Rule) -> int:
        return rule.rounds_of(len(self._loader))

    def _load(self, epoch: int, position: State, rule: Rule) -> Iterator[Loaded]:
        if callable(getattr(self._loader, "set_epoch", None)):
            self._loader.set_epoch(epoch)
        done = position["offset"] // rule.shards
        if self._is_stateful and "loader" in position:
            # A copy: the loader may keep and modify it, and the pass's own position still refers to it.
            self._loader.load_state_dict(copy.deepcopy(position["loader"]))
            return _continued(iter(self._loader), position, type(self._loader).__name__)
        if done:
            kind = type(self._loader).__name__
            logger.warning("the loop reads and discards the first %d samples of %s: it has no state_dict", done, kind)
        return _after(zip(iter(self._loader), repeat(None)), done, self._dim)


class KeptState:
    """The batches of a loader with a state of its own, and that state at a batch before the last one. It is copied as
    often as costs little time: it may hold all data. What follows it is read again at a resume, and then shows whether
    the loader continues from it as it did."""

    def __init__(self, loader: Any, loaded: Iterator[Loaded]) -> None:
        self._loader, self._loaded = loader, loaded
        self._state: Any = None
        self._since = self._mark = self._due_ns = 0

    def __iter__(self) -> Iterator[Loaded]:
        while True:
            if (began := perf_counter_ns()) >= self._due_ns:
                self._state, self._since = copy.deepcopy(self._loader.state_dict()), 0
                ended = perf_counter_ns()
                self._due_ns = ended + (ended - began) * _STATE_SHARE
            if (each := next(self._loaded, None)) is None:
                return
            self._since += 1
            self._mark = mark_of(glimpse(each[0]))
            yield each

    def position(self) -> State:
        return {"loader": self._state, "since": self._since, "mark": self._mark}


def _continued(batches: Iterator[Any], position: State, kind: str) -> Iterator[Loaded]:
    """The batches of a loader that has loaded a state, after those that were delivered since that state."""
    last = [*islice(batches, position.get("since", 0))][-1:]
    if last and mark_of(glimpse(last[0])) != position["mark"]:
        logger.warning(
            "%s does not continue from its state_dict as it did: the batch after that state is another one, so samples "
            "of this epoch are lost or repeated, unless it draws them at random; give it an order that its state "
            "includes, or use a DataLoader with that sampler, which resumes exactly",
            kind,
        )
    return zip(batches, repeat(None))


class ItemSource(PlainSource):
    """A DataLoader with batch_size=None over a map-style dataset: an item may itself be a batch, of any size. `items`
    yields them in the order of (seed, epoch), each as a batch of one."""

    _are_items = True

    def __init__(self, items: Source, dim: int) -> None:
        super().__init__((), dim, items.seed)
        self._items, self._sized, self.order = items, items._sized, items.order

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """As in `Source`; what is a batch here is one sample for the inner source."""
        self._items.seek(epoch, {"offset": position.get("batches", 0)}, Rule())
        super().seek(epoch, position, rule)

    def num_rounds(self, rule: Rule) -> int:
        return rule.rounds_of(self._items.num_rounds(Rule()))

    def _load(self, epoch: int, position: State, rule: Rule) -> Iterator[Loaded]:
        # The position counts here, not that of the inner source, which advances by itself.
        self._items.seek(epoch, {"offset": position.get("batches", 0)}, Rule())
        items = (piece.batch for (piece,) in self._items.begin(Rule()).pieces)
        return ((item.unwrap() if type(item) is Outcome else item, None) for item in items)


def _after(loaded: Iterator[Loaded], samples: int, dim: int) -> Iterator[Loaded]:
    """The batches after the first `samples` samples, beginning with the rest of a batch that this boundary cuts."""
    for batch, known in loaded:
        size = measure(batch, dim, known) if samples else None
        if size is None:
            yield batch, known
        elif size.samples <= samples:
            samples -= size.samples
        elif size.can_be_cut:
            yield take(batch, slice(samples, None), dim), None
            samples = 0
        else:
            raise StateError(
                f"the state's position is after {samples} samples of a batch of {size.samples} that cannot be split; "
                "resume with the batch size that it was saved with"
            )
    if samples:
        raise StateError(
            f"the state's position is {samples} samples beyond the end of this loader: it belongs to other data"
        )


def rounds_of_loaded(
    loaded: Iterator[Loaded],
    rule: Rule,
    dim: int,
    offset: int,
    after: Callable[[int, int, int], Any],
    first: int | None = None,
    are_items: bool = False,
) -> Iterator[list[Piece]]:
    """The pieces that this process keeps of each round of loaded batches, after `offset` samples of the epoch.
    `after(samples, batches, first)` is the position after a round: the samples of the epoch, and the batches of this
    pass, up to its end; `first` is the size of the epoch's first batch, also the size to pad to. If `are_items`, a
    batch may be a single sample of a dataset."""
    done = 0
    is_marked = rule.count > len(rule.kept)  # other processes read the round too
    is_thorough = rule.is_compared
    start = offset // rule.shards
    size_of = lambda each, is_cut: measure(each[0], dim, each[1], is_cut, are_items)  # noqa: E731
    for number, dealt in enumerate(rounds(loaded, rule, size_of, None, start, first)):
        first = first or dealt.sizes[0].samples
        batches = [batch for batch, _ in dealt.batches]
        mark = 0
        if is_marked:
            if is_thorough:  # the first round shows whether the ranks read the same; silence does not
                seen, shows = distinguish(batches)
                is_thorough = not shows
            else:
                seen = [glimpse(batch) for batch in batches]
            mark = mark_of(dealt.start, dealt.sizes, seen)
        done += len(batches)
        position = after(dealt.stop * rule.shards, done, first)
        whole = Round(batches, *dealt[1:])
        pieces = [cut(whole, place, dim, mark)._replace(position=position) for place in rule.kept_of(number)]
        if rule.shards > 1:  # no rank knows the whole round's size, so this rank's claim has no total
            pieces = [piece._replace(claim=piece.claim._replace(total=None)) for piece in pieces]
        yield pieces


class SampleGenerator(Generic[T]):
    """Yields `data`, the same object, `sample_count` times in each loop over it, as PyTorch/XLA's: it is an iterable
    with a length, and also an iterator with its own counter, which loops do not change. TypeError or ValueError if
    `sample_count` is not an integer of at least 0."""

    def __init__(self, data: T, sample_count: int) -> None:
        check_integer(sample_count, "sample_count", 0)
        self._data, self._sample_count = data, sample_count
        self._left = repeat(data, sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __iter__(self) -> Iterator[T]:
        return repeat(self._data, self._sample_count)

    def __next__(self) -> T:
        return next(self._left)
