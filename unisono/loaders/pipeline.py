"""The two stages of a parallel loader, each a thread body: the reader distributes rounds, a transfer moves batches.

    source --reader--> lane: n conveyors, each inbox --transfer--> outbox --> the loop

Round k of a lane travels on its conveyor k mod n, and its loop receives from conveyor k mod n: so several transfers
may run concurrently, and the order holds by construction. A lane to a device to which nothing has to be moved has no
transfer: the reader puts its batches directly into the outbox.

The pipeline owns the lanes and the threads. The bounds apply per lane, over all of its conveyors: to the number of
loaded batches in its inboxes, to the number of moved ones from the start of their move until the loop takes them, and
to the bytes of both.

*Threads:* `unisono-reader` runs `read`, `unisono-transfer-K` (`-K-J` for conveyor J, from 1 on) runs `transfer` for
lane K. They hold the pipeline and the source, never the loader object that the user holds, so dropping that object
ends them.

Invariants:
1. Every lane gets the same rounds, in order.
2. An error of the source, or of a transfer, closes the lane after the preceding batches, and keeps its type.
3. A lane whose loop has ended is cancelled: its batches are discarded, and the other lanes continue. Batches after one
   that could not be moved are discarded, too.
4. One thread may drain one lane after another, and a loop may be left. A full lane grows beyond its bounds while
   another lane waits, if the only thread that empties the full one is that waiter, or no iterator is left for it.
5. A batch that is larger than the bound on bytes is admitted when its lane is empty. Since, in addition, batches are
   moved in the order of their rounds, the batch that the loop waits for always has room.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from unisono.comm.thread_start import start_threads
from unisono.loaders.channel import Channel, EndOfChannel
from unisono.loaders.resume import Progress
from unisono.loaders.sharding import Claim, Piece
from unisono.outcome import Outcome, copy_error
from unisono.protocols import Backend
from unisono.timeline import MOVE, Timeline, Waits
from unisono.tree import nbytes

OTHER = 0  # no thread's identifier: stands for a thread that has not received here yet

_EXIT_S = 5.0  # per thread; a source that blocks must not hold up the exit forever

_started: WeakSet[Pipeline] = WeakSet()


class Stamps(NamedTuple):
    """The times when the reader requested a round, when it received it, and when the lane had room for its piece."""

    asked_at: int = 0
    loaded_at: int = 0
    sent_at: int = 0

    def divide(self, began: int, ended: int) -> Waits:
        """Split the time that a loop waited for this round, by cause, in nanoseconds.

        It waited for its peers until the round was requested, and again while the reader waited for room in their lanes
        before this one's turn came; for the source in between; and for the transfer at the end.
        """
        asked, loaded, sent = self
        if sent <= began:  # true for all batches of a loop that is slower than its loader
            return Waits(0, ended - began, 0)
        asked, loaded, sent = max(asked, began), max(loaded, began), min(sent, ended)
        asked, loaded = min(asked, sent), min(loaded, sent)
        return Waits(source=loaded - asked, transfer=ended - sent, peers=asked - began + sent - loaded)


class Loaded(NamedTuple):
    """A piece in a lane: `number` is its round's."""

    piece: Piece
    number: int
    nbytes: int
    stamps: Stamps


class Delivery(NamedTuple):
    """A batch on its device: its backend waits for `token`; the rest as in `Piece` and `Loaded`."""

    batch: Any
    token: Any
    claim: Claim
    position: Any
    nbytes: int
    stamps: Stamps


class Conveyor:
    """Every n-th round of a lane, from round `first` on: its loaded and its moved batches.

    The reader puts into `entry`. `refill_at`, of the inbox and the outbox, as for `Channel`.
    """

    def __init__(
        self, lane: Lane, first: int, lock: threading.Lock, is_direct: bool, refill_at: tuple[int | None, int | None]
    ) -> None:
        self.first = first
        self.inbox: Channel[Loaded] = Channel(lock, lane.on_move, refill_at[0])
        self.outbox: Channel[Delivery] = Channel(lock, lane.on_receipt, refill_at[1])
        self.entry: Channel[Any] = self.outbox if is_direct else self.inbox


class Lane:
    """The path of the batches to one device.

    It does not reference the loop's world: that references the error that broke it, whose frames reference the loader,
    which would then never be garbage.

    Attributes:
        sent, received: the numbers of batches that were put in, and that its loop took out.
        progress: the progress of its loop.
        is_direct: whether nothing has to be moved, so that the reader delivers batches itself.
        is_cancelled: whether no loop receives here any more.
    """

    def __init__(
        self, pipeline: Pipeline, device: torch.device, backend: Backend, timeline: Timeline, has_own_thread: bool
    ) -> None:
        self.device = device
        self.backend = backend
        self.timeline = timeline
        # With None, one thread may drain all lanes in turn, so a lane in which no thread has received yet may overflow.
        self.owner: int | None = OTHER if has_own_thread else None  # the thread that last received here
        self.waiter: int | None = None  # the thread that waits here with nothing in transit
        self.iterators: set[int] = set()  # the ids of the iterators that receive here
        self.progress = Progress()
        self.sent = self.received = 0
        self.is_cancelled = False
        self._sent_bytes = self._received_bytes = 0
        self._pipeline = pipeline
        self.is_direct = not backend.moves_in_background
        self._failed_at: int | None = None  # the first round that could not be moved
        count = 1 if self.is_direct else pipeline.transfer_threads
        self._takes_turns = threading.Lock() if count > 1 else None
        # Over several conveyors, the length of one channel does not show whether half of the lane is empty.
        refill_at = pipeline.refill_at(self.is_direct) if count == 1 else (None, None)
        self.conveyors = [Conveyor(self, first, pipeline.lock, self.is_direct, refill_at) for first in range(count)]
        entries, outboxes = [each.entry for each in self.conveyors], [each.outbox for each in self.conveyors]
        # A channel wakes its own sender. If a bound spans several, a receipt from one makes room in the others.
        self._woken_by_move = entries if count > 1 else []
        self._woken_by_receipt = outboxes if count > 1 else []
        if pipeline.prefetch_bytes is not None and not self.is_direct:
            self._woken_by_receipt = self._woken_by_receipt + entries

    # The reader's end.

    def send(self, piece: Piece, asked_at: int, loaded_at: int) -> bool:
        """Put the piece of the next round in, waiting for room; return False if the lane is cancelled."""
        size = nbytes(piece.batch)
        # Rounds go to the transfer threads in turn and are received in turn, which keeps their order without sorting.
        conveyor = self.conveyors[self.sent % len(self.conveyors)]
        entry = conveyor.entry
        # Checked without the lock first: only this thread takes up room.
        if not self._has_room(size) and not entry.wait_for_room(partial(self._has_room, size)):
            return False
        # `_has_room` is True after a failure, too, so that the reader does not wait for room that never comes.
        if self._failed_at is not None:
            return False
        # `asked_at` is 0 if no other lane can have held up the reader: `divide` then finds no time for peers.
        sent_at = perf_counter_ns() if asked_at else loaded_at
        item: Any = Loaded(piece, self.sent, size, Stamps(asked_at, loaded_at, sent_at))
        if self.is_direct:
            try:
                item = self.move(item)
            except BaseException as error:
                self.fail(self.sent, conveyor, Outcome.failure(error))
                return False
        self.sent += 1
        self._sent_bytes += size
        return entry.send(item)

    def close(self, end: Outcome[None]) -> None:
        """Close the lane after the last round: the source has ended, or failed with the error of `end`."""
        for conveyor in self.conveyors:
            # Each lane raises its own copy: two threads must never raise the same exception object.
            conveyor.entry.close(end if end.error is None else Outcome.failure(copy_error(end.error)))

    def _has_room(self, size: int) -> bool:
        waiting = self.sent - self.received
        pipeline = self._pipeline
        if self.is_direct:
            is_full = waiting >= pipeline.most_waiting
        else:
            # Only the inboxes: how many batches are moved ahead is bounded by the transfers, in `may_move`.
            is_full = sum([len(each.inbox) for each in self.conveyors]) >= pipeline.loader_prefetch_size
        # One batch may always enter, however large: a bound below the size of a batch would block forever.
        if pipeline.prefetch_bytes is not None and waiting:
            is_full = is_full or self._sent_bytes - self._received_bytes + size > pipeline.prefetch_bytes
        return not is_full or self._failed_at is not None or self._may_overflow()

    def _may_overflow(self) -> bool:
        # One thread may loop over several devices in turn: while it waits at an empty lane, the full one stays full, so
        # the reader must get past it.
        starved = [lane for lane in self._pipeline.lanes if lane is not self and lane.sent == lane.received]
        waiters = [lane.waiter for lane in starved]
        return any(waiter is not None and (self.owner in (None, waiter) or not self.iterators) for waiter in waiters)

    # The transfers' end.

    def move(self, loaded: Loaded) -> Delivery:
        """Move a batch to the device, or start its move."""
        piece = loaded.piece
        try:
            batch, token = self.backend.to_device(piece.batch, self.device)
        except BaseException as error:
            error.add_note(f"while a batch was moved to {self.device}")
            raise
        return Delivery(batch, token, piece.claim, piece.position, loaded.nbytes, loaded.stamps)

    def may_move(self, number: int) -> bool:
        """Whether there is room for that round on the device, or the lane is cancelled. Called under the lock."""
        return number < self.received + self._pipeline.device_prefetch_size or self.has_failed_before(number)

    def has_failed_before(self, number: int) -> bool:
        """Whether an earlier round could not be moved."""
        return self._failed_at is not None and self._failed_at < number

    def fail(self, number: int, conveyor: Conveyor, end: Outcome[None]) -> None:
        """Note that round `number` cannot be moved: its error closes its conveyor, and later batches are discarded."""
        with self._pipeline.lock:
            # With several transfer threads a later round may fail first; the loop gets all rounds before the earliest.
            if self._failed_at is None or number < self._failed_at:
                self._failed_at = number
            for each in self.conveyors:
                # The reader waits at an inbox, other transfers at their outboxes; the failure lets all of them pass.
                each.inbox.wake_sender()
                each.outbox.wake_sender()
        conveyor.outbox.close(end)
        conveyor.inbox.cancel()

    def on_move(self, _: Loaded) -> None:
        """Wake the reader after a transfer took a piece out of its inbox. Called under the lock."""
        for entry in self._woken_by_move:
            entry.wake_sender()

    # The loop's end.

    def receive(self) -> Delivery:
        """Return the next batch; as `Channel.receive`."""
        self.owner = threading.get_ident()
        try:
            if self._takes_turns is None:
                return self.conveyors[0].outbox.receive(self._start_waiting)
            with self._takes_turns:  # two iterators of one device must not wait for the same round
                return self.conveyors[self.received % len(self.conveyors)].outbox.receive(self._start_waiting)
        finally:
            self.waiter = None

    def on_receipt(self, delivery: Delivery) -> None:
        """Count a batch that the loop took out, and wake senders that its room allows. Called under the lock."""
        self.received += 1
        self._received_bytes += delivery.nbytes
        for channel in self._woken_by_receipt:
            channel.wake_sender()

    def last_stamps(self) -> Stamps:
        """The stamps for a wait that ended without a round, because the source has ended."""
        return Stamps(self._pipeline.asked_at, perf_counter_ns(), perf_counter_ns())

    def leave(self, iterator: int) -> None:
        """Note that an iterator is gone; from any thread, at any moment."""
        # No lock: `__del__` calls this, and a garbage collection may run it in a thread that holds the lock.
        self.iterators.discard(iterator)
        for conveyor in self.conveyors:
            conveyor.entry.wake_sender_unlocked()

    def cancel(self) -> None:
        """Discard this lane's batches from now on: no loop receives here any more."""
        self.is_cancelled = True
        for conveyor in self.conveyors:
            conveyor.inbox.cancel()
            conveyor.outbox.cancel()

    def _start_waiting(self) -> None:
        self.waiter = threading.get_ident()
        # The reader may be blocked at another lane that this thread would empty only later; see `_may_overflow`.
        for lane in self._pipeline.lanes:
            if lane is not self:
                lane.wake_reader()

    def wake_reader(self) -> None:
        """Make the reader, if it waits for room here, check again whether it may overflow. Called under the lock."""
        for conveyor in self.conveyors:
            conveyor.entry.wake_sender()

    @property
    def holds_reader(self) -> bool:
        """Whether the reader waits for room here, or is about to."""
        return any(each.entry.has_waiting_sender for each in self.conveyors)

    def threads(self, place: int) -> list[threading.Thread]:
        """Return the threads that move its batches, not started; `place` is the lane's."""
        if self.is_direct:
            return []
        bodies = []
        for conveyor in self.conveyors:
            more = f"-{conveyor.first}" if conveyor.first else ""
            name = f"unisono-transfer-{place}{more}"
            bodies.append(threading.Thread(target=transfer, args=(self, conveyor), name=name, daemon=True))
        return bodies


class Pipeline:
    """The lanes and threads of one pass over a source.

    Args:
        loader_prefetch_size: loaded batches that may wait, per lane.
        device_prefetch_size: moved batches that may wait, per lane.
        prefetch_bytes: the bytes of loaded and moved batches that may wait, per lane; None for no such bound. The batch
            that is being read is not counted.
        transfer_threads: how many threads move batches, per lane.
    """

    def __init__(
        self,
        loader_prefetch_size: int,
        device_prefetch_size: int,
        prefetch_bytes: int | None = None,
        transfer_threads: int = 1,
    ) -> None:
        self.loader_prefetch_size = loader_prefetch_size
        self.device_prefetch_size = device_prefetch_size
        self.most_waiting = loader_prefetch_size + device_prefetch_size + 1  # with the one that is being moved
        self.prefetch_bytes = prefetch_bytes
        self.transfer_threads = transfer_threads
        self.lock = threading.Lock()
        self.lanes: list[Lane] = []
        self.threads: list[threading.Thread] = []
        self.asked_at = 0  # when the reader last requested a round; 0 while no lane can have waited for another

    def refill_at(self, is_direct: bool) -> tuple[int | None, int | None]:
        """When half of an inbox, and of an outbox, is empty; None if they may be bounded by bytes."""
        if self.prefetch_bytes is not None:
            return None, None
        return self.loader_prefetch_size // 2, (self.most_waiting if is_direct else self.device_prefetch_size) // 2

    def add_lane(self, device: torch.device, backend: Backend, timeline: Timeline, has_own_thread: bool) -> None:
        """Add a lane, before the start; `has_own_thread` if a separate thread will empty it."""
        self.lanes.append(Lane(self, device, backend, timeline, has_own_thread))

    def start(self, source: Iterator[list[Piece]]) -> None:
        """Start the threads; `source` yields one piece per lane and round."""
        bodies = [threading.Thread(target=read, args=(source, self), name="unisono-reader", daemon=True)]
        for place, lane in enumerate(self.lanes):
            bodies += lane.threads(place)
        self.threads = bodies
        # Before the start: after an interrupt within it, `_end_all` still finds the threads that run.
        _started.add(self)
        try:
            start_threads(bodies)
        except BaseException:
            self.stop()
            raise

    def count_left_out(self, samples: Sequence[int]) -> None:
        """Count samples of each lane's share that are not delivered. The source calls it, in the reader's thread."""
        for lane, dropped in zip(self.lanes, samples, strict=True):
            if dropped:
                with lane.timeline.helper("reader") as track:
                    track.count("dropped", dropped)

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
    round_number = 0
    lanes = pipeline.lanes
    pieces: list[Piece] | None
    try:
        if len(lanes) == 1:  # tensors that the dataset itself moves by `.cuda()` go to the loop's device
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
        error.add_note(f"in the loader's reader, round {round_number}")
    pieces = None
    for lane in lanes:
        lane.close(end)
    del source, end, pieces  # an error's traceback references this frame, which must not keep the workers


def transfer(lane: Lane, conveyor: Conveyor) -> None:
    """Body of a transfer: move each piece to the lane's device, then close the outbox as the inbox was closed."""
    number, outbox = conveyor.first, conveyor.outbox
    try:
        with lane.timeline.helper("transfer") as track:
            lane.backend.activate(lane.device)
            while (loaded := _take(conveyor)) is not None:
                number = loaded.number
                # The outbox may stay open: the lane is cancelled, or its loop ends at the earlier round that failed.
                if not outbox.wait_for_room(partial(lane.may_move, number)) or lane.has_failed_before(number):
                    break
                with track.span(MOVE):
                    delivery = lane.move(loaded)
                del loaded  # else this thread would keep the batch alive while it waits for the next
                outbox.send(delivery)
                del delivery
    except BaseException as error:
        lane.fail(number, conveyor, Outcome.failure(error))


def _take(conveyor: Conveyor) -> Loaded | None:
    """Return the next piece for a transfer; None after the last, when the outbox is closed too."""
    try:
        return conveyor.inbox.receive()
    except EndOfChannel:
        conveyor.outbox.close(Outcome())
    except BaseException as error:  # ClosedError too: it is the source's own, or no loop receives it
        conveyor.outbox.close(Outcome.failure(error))
    return None
