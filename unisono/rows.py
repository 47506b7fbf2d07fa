"""Which rows of a loop's batches count for a metric, if only the number of rows identifies the batches.

The first rows of a batch are its samples; the rows after them repeat others and do not count.

*Threads:* as `deliveries.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

_KEPT = 4096  # runs of equal batches of which no metric was gathered


class Rows(NamedTuple):
    """The rows that count among those of several consecutive batches.

    Attributes:
        counted: the places of these rows.
        batches: the number of batches.
        end: the number of the last of these batches; 0 if there are several possibilities.
        is_new: whether no metric was gathered of them, as far as is known.
    """

    counted: list[int]
    batches: int
    end: int = 0
    is_new: bool = True


class _Run(NamedTuple):
    """A run of `times` equal batches: each has `rows` rows, of which the first `samples` are its samples."""

    samples: int
    rows: int
    times: int


class LoopRows:
    """The rows of one loop, batch by batch.

    Attributes:
        num_batches: the number of batches.
        is_gathered: whether a metric was gathered of some batch.
        is_sized: whether the number of rows of every batch is known; else no number of rows identifies batches.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._ungathered: deque[_Run] = deque()  # of these no metric was gathered, as far as is known
        self.num_batches = 0
        self.is_gathered = False
        self.is_sized = True

    def count(self, samples: int, repeated: int, is_sized: bool = True) -> None:
        """Register a delivered batch: its number of samples, and of the rows after them, which do not count."""
        self.is_sized = self.is_sized and is_sized
        for runs in (self._runs, self._ungathered):
            # Equal batches are counted in one run, so that an epoch has only a few.
            is_more = bool(runs) and runs[-1][:2] == (samples, samples + repeated)
            runs.append(_Run(samples, samples + repeated, 1 + (runs.pop().times if is_more else 0)))
        if len(self._ungathered) > _KEPT:
            self._ungathered.popleft()
        self.num_batches += 1

    def fitting(self, rows: int) -> list[Rows]:
        """The rows that may count if consecutive batches have `rows` rows in total; each result once, the latest last.

        Only batches of which no metric was gathered are considered; if none of these fit, the last batches.
        """
        if not self.is_sized:
            return []
        found: dict[tuple[tuple[int, int], ...], int] = {}
        end, behind = self.num_batches, 0
        for place, run in reversed(list(enumerate(self._ungathered))):
            end -= run.times
            behind += run.times * run.rows
            if behind >= rows:
                for batches, last in self._stretches(place, end, rows):
                    found[batches] = 0 if batches in found else last
        if not found:
            return self._last(rows)
        each_once: dict[tuple[int, ...], Rows] = {}
        for batches, last in found.items():  # the latest come first
            counted = _places_that_count(batches)
            known = each_once.get(tuple(counted))
            each_once[tuple(counted)] = Rows(counted, len(batches), last) if known is None else known._replace(end=0)
        return list(reversed(each_once.values()))

    def _stretches(self, place: int, before: int, rows: int) -> Iterator[tuple[tuple[tuple[int, int], ...], int]]:
        """Sequences of batches with `rows` rows in total that begin in run `place`, each with its last batch's number.

        `before` batches precede the run. The number is 0 if several sequences within the run are equal.
        """
        run = self._ungathered[place]
        within, rest = divmod(rows, run.rows) if run.rows else (0, 1)
        if not rest and 0 < within <= run.times:
            yield (run[:2],) * within, before + within if within == run.times else 0
        for times in range(1, min(run.times, within - (not rest)) + 1):
            taken, left = [(run, times)], rows - times * run.rows
            for after in islice(self._ungathered, place + 1, None):
                more = min(after.times, left // after.rows if after.rows else 0)
                taken.append((after, more))
                left -= more * after.rows
                if more < after.times:
                    break
            if not left:
                batches = tuple(each[:2] for each, several in taken for _ in range(several))
                yield batches, before + run.times - times + len(batches)

    def _last(self, rows: int) -> list[Rows]:
        batches: list[tuple[int, int]] = []
        left = rows
        for run in reversed(self._runs):
            for _ in range(run.times):
                left -= run.rows
                batches.append(run[:2])
                if left <= 0:
                    return [Rows(_places_that_count(batches[::-1]), len(batches), is_new=False)] if not left else []
        return []

    def gather(self, end: int) -> None:
        """Note that a metric was gathered of the batches up to number `end`."""
        self.is_gathered = True
        # The ungathered batches are always the loop's last ones; this is how many of them `end` covers.
        gathered = end - self.num_batches + sum(run.times for run in self._ungathered)
        while gathered > 0 and self._ungathered:
            run = self._ungathered.popleft()
            if run.times > gathered:
                self._ungathered.appendleft(run._replace(times=run.times - gathered))
            gathered -= run.times

    def recent(self) -> list[int]:
        """The numbers of rows of the last three batches, the latest last."""
        return [run.rows for run in self._runs[-3:] for _ in range(min(run.times, 3))][-3:]


def _places_that_count(batches: Iterable[tuple[int, int]]) -> list[int]:
    """The places of the rows that count in the concatenated batches, each given as its numbers of samples and rows."""
    places: list[int] = []
    start = 0
    for samples, rows in batches:
        places += range(start, start + samples)
        start += rows
    return places
