"""The two stages behind a parallel loader, each a thread body: the reader deals rounds, a transfer moves batches.

    source --reader--> inbox (one per lane) --transfer--> outbox (one per lane) --> the loop

*Threads:* `unisono-reader` runs `read`, `unisono-transfer-K` runs `transfer` for lane K. They hold the pipeline and the
source, never the loader object that the user holds, so dropping that object ends them.

Invariants:
1. Every lane gets the same rounds, in order.
2. An error of the source, or of a transfer, closes the lane behind what was dealt before it, in its own type.
3. A lane whose loop has ended is cancelled: its batches fall away, and the other lanes go on.
4. One thread may drain one lane after another, and a loop may be left. A full lane grows beyond its bound while
   another lane waits, if the only thread that empties the full one is that waiter, or no iterator is left for it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from unisono.loaders.channel import Channel, EndOfChannel
from unisono.loaders.resume import Progress
from unisono.loaders.sharding import Claim, Piece
from unisono.outcome import Outcome, copy_error
from unisono.protocols import Backend
from unisono.timeline import MOVE, Track
from unisono.world import World

OTHER = 0  # no thread's identifier: a thread that is still to come

_EXIT_S = 5.0

_started: WeakSet[Pipeline] = WeakSet()


class Delivery(NamedTuple):
    """A batch on its device: `token` is what its backend waits for, the rest as in `Piece`."""

    batch: Any
    token: Any
    claim: Claim
    position: Any


class Lane:
    """The way of the batches to one device, for a loop that runs in `world`."""

    def __init__(
        self, pipeline: Pipeline, device: torch.device, backend: Backend, world: World, has_own_thread: bool
    ) -> None:
        self.device = device
        self.backend = backend
        self.world = world
        self.owner: int | None = OTHER if has_own_thread else None  # the thread that last received here
        self.waiter: int | None = None  # the thread that waits here with nothing on its way
        self.iterators: set[int] = set()  # the ids of those that receive here
        self.progress = Progress()
        self._pipeline = pipeline
        self.inbox: Channel[Piece] = Channel(pipeline.loader_prefetch_size, pipeline.lock, self._may_overflow)
        self.outbox: Channel[Delivery] = Channel(pipeline.device_prefetch_size, pipeline.lock)

    def receive(self) -> Delivery:
        """The next batch; as `Channel.receive`."""
        self.owner = threading.get_ident()
        try:
            return self.outbox.receive(self._start_waiting)
        finally:
            self.waiter = None

    def leave(self, iterator: int) -> None:
        """That iterator is gone; from any thread, at any moment."""
        self.iterators.discard(iterator)
        self.inbox.wake_sender_unlocked()

    def cancel(self) -> None:
        """No one receives here any more."""
        self.inbox.cancel()
        self.outbox.cancel()

    def _start_waiting(self) -> None:
        self.waiter = threading.get_ident()
        for lane in self._pipeline.lanes:
            lane.inbox.wake_sender()

    def _may_overflow(self) -> bool:
        waiters = [lane.waiter for lane in self._pipeline.lanes if lane is not self and not lane.inbox]
        return any(waiter is not None and (self.owner in (None, waiter) or not self.iterators) for waiter in waiters)


class Pipeline:
    """The lanes and threads of one pass over a source."""

    def __init__(self, loader_prefetch_size: int, device_prefetch_size: int) -> None:
        self.loader_prefetch_size = loader_prefetch_size
        self.device_prefetch_size = device_prefetch_size
        self.lock = threading.Lock()
        self.lanes: list[Lane] = []
        self.threads: list[threading.Thread] = []

    def add_lane(self, device: torch.device, backend: Backend, world: World, has_own_thread: bool) -> None:
        """One lane more, before the start; `has_own_thread` when a thread of its own will empty it."""
        self.lanes.append(Lane(self, device, backend, world, has_own_thread))

    def start(self, source: Iterator[list[Piece]]) -> None:
        """Start the threads; `source` yields one piece per lane and round."""
        bodies = [threading.Thread(target=read, args=(source, self), name="unisono-reader", daemon=True)]
        for number, lane in enumerate(self.lanes):
            name = f"unisono-transfer-{number}"
            bodies.append(threading.Thread(target=transfer, args=(lane,), name=name, daemon=True))
        self.threads = bodies
        _started.add(self)
        for thread in bodies:
            thread.start()

    def stop(self) -> None:
        """Wake everybody and let the threads end; from any thread, waits for none."""
        for lane in self.lanes:
            lane.cancel()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, each `timeout_s` at most; whether all have ended."""
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self.threads)


@atexit.register
def _end_all() -> None:
    """A thread that is still in torch when the interpreter ends would abort the process."""
    for pipeline in list(_started):
        pipeline.stop()
    for pipeline in list(_started):
        pipeline.join(_EXIT_S)


def read(source: Iterator[list[Piece]], pipeline: Pipeline) -> None:
    """Body of the reader: deal each round to the lanes, then close them with the end or with the source's error."""
    round_number = 0
    lanes = pipeline.lanes
    try:
        for pieces in source:
            has_taker = False
            for lane, piece in zip(lanes, pieces, strict=True):
                has_taker |= lane.inbox.send(piece)
            if not has_taker:
                break
            round_number += 1
        end: Outcome[None] = Outcome()
    except BaseException as error:
        end = Outcome.failure(error)
        error.add_note(f"in the loader's reader, round {round_number}")
    for lane in lanes:
        lane.inbox.close(end if end.error is None else Outcome.failure(copy_error(end.error)))
    del source, end  # an error's traceback holds this frame, which must not hold the error and the loader's workers


def transfer(lane: Lane) -> None:
    """Body of a transfer: move each piece to the lane's device, then close the outbox as the inbox was closed."""
    end: Outcome[None] = Outcome()
    try:
        with lane.world.timeline.helper("transfer") as track:
            lane.backend.activate(lane.device)
            while lane.outbox.send(_move(lane, lane.inbox.receive(), track)):
                pass
    except EndOfChannel:
        pass
    except BaseException as error:  # ClosedError too: it is the source's own, or no one receives it
        end = Outcome.failure(error)
    lane.outbox.close(end)
    del end  # as in `read`


def _move(lane: Lane, piece: Piece, track: Track) -> Delivery:
    try:
        with track.span(MOVE):
            batch, token = lane.backend.to_device(piece.batch, lane.device)
    except BaseException as error:
        error.add_note(f"while a batch was moved to {lane.device}")
        raise
    return Delivery(batch, token, piece.claim, piece.position)
