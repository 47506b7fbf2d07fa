"""How many loader workers a loop needs, found while it runs: as few as let it wait for data no longer than 2 %.

The loop measures what share of its time it waits. From what it computes in a batch, and how often batches come, follows
how many workers would do; their number is tried, for as long as more of them help and cores and memory are left. The
order of the samples, and the seed of each, do not depend on it.

*Threads:* `note` runs in the loop's thread; the one that reads asks what is `wanted`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from unisono.devices.cores import usable_cores

WINDOW_NS = 400_000_000
ENOUGH = 0.02  # of its time may a loop wait for data
_FEWEST = 4  # batches of a window
_BUSY = 0.03  # of the machine's time that is left where its cores are used up
_FEW_LATE = 2  # windows in a row, after which another number is tried
_MUCH = 20  # times: what is left of the loop is hardly to be measured
_CHEAP_NS = 1_000_000  # a worker's batch costs the loop's process nearly as much as to read one that takes so long

logger = logging.getLogger(__name__)


class Tuner:
    """The number of loader workers of one source, through all its loops.

    Attributes:
        wanted: how many there are to be. 0: the loop reads for itself.
        why: why there are not more, in words, while data are waited for; "" else.
        gain: how many times as fast a loop would be that waited for no data.
    """

    def __init__(self, number: int = 0) -> None:
        self.wanted, self.why, self.gain = number, "", 1.0
        self._fewest = 0
        self._too_few, self._enough = -1, 1 << 30  # the greatest number known to be too small; the least that is not
        self._before: tuple[int, float] | None = None  # the last number that was too small, and its batches a second
        self._settled_at: float | None = None  # batches a second, with a number that stays
        self._late = 0  # windows in a row in which data were waited for, though
        self._used = _used_of_machine()
        self._elapsed = self._waited = self._count = 0  # of the window so far, in nanoseconds and batches
        self._counts_from = 0
        self.begin(0)

    def begin(self, fewest: int) -> None:
        """A loop begins that cannot do with fewer workers. What was measured in the last one counts on: a loop may be
        shorter than a window."""
        self._fewest = fewest
        self.wanted = max(self.wanted, fewest)
        self._last: int | None = None
        self._left_out = 2 * self.wanted  # batches: they are awaited until all workers have begun

    def has_workers(self) -> bool:
        return self.wanted > 0

    def need(self, fewest: int) -> None:
        """It takes at least this number of workers."""
        if self.wanted < fewest:
            self.begin(fewest)

    def note(self, now: int, waited: int) -> None:
        """A batch has come at this time, for which the loop has waited, in nanoseconds."""
        before, self._last = self._last, now
        if self._left_out or before is None or now < self._counts_from:
            self._left_out = max(self._left_out - 1, 0)
            return
        self._elapsed += now - before
        self._waited += waited
        self._count += 1
        is_long = self._elapsed >= WINDOW_NS and self._count >= max(_FEWEST, self.wanted)
        if not is_long and self._elapsed < 10 * WINDOW_NS:
            return
        used, self._used = self._used, _used_of_machine()
        number = self.wanted
        self._decide(self._elapsed, self._waited, self._count, _share(used, self._used))
        self._elapsed = self._waited = self._count = 0
        if self.wanted != number:
            # The next come from fewer workers, or were read ahead.
            self._left_out, self._counts_from = 2 * max(number, self.wanted), now + WINDOW_NS // 2
            logger.debug("%d loader workers from now on, %d before", self.wanted, number)

    def _decide(self, elapsed: int, waited: int, count: int, used: float) -> None:
        number, rate, computing = self.wanted, count / elapsed, max(elapsed - waited, 1)
        self.gain = elapsed / computing
        if waited <= ENOUGH * elapsed:
            self._enough, self.why, self._late = min(number, self._enough), "", 0
            # Half of them if none were too few yet; else what is known not to be.
            fewer = max(self._fewest, number // 2) if self._too_few < 0 else self._too_few + 1
            if fewer < number and self._settled_at is None:
                self.wanted = max(fewer, (self._too_few + number + 1) // 2)
            else:
                self._settled_at = rate
            return
        if self._settled_at is not None:
            self._late += 1
            if self._late < _FEW_LATE or (self.why and rate > 0.8 * self._settled_at):
                return
            self._before, self._settled_at, self._enough = None, None, 1 << 30  # the loop or its data have changed
        self._too_few = max(number, self._too_few)
        if number == 0 and waited <= count * _CHEAP_NS:
            self._settle(0, rate, "its batches are cheaper than what a worker would cost")
        elif self._before is not None and self._is_no_faster(number, rate, *self._before):
            self._late += 1  # another look, since something else may have held it up
            if self._late >= _FEW_LATE:
                self._settle(*self._before, "all cores are used" if used > 1 - _BUSY else "more of them are not faster")
        elif number + 1 >= self._enough:
            self._settle(self._enough, rate, "")
        elif psutil.virtual_memory().percent > 90:
            self._settle(number, rate, "less than a tenth of the memory is left")
        else:
            self._before, self._late = (number, rate), 0
            needed = math.ceil(waited / computing if number == 0 else number * self.gain)
            most = max(2 * number, usable_cores())
            self.wanted = min(max(number + 1, needed), most, self._enough - 1)

    @staticmethod
    def _is_no_faster(number: int, rate: float, before: int, rate_before: float) -> bool:
        """Whether workers were added that do not help: by a quarter of what they could, up to 5 %."""
        return number > before and rate < rate_before * min(1.05, 1 + (number / max(before, 1) - 1) / 4)

    def _settle(self, number: int, rate: float, why: str) -> None:
        self.wanted, self._settled_at, self.why, self._late = max(number, self._fewest), rate, why, 0

    def describe(self) -> str:
        """What was chosen, why, and what more cores would give."""
        chosen = f"{self.wanted or 'no'} loader worker{'s' * (self.wanted > 1)}"
        if not self.why and self.gain < 1 + 2 * ENOUGH:
            return chosen
        why = self.why or "others are still to be tried"
        gain = f"{self.gain:.2f}" if self.gain < _MUCH else f"more than {_MUCH}"
        return f"{chosen}: {why}; a loop that never waited for data would be {gain} times as fast"

    def serve(self, begin: Callable[[int, Iterator[Any]], Iterator[Any]], requests: Iterator[Any]) -> Iterator[Any]:
        """The values of the requests, in their order, by as many workers as are wanted at the time. The next ones begin
        with the requests that are left, while the last ones finish theirs. The first are started at once."""
        shared = _Requests(requests)
        return self._serve(begin, requests, self.wanted, shared, begin(self.wanted, shared))

    def _serve(self, begin: Any, requests: Iterator[Any], number: int, shared: _Requests, values: Any) -> Iterator[Any]:
        while True:
            following: Any = None
            for value in values:
                yield value
                del value
                if following is None and number != (number := self.wanted):
                    shared.is_over, shared = True, _Requests(requests)
                    following = begin(number, shared)
            if following is None:
                return
            values = following


class _Requests:
    """The requests, until it is over."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests, self.is_over = requests, False

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        return next(self._requests)


def _used_of_machine() -> tuple[float, float]:
    """The seconds that the cores have been used, and all."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return sum(times) - idle, sum(times)


def _share(before: tuple[float, float], now: tuple[float, float]) -> float:
    return (now[0] - before[0]) / max(now[1] - before[1], 1e-9)
