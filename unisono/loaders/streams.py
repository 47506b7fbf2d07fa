"""A DataLoader over an iterable dataset: each rank, and each of its loader workers, reads its own part of the stream.

The stream is cut into parts by the first of these that can:
1. the caller: with `already_sharded=True` every rank and every worker reads its stream unchanged;
2. the dataset's own `shard` or `split` method, into one part for each rank; for a streamed dataset of HuggingFace's
   `datasets`, its `split_dataset_by_node`;
3. the dataset itself, if it asks `torch.utils.data.get_worker_info()` for the number of workers before it yields its
   first sample: the answer counts the workers of all ranks as one row;
4. the stride: part p of P takes the samples p, P + p, 2P + p, ... of the stream that all of them read.

The stride assumes that all parts read the same stream. So the workers' random number generators are seeded alike, and
the parts' first samples are compared.

*Threads:* the reader's; `stream_parts.py` runs in loader workers.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeGuard, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset

from unisono.errors import StateError
from unisono.loaders.resume import State
from unisono.loaders.sharding import Rule
from unisono.loaders.sources import Begun, LeftOut, Loaded, rounds_of_loaded
from unisono.loaders.stream_parts import (
    Cut,
    Cutter,
    Layer,
    Made,
    PartReader,
    Read,
    StreamStart,
    Trail,
    check_layers,
    count_reads,
    untouched,
)
from unisono.loaders.workers import WorkerPool
from unisono.randomness import seed_of

logger = logging.getLogger(__name__)


class StreamSource:
    """A DataLoader over an iterable dataset, epoch after epoch. The user's loader is not modified.

    *Threads:* several may begin a pass.

    Args:
        loader: the user's loader. It is not kept alive: the caller of `begin` holds it.
        rank, ranks: the rank that reads from this source, and the number of ranks.
        dim: the sample dimension of a batch.
        seed: for the generators of loader workers; None uses the seed of the loader's generator, or 0 if it has none.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, ranks: int, dim: int, seed: int | None) -> None:
        self._loader = weakref.ref(loader)
        self._rank, self._ranks, self._dim = rank, ranks, dim
        self._workers = max(loader.num_workers, 1)
        self.is_uneven = ranks > 1
        self.seed = seed if seed is not None else loader.generator.initial_seed() if loader.generator else 0
        self.length: int | None = None
        with suppress(TypeError, NotImplementedError):
            self.length = len(loader.dataset)  # type: ignore[arg-type]
        self.order: str | None = None
        self.epoch = 0
        self._position: State = {"offset": 0}
        self._begins = threading.Lock()
        self._persistent: tuple[Any, WorkerPool, torch.Tensor] | None = None

    def begin(self, rule: Rule, left_out: LeftOut) -> Begun:
        """Begin the next pass. The loader workers are started in the calling thread.

        Raises:
            ValueError: the global batch is smaller than the number of ranks.
            StateError: the state was saved with another number of ranks or workers, and the stream cannot be cut again.
            BusyError: the loader's persistent workers serve another pass.
        """
        with self._begins:
            epoch, position, loader = self.epoch, self._position, self._require_loader()
            dataset, by = self._cut_by_rank(loader.dataset, rule, position.get("by"))
            cut = self._cut(by, epoch, position)
            size = loader.batch_size
            if size is not None and rule.shares_batches and self.is_uneven and not rule.is_cut:
                size = _own_size(size, self._rank, self._ranks)
            drop_last = loader.drop_last or rule.policy.leaves_out
            made = self._make_batches(loader, PartReader(dataset, loader.collate_fn, size, drop_last, cut))
            self.epoch, self._position = epoch + 1, {"offset": 0}
        places = len(rule.kept)
        whole = size if rule.policy.refuses and not loader.drop_last else None
        taken = _Taken(made, cut, position, lambda samples: left_out(_share_sizes(samples, places)), whole)
        own = Rule() if self.is_uneven else rule  # the ranks' rounds are made in lockstep
        full = size if rule.policy.fills else None
        pieces = rounds_of_loaded(taken, own, self._dim, left_out, position["offset"], taken.position, full)
        return Begun(epoch, taken.position(position["offset"]), pieces, full)

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """Let the next pass begin at `position` in `epoch`.

        Raises:
            StateError: the position does not say how much was read of each part.
        """
        if position["offset"]:
            check_stream(position)
        self.epoch, self._position = epoch, position if position["offset"] else {"offset": 0}

    def next_position(self) -> tuple[int, State]:
        """The epoch and the position where the next pass begins."""
        return self.epoch, self._position

    def num_rounds(self, rule: Rule) -> int:
        """The number of rounds of a whole epoch, from the loader's length. TypeError if the dataset has no length."""
        return rule.rounds_of(len(self._require_loader()))

    def _require_loader(self) -> DataLoader[Any]:
        loader = self._loader()
        assert loader is not None
        return loader

    def _cut_by_rank(self, dataset: Any, rule: Rule, before: Cutter | None) -> tuple[Any, Cutter]:
        """This rank's stream, and what cuts it; `before` is what cut it at the beginning of this epoch."""
        if rule.is_cut:
            return dataset, "caller"
        # An epoch begun by stride goes on by stride: parts that the dataset cuts hold other samples.
        if self._ranks == 1 or before == "stride":
            return dataset, "stride"
        if getattr(dataset, "_distributed", None) is not None:  # by datasets.distributed.split_dataset_by_node
            return dataset, "dataset"
        if hasattr(dataset, "_distributed") and type(dataset).__module__.startswith("datasets."):
            by_node: Any = import_module("datasets.distributed")  # `shard` leaves ranks empty if files are few
            return by_node.split_dataset_by_node(dataset, self._rank, self._ranks), "dataset"
        if cuts_by_node(dataset, self._rank, self._ranks):
            return dataset, "dataset"
        for name in ("shard", "split"):
            if callable(method := getattr(dataset, name, None)):
                try:
                    return _own_part(name, method, self._ranks, self._rank), "dataset"
                except Exception as error:
                    logger.warning(
                        ("%s.%s gives no part %d of %d (%s: %s), so it is sharded by stride: every rank reads "
                        "all of it"),
                        type(dataset).__name__, name, self._rank, self._ranks, type(error).__name__, str(error),
                    )  # fmt: skip
        return dataset, "stride"

    def _cut(self, by: Cutter, epoch: int, position: State) -> Cut:
        here = untouched(self._ranks, self._workers)
        cut = Cut(self._rank, self._ranks, self._workers, by, self.seed, epoch, (here,))
        if not position["offset"]:
            return cut
        layers = tuple(Layer(ranks, workers, tuple(taken)) for ranks, workers, taken in position["layers"])
        cut = replace(cut, layers=layers, layers_by=position["by"])
        if layers[-1][:2] != here[:2]:
            logger.info(
                "the stream was read in %d x %d parts; what is left is cut into %d x %d", *layers[-1][:2], *here[:2]
            )
            cut = replace(cut, layers=(*layers, here))
            check_layers(cut, by)
        else:
            states = {int(part): state for part, state in position.get("states", {}).items()}
            # Workers deliver in turn, worker 0 first: with the part after the last delivered one, it keeps the order.
            cut = replace(cut, states=states, shift=(position["last"][self._rank] + 1) % self._workers)
        if any(cut.is_begun(part) and part not in cut.states for part in map(cut.part, range(self._workers))):
            logger.warning(
                "rank %d resumes the stream by reading and discarding what was delivered before: the state holds no "
                "state_dict of its dataset for these workers",
                self._rank,
            )
        return cut

    def _make_batches(self, loader: DataLoader[Any], reader: PartReader) -> Iterator[Made]:
        cut = reader.cut
        if not loader.num_workers:
            return reader.made(cut)
        key = cut.by, reader.size
        if self._persistent is None or self._persistent[0] != key or cut.is_resumed:
            pool = WorkerPool(loader, reader, StreamStart(reader, loader.worker_init_fn))
            is_kept = loader.persistent_workers and not cut.is_resumed  # a resumed pass has other parts
            self._persistent = (key, pool, reader.cell) if is_kept else None
            cell = reader.cell
        else:
            _, pool, cell = self._persistent
        return pool.serve(seed_of(cut.seed, cut.epoch, "workers"), before=lambda: cell.fill_(cut.epoch))


class _Taken:
    """The batches of a pass as they are read, and the position after them. It counts only this rank's parts."""

    def __init__(
        self, made: Iterator[Made], cut: Cut, start: State, leave_out: Callable[[int], None], whole: int | None
    ) -> None:
        self._make_batches = made
        self._whole = whole  # the size that every batch must have
        self._leave_out = leave_out
        self._workers = cut.workers
        is_same = cut.is_resumed and len(start["layers"]) == len(cut.layers)
        self._position: State = {
            "by": cut.layers_by if cut.is_resumed else cut.by,
            "layers": [[layer.ranks, layer.workers, list(layer.taken)] for layer in cut.layers],
            # At a beginning, as if the last worker had just delivered, so that worker 0 is next.
            "last": start["last"] if is_same else [cut.workers - 1] * cut.ranks,
            "mark": start.get("mark") if cut.is_resumed else None,
            **({"states": dict(cut.states)} if cut.states else {}),
        }
        self._is_shared = cut.ranks > 1
        self._is_saved = self._position["mark"] is not None
        self._read: Read | None = None  # the last one
        self._trails: dict[int, Trail] = {}  # the most recent ones of all parts, by the number of rows

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Loaded:
        while True:
            made = next(self._make_batches)
            if made.trail is not None:
                self._compare(made.trail)
            if made.is_left_out:
                self._leave_out(made.samples or 0)
                continue
            if self._whole is not None and made.samples != self._whole:
                raise ValueError(
                    f"tail='error': part {made.part} of the stream ends with {made.samples} samples, where batches of "
                    f"{self._whole} are wanted; pass tail='split' (the default), 'drop' or 'pad'"
                )
            # Without a number of samples, the batch is one item of the stream, which counts items.
            self._read = Read(made.part, made.samples or 1, made.trail)
            self._position = {**count_reads(self._position, [self._read]), "by": made.by}
            if made.state is not None:
                self._position["states"] = {**self._position.get("states", {}), made.part: made.state}
            return made.batch, made.samples

    def position(self, offset: int, *_: int) -> State:
        """The position after the last batch; with several ranks also what that has read, for `Lockstep`."""
        return {"offset": offset, **self._position, **({"read": self._read} if self._read and self._is_shared else {})}

    def _compare(self, trail: Trail) -> None:
        """Check that this part's reader has read the same stream as the others', and as was read before the state."""
        known = self._position["mark"] = self._position["mark"] or trail.first
        if trail.first != known and self._is_saved:
            raise StateError(
                "the state was saved over another stream: the first samples differ; load it over the same data, in the "
                "same order"
            )
        if trail.first != known or self._trails.setdefault(trail.rows, trail) != trail:
            raise RuntimeError(other_stream("loader workers"))
        if len(self._trails) > 2 * self._workers:
            del self._trails[next(iter(self._trails))]


def check_stream(position: State) -> None:
    """Check that `position` is a position in a stream.

    Raises:
        StateError: it does not say how much was read of each part.
    """
    try:
        layers = [Layer(ranks, workers, tuple(taken)) for ranks, workers, taken in position["layers"]]
        is_right = all(len(each.taken) == each.ranks * each.workers and min(each.taken) >= 0 for each in layers)
        is_right = is_right and len(position["last"]) == layers[-1].ranks and position["by"] in get_args(Cutter)
    except (KeyError, TypeError, ValueError, IndexError):
        is_right = False
    if not is_right:
        raise StateError("the state does not say what was read of which part: it is not the state of a stream")


def is_stream(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether the loader is a DataLoader over an iterable dataset, read by torch's own iterator or by torchdata's.

    The state of torchdata's own loader could not be loaded with another number of ranks or loader workers.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader).__iter__ is DataLoader.__iter__ or type(loader).__module__.startswith("torchdata.")


def cuts_by_node(dataset: Any, rank: int, ranks: int) -> bool:
    """Whether it is a webdataset pipeline that splits its shards by node, and sees this process as `rank` of `ranks`.

    webdataset finds the rank itself, so its answer is compared.
    """
    stages = getattr(dataset, "pipeline", ())
    if not type(dataset).__module__.startswith("webdataset.") or not isinstance(stages, list | tuple):
        return False
    webdataset: Any = import_module("webdataset")
    splits = any(stage is webdataset.split_by_node for stage in stages)
    return splits and webdataset.utils.pytorch_worker_info()[:2] == (rank, ranks)


def _own_part(name: str, method: Callable[..., Any], ranks: int, rank: int) -> Any:
    """The part that `shard(num_shards, index)` or `split(n)` of a dataset returns for a rank.

    Raises:
        TypeError: its parameters have other names, or the part is not iterable.
        ValueError: it returns another number of parts.
    """
    # By name: under other names the numbers may mean something else, such as the fraction for validation.
    if name == "shard":
        part = method(num_shards=ranks, index=rank)
    else:
        parts = list(method(n=ranks))
        if len(parts) != ranks:
            raise ValueError(f"it gave {len(parts)} parts")
        part = parts[rank]
    if not isinstance(part, Iterable):
        raise TypeError(f"it gave a {type(part).__name__}")
    return part


def _own_size(size: int, rank: int, ranks: int) -> int:
    if size < ranks:
        raise ValueError(
            f"batch_size={size} with split='global' is too small for world_size={ranks}: every rank takes a part of "
            "each batch; pass a batch_size of at least that number"
        )
    return _share_sizes(size, ranks)[rank]


def _share_sizes(samples: int, places: int) -> list[int]:
    share, more = divmod(samples, places)
    return [share + (place < more) for place in range(places)]


def other_stream(readers: str) -> str:
    """The error message for a stream that is cut by stride but is not the same for all `readers`."""
    return (
        f"the {readers} read different streams (their samples differ), so cutting them by stride would lose some "
        "samples and repeat others; shuffle by the epoch (set_epoch), or with the global generators in loader workers "
        "(num_workers=1), which are seeded alike; or let the dataset cut itself, by get_worker_info() or by "
        "shard(num_shards, index); where each has its own part already, pass already_sharded=True"
    )
