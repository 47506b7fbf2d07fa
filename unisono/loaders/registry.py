"""Which source reads a user's loader. Each loader of this package counts its own epochs.

Nothing is set on the user's loader, which several may read: for training and for evaluation, for example.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from unisono.loaders.indexed import IndexedSource, is_indexed
from unisono.loaders.sources import Bookmark, ItemSource, PlainSource, Source
from unisono.loaders.streams import StreamSource, is_stream
from unisono.world import World

logger = logging.getLogger(__name__)

_bookmarks: weakref.WeakKeyDictionary[DataLoader[Any], weakref.ref[Bookmark]] = weakref.WeakKeyDictionary()


class Sources:
    """The sources of the DataLoaders that an owner of several passes has read, each kept as long as its DataLoader.

    So the epochs continue, and persistent workers stay, if each pass is made by a separate ParallelLoader. A
    DataLoader that its source holds (by a collate_fn that is its own method) is kept as long as this is.

    *Threads:* any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: weakref.WeakKeyDictionary[Any, dict[Hashable, Source]] = weakref.WeakKeyDictionary()

    def of(self, loader: Iterable[Any], world: World, dim: int, seed: int | None) -> Source:
        """Return the source that has read this loader before; a new one, if it is not a DataLoader."""
        if not is_indexed(loader) and not is_stream(loader):
            return source_of(loader, world, dim, seed)
        with self._lock:
            kept = self._kept.setdefault(loader, {})
            key = (world.rank, world.world_size, dim, seed)
            if key not in kept:
                kept[key] = source_of(loader, world, dim, seed)
            return kept[key]


def source_of(loader: Iterable[Any], world: World, dim: int, seed: int | None) -> Source:
    """Return a source for that rank's passes over a loader, whose batches are cut along `dim`, from epoch 0 on."""
    if is_stream(loader):
        return StreamSource(loader, world.rank, world.world_size, dim, seed)
    if not is_indexed(loader):
        return PlainSource(loader, dim, seed)
    indexed = IndexedSource(loader, seed)
    return ItemSource(indexed, dim) if loader.batch_sampler is None else indexed


def tell_of_repetition(loader: Iterable[Any], source: Source, bookmark: Bookmark) -> None:
    """Warn once that a pass begins at epoch 0 again, if the order depends on the epoch: its reader was created again.

    The reader is a loader over the same DataLoader, or another DataLoader over the same dataset. The repetition is
    detected only if the previous reader has been collected: it was created for one epoch. Two live readers each count
    their own epochs. There is no warning if one of the DataLoaders over a dataset reaches a later epoch, or if
    gradients are disabled.

    Args:
        source, bookmark: those of the loader whose pass is about to begin.
    """
    if not is_indexed(loader) and not is_stream(loader):
        return
    before = _bookmarks.get(loader)
    # A bookmark lives as long as the loaders that read by it, so its end shows theirs.
    _bookmarks[loader] = weakref.ref(bookmark)
    epoch, position = source.next_position()
    # The call comes first, since it also records this reader.
    is_made_again = _is_dataset_read_again(loader, source, bool(epoch)) or (before is not None and before() is None)
    if is_made_again and not epoch and not position["offset"] and source.order != "SequentialSampler":
        _say_repetition()


class _FirstEpochs:
    """The DataLoaders that began the last passes over a dataset, all of them in epoch 0: by seed, order and length.

    The dataset is referenced weakly and by identity: it need not be hashable, and equal datasets are distinct.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = weakref.ref(dataset, partial(_forget, id(dataset)))
        self.loaders: dict[Hashable, weakref.ref[DataLoader[Any]]] = {}


_first_epochs: dict[int, _FirstEpochs] = {}


def _forget(key: int, _: object) -> None:
    _first_epochs.pop(key, None)


def _is_dataset_read_again(loader: DataLoader[Any], source: Source, is_later: bool) -> bool:
    """Whether a DataLoader, collected since, began the previous pass over the same dataset in the same order.

    Args:
        is_later: whether the pass that begins now is a later epoch than 0, so that its reader does count epochs.
    """
    if not torch.is_grad_enabled():  # evaluation may repeat its order
        return False
    dataset: Any = loader.dataset
    while type(dataset) is Subset:  # a fold, created again like its DataLoader
        dataset = dataset.dataset
    try:
        # If the dataset is known, the new entry is discarded, and its weak reference never calls `_forget`.
        known = _first_epochs.setdefault(id(dataset), _FirstEpochs(dataset))
    except TypeError:  # a list, for example, which cannot be referenced weakly
        return False
    key = (source.seed, source.order, source.length)
    before = known.loaders.pop(key, None)
    if not is_later:
        known.loaders[key] = weakref.ref(loader)
    return before is not None and before() is None


@cache
def _say_repetition() -> None:
    logger.warning(
        "a DataLoader is read in the order of epoch 0 again, by another loader over it or over its dataset: each "
        "loader counts its own epochs; create one and loop over it again, or set its epoch by set_epoch"
    )
