"""DeviceIterator: the loop's end of a loader. It waits for batches, records deliveries, and keeps the loop's time."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from unisono.batches.alone import Evaluations
from unisono.batches.deliveries import Loop
from unisono.batches.virtual_ranks import WITNESS, seed_after_loop
from unisono.comm.outcome import Outcome, add_note_once, copy_error
from unisono.comm.selection import innermost
from unisono.devices.randomness import seeded
from unisono.devices.seeding import seed_beside
from unisono.errors import UnisonoError
from unisono.loading.balance import Balance
from unisono.loading.channel import EndOfChannel
from unisono.loading.pipeline import Delivery, Lane
from unisono.loading.sharding import IN_ROUND, Claim
from unisono.loading.silence import watch
from unisono.loading.sources import State
from unisono.loading.tuning import Tuner
from unisono.report.timeline import COMPUTE, EVALUATE, FETCH, LoopTiming, Track
from unisono.tree import measured
from unisono.world import World

_RULE = (
    "only on one rank, over a map-style dataset, can a loop go on after it; let the dataset or collate_fn leave out "
    "samples that cannot be read"
)
_ENDS = f"this ends the loop: {_RULE}"
_ENDED = f"the loop has ended with {{}}; {_RULE}"


class DeviceIterator:
    """Iterates once over the batches of one device; returned by `ParallelLoader.per_device_loader`.

    Attributes:
        valid_samples: how many samples of the last delivered batch count, from the front: all, unless it is padded; 0
            for one that only repeats a sample so that this rank keeps step with the others; None if it is unknown.
        weight: the fraction of the global batch that these are; None if unknown. If some batch of the round is of
            unknown size, all batches weigh the same.
        epoch: that of this loop, until its end; then the next.
    """

    def __init__(
        self,
        parent: Any,
        lane: Lane,
        world: World,
        receive: Callable[[], Delivery],
        state: Callable[[], State],
        balance: Balance | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self._parent = parent  # its threads end with the last iterator
        self.loader: Any = parent
        self._receive = receive
        self._state = state
        self._balance, self._tuner = balance, tuner
        self._deliveries = world.state.deliveries
        watch(world.timeline)
        self._evaluations: Evaluations | None = None
        self._num_begun: Callable[[], int] | None = None
        if world.rank == 0 < world.world_size - 1:  # one rank speaks for all
            self._evaluations = self._deliveries.evaluations
            self._num_begun = getattr(innermost(world.comm), "num_begun", None)
            self._evaluations.follow(self._num_begun)
        self._loop: LoopTiming | None = None
        self._received: Loop | None = None
        self._ahead = deque[Outcome[Delivery]]()  # received to know whether the loop ends
        self._failure: str | None = None  # of a loop that an error has ended
        self._claim = Claim(0, None)
        self._entered = 0  # when the loop's body was, less what it has read since
        self._lane = lane  # after all that `__del__` needs, which checks for it: an interrupt may end `__init__` early

    def __iter__(self) -> DeviceIterator:
        return self

    @property
    def num_virtual(self) -> int | None:
        """As `DeviceLoader.num_virtual`."""
        return self._parent.num_virtual  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._parent)

    def __next__(self) -> Any:
        evaluations, received = self._evaluations, self._received
        if evaluations is None or (received is not None and received.is_learned_from):
            return self._draw()
        with evaluations.aside():
            try:
                batch = self._draw()
            except StopIteration:
                if received is not None:
                    evaluations.end(received.num_met)
                raise
            if received is None and self._received is not None:
                self._received.num_met = evaluations.num_met
        return batch

    def _draw(self) -> Any:
        lane = self._lane
        track = lane.timeline.loop()
        loop, received = self._loop, self._received  # another thread may close this iterator, and end both
        # A track belongs to a thread, so an iterator that is handed to another one begins a loop there.
        if loop is None or received is None or loop.track is not track:
            loop, received = self._begin_loop(track)
        else:
            lane.pace.note(perf_counter_ns() - self._entered)
            self._deliveries.note_draw(received, self)
            track.switch(FETCH)
            if self._balance is not None:
                self._deal_anew(self._balance, received, track)
                lane = self._lane
        began, queued = track.since, lane.sent - lane.received
        try:
            # Before the wait, so that a lazy device executes the step meanwhile.
            lane.backend.mark_step(lane.device)
            delivery = self._next_delivery(received)
            lane.backend.wait_ready(delivery.token)
        except BaseException as error:
            self._end_loop(error, loop, received, began)
            raise
        if type(delivery.batch) is Outcome and delivery.batch.error is not None:
            track.switch(COMPUTE)
            raise _in_round(delivery.batch.error, lane.received - len(self._ahead) - 1)
        self._note(delivery, loop, received, began)
        track.counts["queued"] += queued
        return delivery.batch

    def _begin_loop(self, track: Track) -> tuple[LoopTiming, Loop]:
        if self._failure is not None:
            raise RuntimeError(_ENDED.format(self._failure))
        own = weakref.ref(self)
        received = self._deliveries.begin(partial(_is_last, own), partial(_lengths, own), partial(_tail, own))
        self._loop, self._received = LoopTiming(track), received
        self._lane.pace.begin()
        self._deliveries.lone_steps.follow(self._num_begun)
        self._deliveries.note_draw(received, self)
        return self._loop, received

    def _end_loop(self, error: BaseException, loop: LoopTiming, received: Loop, began: int) -> None:
        """End the loop with an error, which its caller raises; StopIteration at the end of the data."""
        lane, track = self._lane, loop.track
        loop.end()
        track.count_wait(lane.last_stamps().divide(began, track.since), lane.is_direct)
        self._deliveries.end(received, isinstance(error, EndOfChannel))
        self._loop = self._received = None
        if isinstance(error, EndOfChannel):
            if received.last is None and self.num_virtual is not None:  # of a loop that was resumed at its end
                seed_beside(lane.backend, lane.device, seed_after_loop(self._parent.seed, self.epoch))
            self._seed_after_loop(received)
            lane.progress.has_ended = True
            raise StopIteration from None
        if isinstance(error, StopIteration):  # a loop would end as if the data had
            raise RuntimeError("a batch could not be moved to its device: it raised StopIteration") from error
        if isinstance(error, Exception) and not isinstance(error, UnisonoError):
            self._failure = f"{type(error).__name__}: {error}"
            add_note_once(error, _ENDS)

    def _note(self, delivery: Delivery, loop: LoopTiming, received: Loop, began: int) -> None:
        """Record a delivery, for which the loop has waited since `began`, and enter the loop's body."""
        lane, track = self._lane, loop.track
        self._claim = claim = delivery.claim
        progress = lane.progress
        progress.position, progress.claim = delivery.position, claim
        progress.rounds += 1
        found, nbytes = measured(delivery.batch)
        made = self._deliveries.add(received, found, *claim)
        if delivery.draw is not None:
            made.draw = delivery.draw
            received.seeding = delivery.draw.seed_batch
            seed_beside(lane.backend, lane.device, received.seeding())
        counts = track.counts
        counts["samples"] += claim.samples
        counts["batches"] += 1
        counts["repeated"] += claim.repeated
        counts["bytes"] += nbytes
        trains = torch.is_grad_enabled()
        track.switch(COMPUTE if trains else EVALUATE)
        if loop.place is None and trains and lane.timeline.is_recorded:
            loop.place = self._parent.place_of(progress)
        waits = delivery.stamps.divide(began, track.since)
        track.count_wait(waits, lane.is_direct)
        if self._tuner is not None:
            self._tuner.note(track.since, waits.source + (waits.transfer if lane.is_direct else 0))
        self._entered = track.since

    def _next_delivery(self, received: Loop) -> Delivery:
        """What is delivered next: no batch of a witness where the loop trains nothing, or other loops beside it have
        batches of the same step."""
        while True:
            delivery = self._ahead.popleft().unwrap() if self._ahead else self._receive()
            is_witness = delivery.draw is not None and delivery.draw.turn == WITNESS
            if not is_witness or self._trains_alone(received):
                return delivery

    def _trains_alone(self, received: Loop) -> bool:
        return bool(received.num_used) and self._deliveries.open_loops()[:1] == [received]

    def _deal_anew(self, balance: Balance, received: Loop, track: Track) -> None:
        """At the end of a round of a loop that trains, continue as the ranks agree to carry the virtual ranks."""
        last = received.last
        if last is None or last.draw is None or not last.draw.ends_round or not self._trains_alone(received):
            return
        if balance.note_round(track, received.num_batches, last.draw.carried) is None:
            return
        self._continue_in(self._parent.dealt_anew())

    def go_back(self) -> None:
        """Continue this loop where the state says that its loader has loaded since."""
        self._continue_in(self._parent.begun_anew())

    def _continue_in(self, parent: Any) -> None:
        self._ahead.clear()
        self._parent, self._lane = parent, parent._pipeline.lanes[0]
        self._receive, self._state = partial(parent._receive_for, 0), partial(parent._state_of, self._lane)

    def is_last(self) -> bool:
        """Whether the batch that was delivered last is the last one; waits until that is known. Ranks that read one
        stream determine it together, so either all of them must call this, or none."""
        if self._loop is None:
            return True
        while not self._ahead or _is_failed(self._ahead[-1]):
            # The loop continues with the random numbers of its batch.
            began = perf_counter_ns()
            with self._loop.track.span(FETCH), seeded(0) if self.num_virtual is not None else nullcontext():
                try:
                    # Kept for the next `__next__`: the loop is still at the batch before it.
                    self._ahead.append(Outcome(value=self._receive()))
                except EndOfChannel as end:
                    # Its traceback would keep this iterator until a garbage collection, and its loop open.
                    self._ahead.append(Outcome.failure(end.with_traceback(None)))
                except Exception as error:
                    self._ahead.append(Outcome.failure(error))
            self._entered += perf_counter_ns() - began
        return isinstance(self._ahead[-1].error, EndOfChannel)

    @property
    def valid_samples(self) -> int | Any:  # or None, rarely
        return self._claim.valid_samples

    @property
    def weight(self) -> float | None:
        return self._claim.weight

    @property
    def epoch(self) -> int:
        return int(self.state_dict()["epoch"])

    def state_dict(self) -> State:
        """The loader's state after the last batch that this loop received; see `ParallelLoader.state_dict`."""
        return self._state()

    def close(self) -> None:
        """Stop: this device's remaining batches are discarded, the other devices continue. Idempotent."""
        self._lane.cancel()
        self._abandon_loop()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_lane") and not is_exiting():  # at the interpreter's exit, modules may be gone
            self._abandon_loop()

    def _abandon_loop(self) -> None:
        self._lane.progress.is_left = True
        self._ahead.clear()
        received, self._received = self._received, None
        if received is not None:
            self._deliveries.end(received)
        # False in another thread, whose track is not to be written to: the loop's own thread ends it.
        if self._loop is not None and self._loop.abandon():
            self._loop = None
            if received is not None:
                self._seed_after_loop(received)

    def _seed_after_loop(self, ended: Loop) -> None:
        """With virtual ranks, seed the generators as if the loop had not been, where it was within another one;
        otherwise for what comes after it."""
        if ended.last is not None and ended.last.draw is not None:
            around = next(iter(self._deliveries.open_loops()), None)
            seeding = ended.last.draw.seed_after_loop if around is None or around.seeding is None else around.seeding
            seed_beside(self._lane.backend, self._lane.device, seeding())


def _in_round(error: BaseException, number: int) -> BaseException:
    """A copy with a note: its traceback references the iterator, and so the source, which may keep the error."""
    copied = copy_error(error)
    add_note_once(copied, IN_ROUND.format(number))
    return copied


def _is_failed(ahead: Outcome[Delivery]) -> bool:
    """Whether this is a batch that could not be made, after which the loop may go on."""
    return ahead.value is not None and type(ahead.value.batch) is Outcome


def _lengths(iterator: weakref.ref[DeviceIterator]) -> tuple[int, int] | None:
    alive = iterator()
    return None if alive is None else alive._parent._plan.lengths()


def _tail(iterator: weakref.ref[DeviceIterator]) -> tuple[int, int] | None:
    alive = iterator()
    return None if alive is None else alive._parent.uneven_tail()


def _is_last(iterator: weakref.ref[DeviceIterator]) -> bool:
    """Call `is_last` for the deliveries, which must not keep the iterator alive: its collection ends the loop."""
    alive = iterator()
    return alive is None or alive.is_last()
