"""The two stages of a parallel loader, each a thread body: the reader distributes rounds, a transfer moves batches.

    source --reader--> lane: inbox --transfer--> outbox --> the loop

A lane to a device to which nothing has to be moved has no transfer: the reader puts its batches directly into the
outbox.

The bounds apply per lane: to the number of loaded batches in its inbox, and to that of moved ones from the start of
their move until the loop takes them.

*Threads:* `unisono-reader` runs `read`, `unisono-transfer-K` runs `transfer` for lane K. They hold the pipeline and
the source, never the loader object that the user holds, so dropping that object ends them.

Invariants:
1. Every lane gets the same rounds, in order.
2. An error of the source, or of a transfer, closes the lane after the preceding batches, and keeps its type.
3. A lane whose loop has ended is cancelled: its batches are discarded, and the other lanes continue.
4. One thread may drain one lane after another, unless each lane has a thread of its own: while another lane is empty,
   a full one grows beyond its bounds.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from unisono.batches.virtual_ranks import Draw
from unisono.comm.outcome import Outcome, add_note_once, copy_error
from unisono.comm.thread_start import start_threads
from unisono.loading.channel import Channel, EndOfChannel
from unisono.loading.sharding import IN_ROUND, Claim, Piece
from unisono.loading.sources import Progress
from unisono.protocols import Backend
from unisono.report.timeline import MOVE, Timeline, Waits, waits_of

UNKNOWN = 2**62  # a step that was not seen
_EXIT_S = 5.0  # per thread; a source that blocks must not hold up the exit forever

_started: WeakSet[Pipeline] = WeakSet()


class Stamps(NamedTuple):
    """When the reader requested a round, when it received it, and when the lane had room for its piece; and when the
    batch had arrived and the loop began to wait for other ranks, if it did."""

    asked_at: int = 0
    loaded_at: int = 0
    sent_at: int = 0
    ready_at: int = 0

    def divide(self, began: int, ended: int) -> Waits:
        """Split the time that a loop waited for this round, in nanoseconds: for its peers until it was requested, and
        while the reader waited for room in their lanes; for the source in between; for the transfer; and for other
        ranks at the end."""
        if self.ready_at:
            ready = max(self.ready_at, began)
            source, transfer, peers = self._replace(ready_at=0).divide(began, ready)
            return waits_of((source, transfer, peers + ended - ready))
        asked, loaded, sent, _ = self
        if sent <= began:  # true for all batches of a loop that is slower than its loader
            return waits_of((0, ended - began, 0))
        asked, loaded, sent = max(asked, began), max(loaded, began), min(sent, ended)
        asked, loaded = min(asked, sent), min(loaded, sent)
        return waits_of((loaded - asked, ended - sent, asked - began + sent - loaded))


HERE = Stamps()  # if nothing is moved, all of a wait is for the source


class Delivery(NamedTuple):
    """A piece in a lane. Once its batch is on the device, the backend waits for `token`; the rest as in `Piece`."""

    batch: Any
    token: Any
    claim: Claim
    position: Any
    stamps: Stamps
    draw: Draw | None = None


_delivery = partial(tuple.__new__, Delivery)  # without a Python call


class Pace:
    """How long the steps of a loop take, in nanoseconds: the `last`, and the shortest of a pass, by which the next pass
    judges before it has had a step itself."""

    def __init__(self) -> None:
        self.last = self._shortest = UNKNOWN

    def begin(self) -> None:
        """A pass begins."""
        self.last, self._shortest = self._shortest, UNKNOWN

    def note(self, step: int) -> None:
        """A step has ended."""
        self.last, self._shortest = step, min(step, self._shortest)


class Lane:
    """The path of the batches to one device: `sent` were put into the `entry`, `received` were taken out. `is_direct`:
    nothing has to be moved, or the loop does it, so that the reader delivers batches itself.

    It does not reference the loop's world: that references the error that broke it, whose frames reference the loader,
    which would then never be garbage.
    """

    def __init__(self, pipeline: Pipeline, device: torch.device, backend: Backend, timeline: Timeline) -> None:
        self.device, self.backend, self.timeline = device, backend, timeline
        self.progress, self.pace = Progress(), Pace()
        self.sent = self.received = 0
        self._pipeline = pipeline
        self.is_direct = not backend.moves_in_background or backend.moves_in_loop
        self._most_moved = max(pipeline.prefetch // 2, 1)
        self._most_waiting = pipeline.prefetch
        if self.is_direct:  # as many as in both channels, with the one that would be moved
            self._most_waiting += self._most_moved + 1
        self.inbox: Channel[Delivery] = Channel(pipeline.lock, refill_at=self._most_waiting // 2)
        moved = self._most_waiting if self.is_direct else self._most_moved
        self.outbox: Channel[Delivery] = Channel(pipeline.lock, self._on_receipt, moved // 2)
        self.entry: Channel[Delivery] = self.outbox if self.is_direct else self.inbox

    def send(self, piece: Piece, asked_at: int, loaded_at: int) -> bool:
        """Put the piece of the next round in, waiting for room; return False if nothing is received here any more."""
        # Checked without the lock first: only this thread takes up room.
        if self.inbox.is_cancelled or not (self._has_room() or self.entry.wait_for_room(self._has_room)):
            return False
        # `asked_at` is 0 if no other lane can have held up the reader: `divide` then finds no time for peers.
        sent_at = perf_counter_ns() if asked_at else loaded_at
        stamps = Stamps(asked_at, loaded_at, sent_at)
        item = Delivery(piece.batch, None, piece.claim, piece.position, stamps, piece.draw)
        if self.is_direct and not self.backend.moves_in_loop:
            try:
                item = self.move(*item)
            except BaseException as error:
                self.fail(Outcome.failure(error))
                return False
        self.sent += 1
        return self.entry.send(item)

    def close(self, end: Outcome[None]) -> None:
        """Close the lane after the last round, with the end or the source's error."""
        # Each lane raises its own copy: two threads must never raise the same exception object.
        self.entry.close(end if end.error is None else Outcome.failure(copy_error(end.error)))

    def _has_room(self) -> bool:
        # Of two channels only the first: how many batches are moved ahead is bounded by the transfer.
        if len(self.entry) < self._most_waiting:
            return True
        return self._pipeline.may_overflow and any(lane.is_empty for lane in self._pipeline.lanes)

    def move(self, batch: Any, _: None, *rest: Any) -> Delivery:
        """Move a batch to the device, or start its move; the arguments are the fields of its delivery."""
        try:
            return _delivery((*self.backend.to_device(batch, self.device), *rest))
        except BaseException as error:
            add_note_once(error, f"while a batch was moved to {self.device}")
            raise

    def may_move(self) -> bool:
        """Whether there is room for another batch on the device. Called under the lock."""
        return len(self.outbox) < self._most_moved

    def fail(self, end: Outcome[None]) -> None:
        """End the lane where a batch cannot be moved: the loop gets those before it, then this error."""
        self.outbox.close(end)
        self.inbox.cancel()

    def receive(self) -> Delivery:
        """Return the next batch; as `Channel.receive`."""
        delivery = self.outbox.receive()
        if not self.backend.moves_in_loop:
            return delivery
        try:
            return self.move(*delivery)
        except BaseException:
            self.cancel()  # the loop does not go on without this batch
            raise

    @property
    def is_empty(self) -> bool:
        """Whether a loop that may still receive here would wait."""
        return self.sent == self.received and not self.inbox.is_cancelled

    def _on_receipt(self) -> None:
        self.received += 1
        if self._pipeline.may_overflow and self.is_empty:  # the reader may wait for room in another lane
            for lane in self._pipeline.lanes:
                lane.entry.room_bell.ring()

    def last_stamps(self) -> Stamps:
        """The stamps for a wait that ended without a round, because the source has ended."""
        return Stamps(self._pipeline.asked_at, perf_counter_ns(), perf_counter_ns())

    def cancel(self) -> None:
        """Discard this lane's batches from now on: no loop receives here any more."""
        self.inbox.cancel()
        self.outbox.cancel()


class Pipeline:
    """The lanes and threads of one pass over a source: `prefetch` loaded batches may wait per lane, and half as many
    moved ones, at least one. `may_overflow`: one thread may empty several lanes, one after another."""

    def __init__(self, prefetch: int, may_overflow: bool = False) -> None:
        self.prefetch = prefetch
        self.may_overflow = may_overflow
        self.lock = threading.Lock()
        self.lanes: list[Lane] = []
        self.threads: list[threading.Thread] = []
        self.asked_at = 0  # when the reader last requested a round; 0 while no lane can have waited for another

    def start(self, source: Iterator[list[Piece]]) -> None:
        """Start the threads; `source` yields one piece per lane and round."""
        bodies = [threading.Thread(target=read, args=(source, self), name="unisono-reader", daemon=True)]
        for place, lane in enumerate(self.lanes):
            if not lane.is_direct:
                name = f"unisono-transfer-{place}"
                bodies.append(threading.Thread(target=transfer, args=(lane,), name=name, daemon=True))
        self.threads = bodies
        # Before the start: after an interrupt within it, `_end_all` still finds the threads that run.
        _started.add(self)
        try:
            start_threads(bodies)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Wake all threads and let them end; from any thread, without waiting for them."""
        for lane in self.lanes:
            lane.cancel()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, at most `timeout_s` each; return whether all have ended."""
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                with suppress(RuntimeError):  # after an interrupted start, the thread may not have started
                    thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self.threads)


@atexit.register
def _end_all() -> None:
    """Wait at exit: a thread that is still in torch when the interpreter ends would abort the process."""
    # All are stopped before one is awaited, so that they end concurrently.
    for pipeline in list(_started):
        pipeline.stop()
    for pipeline in list(_started):
        pipeline.join(_EXIT_S)


def read(source: Iterator[list[Piece]], pipeline: Pipeline) -> None:
    """Body of the reader: distribute each round to the lanes, then close them with the end or the source's error."""
    lanes = pipeline.lanes
    round_number = lanes[0].sent  # the loop itself may have read some
    pieces: list[Piece] | None
    try:
        # Tensors that the dataset itself moves by `.cuda()` go to the loop's device.
        if len(lanes) == 1 and not lanes[0].backend.moves_in_loop:
            lanes[0].backend.activate(lanes[0].device)
        while (pieces := next(source, None)) is not None:
            loaded_at = perf_counter_ns()
            has_taker = False
            for lane, piece in zip(lanes, pieces, strict=True):
                # Not `or`, which would skip the lanes after the first that takes its piece.
                has_taker |= lane.send(piece, pipeline.asked_at, loaded_at)
            if not has_taker:
                break
            round_number += 1
            if len(lanes) > 1:
                pipeline.asked_at = perf_counter_ns()
        end: Outcome[None] = Outcome()
    except BaseException as error:
        end = Outcome.failure(error)
        add_note_once(error, IN_ROUND.format(round_number))
    pieces = None
    for lane in lanes:
        lane.close(end)
    del source, end, pieces  # an error's traceback references this frame, which must not keep the workers


def transfer(lane: Lane) -> None:
    """Body of a transfer: move each piece to the lane's device, then close the outbox as the inbox was closed."""
    inbox, outbox = lane.inbox, lane.outbox
    try:
        with lane.timeline.helper("transfer") as track:
            lane.backend.activate(lane.device)
            while True:
                loaded = inbox.receive()
                if not outbox.wait_for_room(lane.may_move):
                    break  # the lane is cancelled
                with track.span(MOVE):
                    delivery = lane.move(*loaded)
                del loaded  # else this thread would keep the batch alive while it waits for the next
                outbox.send(delivery)
                del delivery
    except EndOfChannel:
        outbox.close(Outcome())
    except BaseException as error:  # ClosedError too: it is the source's own, or no loop receives it
        lane.fail(Outcome.failure(error))
