"""Window: which samples the gradients stand for that a rank has gathered since an optimizer's last step.

A loader that knows the whole round tells, with each batch, how many of the round's samples came to this rank. The
optimizer step weighs this rank's gradient by that share, which makes the reduced gradient that of the mean loss over
all samples of the global batch, however unevenly they were dealt. The number of batches and a mark of the round go
along, to tell ranks that stand in different rounds.

This is the one thing that passes between `loaders` and `parallel`, which do not know each other.

Each loop over a loader is a `Pass`. A pass whose batches were all delivered with gradients off is evaluation. A step
belongs to the open pass that delivered last and is no evaluation, so a loop of evaluation between two steps, or around
them, or one that stays open beside them, changes nothing; outside all loops it belongs to the pass that ended last, if
that has batches left which no step has taken.

*Threads:* a rank's loop, or its loops, run in one thread at a time. Worlds of one may be shared by threads; there no
share is ever used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cache
from itertools import chain, count
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from unisono.world import World

logger = logging.getLogger(__name__)

REMEMBERED = 8  # loops that have ended


class Share(NamedTuple):
    """This rank's part of the samples of a step, 0 to 1, the number of batches in which they came, the last's mark."""

    part: float
    batches: int
    mark: int = 0


class Latest(NamedTuple):
    """The batch that a rank received last: `samples` of the round's `total`, None where nobody knows that.

    `key` tells it from every other one; `is_last()` whether it ends its loop, and may wait for the loader to tell;
    `is_over` whether the loop has ended.
    """

    key: tuple[int, int]
    samples: int
    total: int | None
    mark: int
    is_last: Callable[[], bool]
    is_over: bool = False


@cache
def warn_of_unequal_shares() -> None:
    """Log, once in a process, that one number cannot weigh several batches exactly."""
    logger.warning(
        "several batches came between two optimizer steps, not all dealt in one proportion (a tail was split), and "
        "are weighted by their sum, which is close, not exact; unisono.backward(loss) instead of loss.backward() "
        "weighs each batch exactly; with an Accelerator, accumulate=N and accelerator.backward(loss) do"
    )


class Rows(NamedTuple):
    """The places of the rows that count, among those of so many batches."""

    counted: list[int]
    batches: int


class _Counts(NamedTuple):
    """Batches, this rank's samples and all ranks' samples since the pass began."""

    batches: int = 0
    samples: int = 0
    total: int = 0


class Pass:
    """What one loop over a loader has delivered to this rank.

    Args:
        is_last: whether the batch that was delivered last is the loop's last one.

    Attributes:
        at: when the last batch was delivered, in an order of all passes.
        is_evaluation: all batches were delivered with gradients off.
        is_open: it has not ended.
        is_gathered: a metric was gathered of its samples.
    """

    def __init__(self, is_last: Callable[[], bool] = lambda: False) -> None:
        self._number = next(_numbers)
        self._is_last = is_last
        self._runs: list[
            tuple[int, int, int]
        ] = []  # batches that had so many samples, and rows, and how many such came
        self.at = 0
        self._now = self._before = _Counts()
        self._is_known = True
        self.is_evaluation = True
        self.is_gathered = False
        self.is_open = True
        self._mark = 0
        self._taken: WeakKeyDictionary[object, _Counts] = WeakKeyDictionary()

    def add(self, samples: int, total: int | None, mark: int = 0, repeated: int = 0) -> None:
        """A batch with `samples` of the round's `total` samples was delivered, just now in the loop's thread.

        Args:
            total: None where nobody knows it.
            mark: the same on all ranks where they stand in the same round.
            repeated: rows of the batch that come behind its samples and do not count.
        """
        self.at = next(_numbers)
        run = (samples, samples + repeated, 1)
        if self._runs and self._runs[-1][:2] == run[:2]:
            run = (*run[:2], self._runs.pop()[2] + 1)
        self._runs.append(run)
        self._is_known = self._is_known and total is not None
        self.is_evaluation = self.is_evaluation and not torch.is_grad_enabled()
        now = self._now
        self._before, self._now = now, _Counts(now.batches + 1, now.samples + samples, now.total + (total or 0))
        self._mark = mark

    def share_for(self, optimizer: object) -> Share | None:
        """This rank's share of the batches since that optimizer's last step; None where it is unknown.

        One that steps again on the same batch gets that batch's share again.
        """
        taken = self._taken.get(optimizer, _Counts())
        self._taken[optimizer] = now = self._now
        if taken.batches == now.batches:
            taken = self._before
        samples, total = now.samples - taken.samples, now.total - taken.total
        if not self._is_known or not total:
            return None
        last_samples, last_total = now.samples - self._before.samples, now.total - self._before.total
        if samples * last_total != last_samples * total:
            warn_of_unequal_shares()
        return Share(samples / total, now.batches - taken.batches, self._mark)

    def take(self, optimizer: object) -> None:
        """That optimizer steps now, with a share of its own."""
        self._taken[optimizer] = self._now

    def latest(self) -> Latest | None:
        """The batch that was delivered last."""
        if not self._now.batches:
            return None
        samples, total = self._now.samples - self._before.samples, self._now.total - self._before.total
        known = total if self._is_known else None
        return Latest((self._number, self._now.batches), samples, known, self._mark, self._is_last)

    def last_rows(self, rows: int) -> Rows | None:
        """Those that count of the last few batches, if these have so many rows together."""
        counted: list[range] = []
        left = rows
        for samples, height, times in reversed(self._runs):
            for _ in range(times):
                if left < height:
                    return None
                left -= height
                counted.append(range(left, left + samples))
                if left == 0:
                    return Rows(list(chain(*reversed(counted))), len(counted))
        return None

    @property
    def num_batches(self) -> int:
        """How many it has delivered."""
        return self._now.batches

    def recent_rows(self) -> list[int]:
        """How many rows the latest few batches had, the latest last."""
        return [height for _, height, times in self._runs[-3:] for _ in range(min(times, 3))][-3:]

    def has_left(self, optimizer: object) -> bool:
        """Whether it delivered batches that the optimizer has not stepped on."""
        return self._taken.get(optimizer, _Counts()).batches < self._now.batches


class Window:
    """The passes of one rank."""

    def __init__(self) -> None:
        self._open: list[Pass] = []
        self._ended: list[Pass] = []  # the last ones
        self._latest: Pass | None = None

    @property
    def is_unused(self) -> bool:
        """Whether no loop over a loader has begun."""
        return self._latest is None and not self._open

    def begin(self, is_last: Callable[[], bool] = lambda: False) -> Pass:
        """A loop begins, inside those that are open; `is_last` as for `Pass`."""
        begun = Pass(is_last)
        self._open.append(begun)
        return begun

    def end(self, ended: Pass) -> None:
        """That loop has ended, or was left. Idempotent."""
        if ended in self._open:
            self._open.remove(ended)
            ended.is_open = False
            self._ended = [*self._ended[1 - REMEMBERED :], ended]
            self._latest = self._latest if ended.is_evaluation else ended

    @property
    def _current(self) -> Pass | None:
        """The open loop that delivered last, or the one that ended last; one of evaluation where there is no other."""
        training = [each for each in self._open if not each.is_evaluation]
        if not training and self._latest is not None:
            return self._latest
        return max(training or self._open, key=lambda each: each.at, default=None)

    def latest(self) -> Latest | None:
        """The batch that gradients come from now; None where there is none."""
        current = self._current
        latest = current.latest() if current is not None else None
        return latest and latest._replace(is_over=current is not None and not current.is_open)

    def recent(self) -> list[Pass]:
        """The last few loops, open and ended, the one that received a batch last first."""
        return sorted([*self._open, *self._ended], key=lambda each: -each.at)[:REMEMBERED]

    def take(self, optimizer: object) -> None:
        """That optimizer steps now, with a share of its own."""
        current = self._current
        if current is not None:
            current.take(optimizer)

    def share_for(self, optimizer: object) -> Share | None:
        """This rank's share for a step of that optimizer, now; None where no loader tells."""
        current = self._current
        if current is not None and (current.is_open or current.has_left(optimizer)):
            return current.share_for(optimizer)
        return None


_numbers = count()
_lock = threading.Lock()
_windows: WeakKeyDictionary[World, Window] = WeakKeyDictionary()


def window_of(world: World) -> Window:
    """The window of that rank."""
    with _lock:
        return _windows.setdefault(world, Window())
