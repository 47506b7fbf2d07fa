"""A pipeline over lanes of one backend, and the loops' ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from epochs import PATIENCE_S, CodedError, is_awaiting_room

from unisono.devices.cpu import CpuBackend
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.pipeline import Lane, Pipeline
from unisono.loading.sharding import Claim, Piece
from unisono.world import World, solo_world


class Moving(CpuBackend):
    """A family whose batches are moved by threads: to move batch k takes until `let(k)`, where it is held."""

    moves_in_background = True

    def __init__(self, held: Iterable[Any] = (), broken: Iterable[Any] = ()) -> None:
        self.begun: list[Any] = []
        self.done: list[Any] = []
        self.threads: set[str] = set()
        self._gates = {batch: threading.Event() for batch in held}
        self._broken = set(broken)
        self._changed = threading.Condition()

    def to_device(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        self._note(self.begun, batch)
        self.threads.add(threading.current_thread().name)
        if batch in self._gates:
            assert self._gates[batch].wait(PATIENCE_S)
        if batch in self._broken:
            raise CodedError(batch)
        self._note(self.done, batch)
        return batch, None

    def let(self, *batches: Any) -> None:
        for batch in batches:
            self._gates[batch].set()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S)

    def _note(self, found: list[Any], batch: Any) -> None:
        with self._changed:
            found.append(batch)
            self._changed.notify_all()


class Flow:
    """A pipeline over lanes of one backend, and the loops' ends."""

    def __init__(self, backend: CpuBackend, lanes: int = 1, prefetch: int = 8, may_overflow: bool = True) -> None:
        self.pipeline = Pipeline(prefetch, may_overflow)
        self.worlds: list[World] = [solo_world() for _ in range(lanes)]
        for place, world in enumerate(self.worlds):
            self.pipeline.lanes.append(Lane(self.pipeline, torch.device("cpu", place), backend, world.timeline))
        self.given = 0  # rounds that the source has given
        self._given = threading.Condition()

    @property
    def lane(self) -> Any:
        return self.pipeline.lanes[0]

    def start(self, batches: Iterable[Any]) -> list[DeviceIterator]:
        self.pipeline.start(self._rounds(iter(batches), len(self.worlds)))
        return [self.iterator(lane) for lane in self.pipeline.lanes]

    def iterator(self, lane: Any) -> DeviceIterator:
        return DeviceIterator([], lane, self.worlds[self.pipeline.lanes.index(lane)], lane.receive, None)

    def wait_given(self, count: int) -> None:
        with self._given:
            assert self._given.wait_for(lambda: self.given >= count, PATIENCE_S)

    def wait_full(self) -> None:
        """Until the reader waits for room in the first lane."""
        while not is_awaiting_room(self.lane.entry):
            threading.Event().wait(0.001)

    def _rounds(self, batches: Iterator[Any], count: int) -> Iterator[list[Piece]]:
        for number in itertools.count():
            pieces = [Piece(batch, Claim(1, count), number) for batch in itertools.islice(batches, count)]
            if not pieces:
                return
            with self._given:
                self.given += 1
                self._given.notify_all()
            yield pieces


@contextmanager
def flow(backend: CpuBackend, **options: Any) -> Iterator[Flow]:
    made = Flow(backend, **options)
    try:
        yield made
    finally:
        made.pipeline.stop()
        assert made.pipeline.join(PATIENCE_S)


def failing(count: int) -> Iterator[int]:
    yield from range(count)
    raise CodedError(count)
