"""Samplers of torch's and of one's own, and the order in which a loader follows them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from epochs import Numbers
from torch.utils.data import DataLoader, Sampler

from unisono.loading.indexed import IndexedSource
from unisono.loading.sharding import Rule

COUNT = 30


class Own(Sampler):
    """A sampler of one's own: gives what `draw()` returns."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


class Sized(Own):
    def __len__(self) -> int:
        return COUNT


def orders(loader: DataLoader, epochs: int, seed: int | None = None, most: int | None = None) -> list[list[int]]:
    """The samples of a few epochs, each up to a number."""
    source = IndexedSource(loader, seed)
    found = []
    for _ in range(epochs):
        pieces = source.begin(Rule()).pieces
        found.append(list(itertools.islice((each for (piece,) in pieces for each in piece.batch.tolist()), most)))
    return found


def loader_of(sampler: Any, batch_size: int = 4) -> DataLoader:
    return DataLoader(Numbers(COUNT), sampler=sampler, batch_size=batch_size)


def random_states() -> list[Any]:
    _, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest]
