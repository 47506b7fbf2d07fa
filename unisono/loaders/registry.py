"""Which source reads a user's loader. Those of DataLoaders are kept as long as the loader is.

So the epochs of a DataLoader go on from one pass to the next, whichever object makes the pass, and its persistent
workers stay.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

from torch.utils.data import DataLoader

from unisono.loaders.indexed import IndexedSource, is_indexed
from unisono.loaders.sources import ItemSource, PlainSource, Source
from unisono.loaders.streams import StreamSource, is_stream
from unisono.world import World

_lock = threading.Lock()
_NAME = "_unisono_sources"


class _Kept(dict[Hashable, Source]):
    """The sources of a loader. They hang on it: what they hold of it (a collate_fn that is its own method) is then
    garbage when it is. A copy of the loader, or a pickled one, begins without."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__()
        self.loader = weakref.ref(loader)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def source_of(loader: Iterable[Any], world: World, dim: int, seed: int | None) -> Source:
    """The source of that rank's passes over a loader, whose batches are cut along `dim`."""
    if not is_indexed(loader) and not is_stream(loader):
        return PlainSource(loader, dim, seed)
    with _lock:
        kept = getattr(loader, _NAME, None)
        if kept is None or kept.loader() is not loader:
            kept = _Kept(loader)
            setattr(loader, _NAME, kept)
        key = (world.rank, world.world_size, dim, seed)
        if key not in kept:
            kept[key] = _made(loader, world, dim, seed)
        source: Source = kept[key]
        return source


def _made(loader: DataLoader[Any], world: World, dim: int, seed: int | None) -> Source:
    if not is_indexed(loader):
        return StreamSource(loader, world.rank, world.world_size, dim, seed)
    indexed = IndexedSource(loader, seed)
    return ItemSource(indexed, dim) if loader.batch_sampler is None else indexed
