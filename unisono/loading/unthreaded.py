"""The batches of one lane that its loop reads itself, until a thread that reads ahead would gain something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from time import perf_counter_ns

import torch

from unisono.comm.outcome import add_note_once, copy_error
from unisono.errors import ClosedError
from unisono.loading.channel import EndOfChannel
from unisono.loading.pipeline import HERE, Delivery, Lane, Stamps
from unisono.loading.sharding import IN_ROUND, Piece

SWITCH_NS = 100_000  # a change of thread
LONG_NS = 10 * SWITCH_NS
_FEW, _MANY = 3, 8  # slow batches at the beginning of a loop after which the reader takes over; more later


class Unthreaded:
    """The batches of one lane without threads: its loop reads and moves them, when it requests them. When a batch costs
    more than a change of thread would, and so do the loop's steps, beside which it would be read, `read_ahead` starts
    the threads for what is left of the source; where that is given, as soon as it `has_workers`. Until then it is read
    as it would be there: in a context of its own, with gradients enabled.

    *Threads:* the loop's. `close` from another one takes effect when the source has returned the round it is reading.
    """

    def __init__(
        self,
        lane: Lane,
        source: Iterator[list[Piece]],
        read_ahead: Callable[[Iterator[list[Piece]]], None] | None = None,
        has_workers: Callable[[], bool] | None = None,
    ) -> None:
        self._lane = lane
        self._source = source
        self._end: BaseException | None = None
        self._context = Context()
        self._read_ahead = read_ahead
        self._has_workers = has_workers
        self._is_ahead = False
        self._slow = 0  # rises by slow batches, falls by others: a few that were interrupted decide nothing

    def receive(self) -> Delivery:
        """Return the next batch; as `Lane.receive`."""
        if self._is_ahead:
            return self._lane.receive()
        if self._lane.outbox.is_cancelled and self._end is None:
            # Frees the dataset and its workers: `close` cannot, since this thread may be reading.
            self._source = iter(())
            raise ClosedError("the loader was closed, so it yields no more batches")
        if self._end is not None:
            raise copy_error(self._end)
        try:
            return self._read()
        except BaseException as error:
            self._source = iter(())  # the source may hold loader workers, and the kept error must not hold its frames
            self._end = copy_error(error).with_traceback(None)
            raise

    def _read(self) -> Delivery:
        lane, began = self._lane, perf_counter_ns()
        try:
            if self._read_ahead is None:
                pieces = next(self._source, None)
            elif torch.is_grad_enabled():
                pieces = self._context.run(next, self._source, None)
            else:
                with torch.enable_grad():
                    pieces = self._context.run(next, self._source, None)
        except BaseException as error:
            add_note_once(error, IN_ROUND.format(lane.sent))
            raise
        if pieces is None:
            raise EndOfChannel
        (piece,) = pieces
        batch, claim, position, draw = piece
        now = perf_counter_ns()
        stamps = HERE if lane.is_direct else Stamps(0, now, now)
        lane.sent += 1
        lane.received += 1
        moved = lane.move(batch, None, claim, position, stamps, draw)
        if self._is_slow(now - began, lane.pace.last) and self._read_ahead:
            source, self._source = self._source, iter(())
            try:
                self._read_ahead(source)
                self._is_ahead = True
            except Exception as error:  # after this batch, as an error of the source
                self._end = copy_error(error).with_traceback(None)
        return moved

    def _is_slow(self, reading: int, computing: int) -> bool:
        """Whether the reader is to take over, given the nanoseconds of a batch, and of the step before it."""
        if self._has_workers is not None:
            return self._has_workers()
        if reading <= SWITCH_NS or _costs_little(computing, reading):
            self._slow = max(self._slow - 1, -_MANY)
            return False
        # A long one counts twice. The first may be long because its memory is new, or something is imported for it; and
        # what another thread reads ahead may be in new memory each time.
        self._slow += 1 + (reading > LONG_NS) + (reading > 5 * LONG_NS)
        return self._slow >= _FEW


def _costs_little(computing: int, reading: int) -> bool:
    """Whether a step is so short that to read beside it gains nothing: what looks like one may be that a large batch
    is freed, and two threads that both handle Python objects hold each other up."""
    return computing <= SWITCH_NS or (computing <= 2 * LONG_NS and computing * 6 <= reading)
