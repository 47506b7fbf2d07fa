"""Which rows of a loop's batches count for a metric, if only the number of rows identifies the batches.

The first rows of a batch are its samples; the rows after them repeat others and do not count.

*Threads:* as `deliveries.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

_KEPT = 4096  # batches of which no metric was gathered

_Batch = tuple[int, int]  # its numbers of samples and of rows


class Rows(NamedTuple):
    """The rows that count among those of a batch, or of a whole loop."""

    counted: list[int]  # their places
    batches: int  # the number of batches
    end: int  # the number of the last of these batches; 0 if it is not known
    is_new: bool  # whether no metric was gathered of them
    is_ambiguous: bool = False  # whether they may be others, of which different rows count


class LoopRows:
    """The rows of one loop, batch by batch."""

    def __init__(self) -> None:
        self._runs: list[list[Any]] = []  # a batch, and how many equal ones came together: an epoch has only a few
        self._pending: deque[_Batch] = deque(maxlen=_KEPT)  # the last ones, of which no metric was gathered
        self.num_batches = self._num_rows = 0
        self.is_gathered = False  # whether a metric was gathered of some batch
        self.is_sized = True  # whether the rows of every batch are known; else no number of rows identifies batches

    def count(self, samples: int, rows: int | None) -> None:
        """Register a delivered batch: the number of its samples, which come first, and of all its rows, if known."""
        self.is_sized = self.is_sized and rows is not None
        batch = samples, samples if rows is None else rows
        if not self._runs or self._runs[-1][0] != batch:
            self._runs.append([batch, 0])
        run = self._runs[-1]
        run[1] += 1
        self._pending.append(run[0])  # the same object: thousands of them would leave the processor's cache
        self.num_batches += 1
        self._num_rows += batch[1]

    def fitting(self, rows: int, may_be_part: bool) -> Rows | None:
        """The rows that count of the whole loop, if it has so many; or, if it may be a part, of the latest batch of so
        many of which no metric was gathered, or of the last one. None if none fit."""
        if not self.is_sized:
            return None
        if self._runs and self._num_rows == rows:
            places: list[int] = []
            start = 0
            for (samples, size), times in self._runs:
                for _ in range(times):
                    places += range(start, start + samples)
                    start += size
            return Rows(places, self.num_batches, self.num_batches, not self.is_gathered)
        first = self.num_batches - len(self._pending) + 1
        found = {number: batch[0] for number, batch in enumerate(self._pending, first) if batch[1] == rows}
        if found and may_be_part:
            end, samples = max(found), set(found.values())
            return Rows(list(range(found[end])), 1, end if len(found) == 1 else 0, True, len(samples) > 1)
        last = self._runs[-1][0] if self._runs else (0, 0)
        if may_be_part and last[1] == rows:
            return Rows(list(range(last[0])), 1, 0, False)
        return None

    def gather(self, end: int) -> None:
        """Note that a metric was gathered of the batches up to number `end`."""
        self.is_gathered = True
        while len(self._pending) > self.num_batches - end:
            self._pending.popleft()

    def recent(self) -> list[int]:
        """The numbers of rows of the last three batches, the latest last."""
        return [size for (_, size), times in self._runs[-3:] for _ in range(min(times, 3))][-3:]
