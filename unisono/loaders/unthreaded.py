"""A lane without threads: its loop reads and moves the batches itself, when it requests them.

Nothing is prefetched. With `prefetch=0` it stays so: the dataset runs in the loop's own thread, as debuggers and
database connections expect. Otherwise it stays so while a batch costs less than a change of thread would; then the
reader takes over what is left of the source. Until then the source is read as it would be there: in a context of its
own, with gradients enabled.

*Threads:* the loop's. `close` from another one takes effect when the source has returned the round it is reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from time import perf_counter_ns

import torch

from unisono.errors import ClosedError
from unisono.loaders.channel import EndOfChannel
from unisono.loaders.pipeline import READING, Delivery, Lane, Stamps
from unisono.loaders.sharding import Piece
from unisono.outcome import copy_error
from unisono.tree import nbytes

_SWITCH_NS = 100_000  # a change of thread
_LONG_NS = 100 * _SWITCH_NS
_HERE = Stamps()  # if nothing is moved, all of a wait is for the source
_FEW, _MANY = 3, 8  # slow batches at the beginning of a loop after which the reader takes over; and more of them later


class Unthreaded:
    """The batches of one lane, read by its loop.

    Args:
        read_ahead: starts the threads for the source, as soon as batches are slow; None if they never read ahead.
    """

    def __init__(
        self,
        lane: Lane,
        source: Iterator[list[Piece]],
        read_ahead: Callable[[Iterator[list[Piece]]], None] | None = None,
    ) -> None:
        self._lane = lane
        self._source = source
        self._end: BaseException | None = None
        self._context = Context()
        self._read_ahead = read_ahead
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
            error.add_note(READING.format(lane.sent))
            raise
        if pieces is None:
            raise EndOfChannel
        (piece,) = pieces
        batch, claim, position = piece
        now = perf_counter_ns()
        stamps = _HERE if lane.is_direct else Stamps(0, now, now)
        lane.sent += 1
        lane.received += 1
        moved = lane.move(batch, None, claim, position, nbytes(batch), stamps)
        if now - began > _SWITCH_NS:
            self._slow += 1
            if self._read_ahead and (self._slow >= _FEW or (lane.sent == 1 and now - began > _LONG_NS)):
                self._let_read_ahead(self._read_ahead)
        elif self._slow > -_MANY:
            self._slow -= 1
        return moved

    def _let_read_ahead(self, start: Callable[[Iterator[list[Piece]]], None]) -> None:
        source, self._source = self._source, iter(())
        try:
            start(source)
            self._is_ahead = True
        except Exception as error:  # after this batch, as an error of the source
            self._end = copy_error(error).with_traceback(None)
