"""Which source reads a user's loader. Each loader of this package counts its own epochs; the user's is not changed."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.weak import WeakIdKeyDictionary

from unisono.loading.indexed import IndexedSource
from unisono.loading.sources import ItemSource, PlainSource, Source, makes_batches_alike
from unisono.loading.streams import StreamSource
from unisono.world import World

logger = logging.getLogger(__name__)

_first = WeakIdKeyDictionary()
"""By dataset: the seed of the source that was the last to begin epoch 0, and a weak reference to the source."""


class Sources:
    """The sources of the DataLoaders that an owner of several passes has read, each kept as long as its DataLoader. So
    the epochs continue, and persistent workers stay, if each pass is made by a separate ParallelLoader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: weakref.WeakKeyDictionary[Any, dict[Hashable, Source]] = weakref.WeakKeyDictionary()

    def of(self, loader: Iterable[Any], world: World, dim: int, seed: int | None) -> Source:
        """Return the source that has read this loader before; a new one, if it is not a DataLoader."""
        if not makes_batches_alike(loader):
            return source_of(loader, world, dim, seed)
        with self._lock:
            kept = self._kept.setdefault(loader, {})
            key = (world.rank, world.world_size, dim, seed)
            if key not in kept:
                kept[key] = source_of(loader, world, dim, seed)
            return kept[key]


def source_of(loader: Iterable[Any], world: World, dim: int, seed: int | None) -> Source:
    """Return a source for that rank's passes over a loader, whose batches are cut along `dim`, from epoch 0 on."""
    if not makes_batches_alike(loader):
        return PlainSource(loader, dim, seed)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, world.rank, world.world_size, dim, seed)
    indexed = IndexedSource(loader, seed, dim)
    return ItemSource(indexed, dim) if loader.batch_sampler is None else indexed


def check_order(loader: Any, world: World) -> None:
    """ValueError for a loader of spdl's whose batches come in the order of completion, which differs from rank to rank:
    each rank reads all and keeps its share."""
    threads = max(getattr(loader, name, 1) for name in ("_num_threads", "_num_workers"))
    is_of_completion = getattr(loader, "_output_order", "input") == "completion" and threads > 1
    if world.world_size > 1 and is_of_completion and type(loader).__module__.startswith("spdl."):
        raise ValueError(
            f"this {type(loader).__name__} delivers each batch as soon as one of its {threads} threads completes it, "
            "in an order that differs by rank, so dealing them out would lose some and repeat others; pass "
            "output_order='input' (in_order=True), or, if its source gives each rank a part of its own, "
            "DeviceLoader(loader, already_sharded=True)"
        )


def warn_of_repetition(loader: Iterable[Any], source: Source) -> None:
    """Warn once that a pass over a shuffled dataset begins at epoch 0, as did that of another source, which is gone:
    its loader was made again for each epoch. Evaluation may repeat its order."""
    if not makes_batches_alike(loader) or source.order == "SequentialSampler" or not torch.is_grad_enabled():
        return
    epoch, position = source.next_position()
    with suppress(TypeError):  # of a list, of which there are no weak references
        seed, before = _first.pop(loader.dataset, (None, None))
        if epoch != 0:
            return
        _first[loader.dataset] = source.seed, weakref.ref(source)
        if before is not None and before() is None and seed == source.seed and not position["offset"]:
            say_repetition()


@cache
def say_repetition() -> None:
    logger.warning(
        "a shuffled dataset is read in the order of epoch 0 again, by another loader over it: each loader counts its "
        "own epochs; make and prepare one before the loop over epochs, or set its epoch, loader.set_epoch(epoch)"
    )
