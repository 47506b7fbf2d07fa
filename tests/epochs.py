"""Datasets of numbers, what the ranks of a process are given of them, and the threads and processes that read them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from unisono import DeviceLoader
from unisono.loading.channel import Channel
from unisono.loading.indexed import IndexedSource
from unisono.loading.pipeline import Lane
from unisono.loading.sharding import Piece, Rule
from unisono.world import World, thread_worlds

PATIENCE_S = 60.0


class CodedError(Exception):
    """Has another `__init__` than it keeps arguments."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def own_threads() -> list[threading.Thread]:
    """Those that this package runs now."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("unisono-")]


def join_own_threads() -> None:
    """Wait until they have ended."""
    for thread in own_threads():
        thread.join(PATIENCE_S)
    assert not own_threads()


def loader_workers() -> list[psutil.Process]:
    """Those of this process."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "pt_data_worker":
                found.append(child)
    return found


class Numbers(Dataset):
    """Sample i is the number i; it counts what is asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return int(index)


class Killed(Numbers):
    """Who loads sample 21 is killed."""

    def __getitem__(self, index: int) -> int:
        if index == 21:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Bucketed:
    """A batch sampler of one's own, with batches of several sizes."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Delivery(NamedTuple):
    """A batch and how many of its samples count."""

    batch: list[int]
    valid: int

    @property
    def counted(self) -> list[int]:
        return self.batch[: self.valid]


class Dealt(NamedTuple):
    """One epoch, as all ranks were given it."""

    pieces: list[list[Piece]]

    @property
    def rounds(self) -> list[list[Delivery]]:
        """Each round's deliveries, by rank."""
        assert len({len(each) for each in self.pieces}) == 1, "every rank makes the same number of steps"
        return [
            [Delivery(piece.batch.tolist(), piece.claim.samples) for piece in pieces]
            for pieces in zip(*self.pieces, strict=True)
        ]

    @property
    def global_batches(self) -> list[list[int]]:
        return [list(itertools.chain(*(each.counted for each in dealt))) for dealt in self.rounds]


def is_awaiting_room(channel: Channel[Any]) -> bool:
    """Whether the sender waits for room there, or is about to."""
    return channel.room_bell.expected > 0


def is_awaiting_item(channel: Channel[Any], threads: int = 1) -> bool:
    """Whether so many receivers wait there, or are about to."""
    return channel.item_bell.expected >= threads


def is_awaiting_batch(lane: Lane) -> bool:
    """Whether a loop waits there for a batch, or is about to."""
    return is_awaiting_item(lane.outbox)


def worlds(count: int) -> list[World]:
    return thread_worlds([torch.device("cpu", rank) for rank in range(count)])


def dealt(loader: DataLoader, count: int, seed: int | None = None, **rule: Any) -> Dealt:
    """One epoch of a map-style loader as `count` ranks take it, one rank after another and without any thread."""
    begun = [IndexedSource(loader, seed).begin(Rule(count, (rank,), **rule)) for rank in range(count)]
    return Dealt([[piece for (piece,) in each.pieces] for each in begun])


def ranks_of(loader: Any, count: int, **options: Any) -> list[DeviceLoader]:
    """Each rank's loader over the same one."""
    return [DeviceLoader(loader, world=world, **options) for world in worlds(count)]


def take(loader: DeviceLoader, most: int | None = None) -> list[Delivery]:
    """What a loop gets that is left after `most` batches, or goes to its end."""
    found = []
    iterator = iter(loader)
    for batch in itertools.islice(iterator, most):
        values = batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)
        found.append(Delivery(values, iterator.valid_samples))
    return found


def counted(each_ranks: Sequence[Sequence[Delivery]]) -> list[int]:
    """The samples that count, round by round and in each by rank."""
    in_order = zip(*each_ranks, strict=True)
    return [sample for deliveries in in_order for each in deliveries for sample in each.counted]


def chunks(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[start : start + size]) for start in range(0, len(order), size)]
