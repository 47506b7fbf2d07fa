"""A lane without threads: its loop reads and moves the batches itself, when it requests them.

Nothing is prefetched. That is faster if samples cost next to nothing, so that a thread switch costs more than the
overlap saves; and the dataset runs in the loop's own thread, as debuggers and database connections expect.

*Threads:* the loop's. `close` from another one takes effect when the source has returned the round it is reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns

from unisono.errors import ClosedError
from unisono.loaders.channel import EndOfChannel
from unisono.loaders.pipeline import Delivery, Lane, Stamps
from unisono.loaders.sharding import Piece
from unisono.outcome import copy_error
from unisono.tree import nbytes


class Unthreaded:
    """The batches of one lane, read by its loop."""

    def __init__(self, lane: Lane, source: Iterator[list[Piece]]) -> None:
        self._lane = lane
        self._source = source
        self._end: BaseException | None = None

    def receive(self) -> Delivery:
        """Return the next batch; as `Lane.receive`."""
        if self._lane.outbox.is_cancelled:
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
        lane = self._lane
        try:
            pieces = next(self._source, None)
        except BaseException as error:
            error.add_note(f"while the loop read round {lane.sent}")
            raise
        if pieces is None:
            raise EndOfChannel
        (piece,) = pieces
        now = perf_counter_ns()
        stamps = Stamps(loaded_at=now, sent_at=now)
        loaded = Delivery(piece.batch, None, piece.claim, piece.position, nbytes(piece.batch), stamps)
        lane.sent += 1
        lane.received += 1
        return lane.move(loaded)
