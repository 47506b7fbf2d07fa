"""A DataLoader over an iterable dataset: each rank, and each of its loader workers, takes its own part of the stream.

Who cuts it, the first that can:
1. the caller: with `sharded=True` it is taken as it comes, on every rank and in every worker;
2. the dataset's own `shard` or `split` method, into one part for each rank;
3. the dataset itself, if it asks `torch.utils.data.get_worker_info()` for the number of workers before it gives its
   first sample: the answer counts the workers of all ranks as one row;
4. the stride: part p of P takes the samples p, P + p, 2P + p, ... of the stream that all of them read.

The last takes for granted that all read the same stream. So what is random in it is seeded alike in every worker, and
the first sample of each is compared.

*Threads:* the reader's; `parts.py` is what runs in loader workers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader, IterableDataset

from unisono.errors import StateError
from unisono.loaders.fetching import WorkerPool
from unisono.loaders.parts import Cut, Cutter, Layer, Made, PartReader, StreamStart, check_layers, untouched
from unisono.loaders.resume import State
from unisono.loaders.sharding import Rule
from unisono.loaders.sources import Begun, LeftOut, Loaded, rounds_of_loaded
from unisono.randomness import seed_of

logger = logging.getLogger(__name__)


class StreamSource:
    """A DataLoader over an iterable dataset, epoch after epoch. The user's loader is not touched.

    Args:
        loader: the user's loader.
        rank, ranks: whose source this is.
        dim: the dimension along which the samples of a batch lie.
        seed: of what is random in loader workers; None takes the seed of the loader's generator, 0 without one.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, ranks: int, dim: int, seed: int | None) -> None:
        self._loader = loader
        self._rank, self._ranks, self._dim = rank, ranks, dim
        self._workers = max(loader.num_workers, 1)
        self.is_uneven = ranks > 1
        self.seed = seed if seed is not None else loader.generator.initial_seed() if loader.generator else 0
        self.length: int | None = None
        with suppress(TypeError):
            self.length = len(loader.dataset)  # type: ignore[arg-type]
        self.epoch = 0
        self._position: State = {"offset": 0}
        self._cell = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._pool: WorkerPool | None = None

    def begin(self, rule: Rule, left_out: LeftOut) -> Begun:
        """The next pass. The loader workers are started in the calling thread.

        Raises:
            ValueError: the global batch is smaller than the number of ranks.
            StateError: the state belongs to another number of ranks or workers, and the stream cannot be cut anew.
        """
        epoch, position = self.epoch, self._position
        dataset, by = self._cut_by_rank(rule, position.get("by"))
        cut = self._cut(by, epoch, position)
        size = self._loader.batch_size
        if size is not None and rule.split == "global" and self.is_uneven:
            size = _own_size(size, self._rank, self._ranks)
        reader = PartReader(dataset, self._loader.collate_fn, size, self._loader.drop_last, cut, self._cell)
        places = len(rule.kept)
        is_same = cut.layers[-1][:2] == tuple(position.get("layers", [[]])[-1][:2])
        lasts = position["last"] if is_same else [self._workers - 1] * self._ranks
        made = _Taken(self._made(reader, cut), cut, lasts, lambda samples: left_out(_spread(samples, places)))
        own = Rule(fixed_batch_size=rule.fixed_batch_size) if self.is_uneven else rule
        pieces = rounds_of_loaded(made, own, self._dim, left_out, position["offset"], made.position)
        self.epoch, self._position = epoch + 1, {"offset": 0}
        return Begun(epoch, {**position, **made.position(position["offset"], 0)}, pieces)

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """Let the next pass begin there.

        Raises:
            StateError: nothing tells what was taken of which part.
        """
        if position["offset"] and "layers" not in position:
            raise StateError("the state does not tell what was taken of which part: it is not that of a stream")
        self.epoch, self._position = epoch, position

    def next_position(self) -> tuple[int, State]:
        """The epoch and the position where the next pass begins."""
        return self.epoch, self._position

    def num_rounds(self, rule: Rule) -> int:
        """The number of rounds of a whole epoch, as the loader tells it. TypeError where the dataset has no length."""
        return rule.rounds_of(len(self._loader))

    def _cut_by_rank(self, rule: Rule, before: Cutter | None) -> tuple[Any, Cutter]:
        """The stream of this rank, and who cuts it: `before` began with this epoch."""
        dataset: Any = self._loader.dataset
        if rule.is_cut:
            return dataset, "caller"
        if self._ranks == 1 or before == "stride":
            return dataset, "stride"
        if getattr(dataset, "_distributed", None) is not None:  # by datasets.distributed.split_dataset_by_node
            return dataset, "dataset"
        for name in ("shard", "split"):
            method = getattr(dataset, name, None)
            if callable(method):
                try:
                    return _own_part(method, self._ranks, self._rank), "dataset"
                except Exception as error:
                    logger.info(
                        "%s.%s gives no part %d of %d (%s: %s), so it is cut by stride: every rank reads all of it",
                        type(dataset).__name__, name, self._rank, self._ranks, type(error).__name__, error,
                    )  # fmt: skip
        return dataset, "stride"

    def _cut(self, by: Cutter, epoch: int, position: State) -> Cut:
        here = untouched(self._ranks, self._workers)
        layers = tuple(Layer(ranks, workers, tuple(taken)) for ranks, workers, taken in position.get("layers", ()))
        cut = Cut(self._rank, self._ranks, self._workers, by, self.seed, epoch, layers or (here,))
        if not layers:
            return cut
        cut = replace(cut, layers_by=position["by"])
        if layers[-1][:2] != here[:2]:
            logger.info(
                "the stream was read in %d x %d parts; what is left is cut into %d x %d", *layers[-1][:2], *here[:2]
            )
            cut = replace(cut, layers=(*layers, here))
            check_layers(cut, "stride" if by == "stride" else by)
        else:
            cut = replace(cut, shift=(position["last"][self._rank] + 1) % self._workers)
            states = {int(part): state for part, state in position.get("states", {}).items()}
            if all(cut.part(worker) in states for worker in range(self._workers)):
                return replace(cut, states=states)
        if position["offset"]:
            logger.info(
                "rank %d resumes the stream by reading and dropping what was delivered before: the state holds no "
                "state_dict of its %s for these workers",
                self._rank, type(self._loader.dataset).__name__,
            )  # fmt: skip
        return cut

    def _made(self, reader: PartReader, cut: Cut) -> Iterator[Made]:
        if not self._loader.num_workers:
            return reader.made(cut)
        self._cell[0] = cut.epoch
        if self._pool is None or not self._loader.persistent_workers or any(map(any, (x.taken for x in cut.layers))):
            self._pool = WorkerPool(self._loader, reader, StreamStart(reader, cut, self._loader.worker_init_fn))
        return self._pool.serve(seed_of(self.seed, cut.epoch, "workers"))


class _Taken:
    """The batches of a pass as they are read, keeping account of what was taken of which part."""

    def __init__(self, made: Iterator[Made], cut: Cut, lasts: list[int], leave_out: Callable[[int], None]) -> None:
        self._made = made
        self._leave_out = leave_out
        self._layers = cut.layers[:-1]
        self._ranks, self._workers, taken = cut.layers[-1]
        self._rank = cut.rank
        self._taken = list(taken)
        self._lasts = lasts
        self._last = lasts[cut.rank]
        self._by: Cutter = cut.layers_by if any(map(any, (layer.taken for layer in cut.layers))) else cut.by
        self._states = dict(cut.states)
        self._mark: int | None = None

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Loaded:
        while True:
            made = next(self._made)
            if made.by == "stride" and made.mark:
                self._compare(made.mark)
            if made.is_left_out:
                self._leave_out(made.samples or 0)
                continue
            self._by = made.by
            self._taken[made.part] += made.samples or 1
            self._last = made.part % self._workers
            if made.state is not None:
                self._states[made.part] = made.state
            return made.batch, made.samples

    def position(self, offset: int, batches: int) -> State:
        """The position behind the last batch; of this rank's parts only."""
        last = list(self._lasts)
        last[self._rank] = self._last
        layers = [*self._layers, Layer(self._ranks, self._workers, tuple(self._taken))]
        return {
            "offset": offset,
            "by": self._by,
            "layers": [[layer.ranks, layer.workers, list(layer.taken)] for layer in layers],
            "last": last,
            "mark": self._mark,
            **({"states": dict(self._states)} if self._states else {}),
        }

    def _compare(self, mark: int) -> None:
        if self._mark is None:
            self._mark = mark
        elif mark != self._mark:
            raise RuntimeError(other_stream("loader workers"))


def is_stream(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether the loader is a DataLoader over an iterable dataset, and torch's own iterator reads it."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and isinstance(loader.dataset, IterableDataset)
    )


def _own_part(method: Callable[..., Any], ranks: int, rank: int) -> Any:
    """What `shard(num_shards, index)` or `split(num_parts)` of a dataset gives to a rank."""
    names = list(inspect.signature(method).parameters)
    if len(names) == 1:
        return list(method(ranks))[rank]
    if "num_shards" in names and "index" in names:
        return method(num_shards=ranks, index=rank)
    return method(ranks, rank)


def _own_size(size: int, rank: int, ranks: int) -> int:
    if size < ranks:
        raise ValueError(
            f"batch_size={size} with split='global' is too small for world_size={ranks}: every rank takes a part of "
            "each batch; pass a batch_size of at least that"
        )
    share, more = divmod(size, ranks)
    return share + (rank < more)


def _spread(samples: int, places: int) -> list[int]:
    share, more = divmod(samples, places)
    return [share + (place < more) for place in range(places)]


def other_stream(readers: str) -> str:
    """What is wrong where a stream that is cut by stride is not the same for all who read it."""
    return (
        f"the {readers} read different streams (their first samples differ), so cutting them by stride would lose some "
        "samples and repeat others; shuffle by the epoch (set_epoch), or with the global generators in loader workers, "
        "which are seeded alike; or let the dataset cut itself, by get_worker_info() or by shard(num_shards, index)"
    )
