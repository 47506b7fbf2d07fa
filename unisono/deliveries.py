"""Deliveries: the batches that a rank has received, what each counts, and which of them a tensor comes from.

A loader that knows the whole round tells, with each batch, that it holds n of the round's N samples. The batch is known
again by the memory of its tensors, views included, whenever and however often it is used: drawn ahead, replayed, from
two loaders at once. What was computed from it has other memory; there the order in which batches came tells, where one
batch alone can be meant, and where several may be, nothing is told unless all count the same.

This is the one thing that passes between `loaders` and `parallel`, which do not know each other.

*Threads:* a rank's loops run in one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import torch

from unisono.storages import StorageMap
from unisono.tree import leaves

REMEMBERED = 8  # loops that have ended
_KEPT = 4096  # batches, used or not: whoever draws more of them ahead is told apart by memory alone


class Rows(NamedTuple):
    """The places of the rows that count, among those of so many batches."""

    counted: list[int]
    batches: int


class Batch:
    """A batch that a loop has received.

    Attributes:
        samples: n, this rank's part of the round.
        total: N, of all ranks; None where nobody knows it.
        mark: the same on all ranks where they stand in the same round.
        loop: that has received it.
        number: in its loop, from 1 on.
        at: in the order of all that happened to this rank.
        is_used: a pass with gradients was computed from it.
        is_spent: an optimizer has stepped on it.
    """

    __slots__ = ("at", "is_spent", "is_used", "loop", "mark", "number", "samples", "total")

    def __init__(self, loop: Loop, samples: int, total: int | None, mark: int) -> None:
        self.loop, self.samples, self.total, self.mark = loop, samples, total, mark
        self.number, self.at = loop.num_batches, next(_clock)
        self.is_used = self.is_spent = False

    @property
    def counts(self) -> tuple[int, int | None]:
        """n and N: batches of the same ones need not be told apart to weigh them."""
        return self.samples, self.total

    def is_last(self) -> bool:
        """Whether it ends its loop. May wait for the loader to tell, and is a matter of all ranks then."""
        return self.number == self.loop.num_batches and (not self.loop.is_open or self.loop.ends_here())


class Loop:
    """What one loop over a loader has delivered to this rank.

    Args:
        ends_here: whether the batch that was delivered last is the loop's last one.

    Attributes:
        num_batches: how many it has delivered.
        at: when the last one was.
        is_evaluation: all of them were delivered with gradients off.
        is_open: it has not ended.
        is_gathered: a metric was gathered of its samples.
    """

    def __init__(self, ends_here: Callable[[], bool] = lambda: False) -> None:
        self.ends_here = ends_here
        self._runs: list[tuple[int, int, int]] = []  # batches of so many samples, and rows, and how many such came
        self.num_batches = self.at = 0
        self.is_evaluation = self.is_open = True
        self.is_gathered = False

    def count(self, samples: int, repeated: int) -> None:
        """A batch was delivered, with so many samples, and rows behind them that do not count."""
        run = (samples, samples + repeated, 1)
        if self._runs and self._runs[-1][:2] == run[:2]:
            run = (*run[:2], self._runs.pop()[2] + 1)
        self._runs.append(run)
        self.num_batches += 1
        self.at = next(_clock)
        self.is_evaluation = self.is_evaluation and not torch.is_grad_enabled()

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

    def recent_rows(self) -> list[int]:
        """How many rows the latest few batches had, the latest last."""
        return [height for _, height, times in self._runs[-3:] for _ in range(min(times, 3))][-3:]


class Deliveries:
    """The loops of one rank."""

    def __init__(self) -> None:
        self._open: list[Loop] = []
        self._ended: list[Loop] = []  # the last ones
        self._by_memory: StorageMap[Batch] = StorageMap()
        self._received: deque[Batch] = deque(maxlen=_KEPT)  # with gradients on; from the oldest that waits for a pass
        self._used: Batch | None = None  # by the last pass
        self._used_at = 0

    @property
    def is_unused(self) -> bool:
        """Whether no loop over a loader has begun."""
        return not self._open and not self._ended

    def begin(self, ends_here: Callable[[], bool] = lambda: False) -> Loop:
        """A loop begins, inside those that are open; `ends_here` as for `Loop`."""
        begun = Loop(ends_here)
        self._open.append(begun)
        return begun

    def end(self, ended: Loop) -> None:
        """That loop has ended, or was left. Idempotent."""
        if ended in self._open:
            self._open.remove(ended)
            ended.is_open = False
            self._ended = [*self._ended[1 - REMEMBERED :], ended]

    def add(self, loop: Loop, values: Any, samples: int, total: int | None, mark: int = 0, repeated: int = 0) -> Batch:
        """A batch of the loop is delivered, just now in the loop's thread.

        Args:
            values: the batch itself, tensors in any nesting.
            samples, total, mark: as for `Batch`.
            repeated: rows of the batch that come behind its samples and do not count.
        """
        loop.count(samples, repeated)
        batch = Batch(loop, samples, total, mark)
        self.know(values, batch)
        if torch.is_grad_enabled():
            self._received.append(batch)
        return batch

    def know(self, values: Any, batch: Batch) -> None:
        """Know these tensors, and what shares their memory, as that batch's."""
        for leaf in leaves(values):
            if isinstance(leaf, torch.Tensor):
                self._by_memory.note(leaf, batch)

    def find(self, values: Any) -> list[Batch]:
        """The batches that the tensors lie in, the one delivered last first; none for what was computed from them."""
        found = {self._by_memory.find(leaf) for leaf in leaves(values) if isinstance(leaf, torch.Tensor)}
        return sorted((each for each in found if each is not None), key=lambda batch: -batch.at)

    def named(self, values: Any) -> list[Batch]:
        """The batches that the user names by these tensors, as `find`.

        Raises:
            ValueError: they are none's.
        """
        found = self.find(values)
        if not found:
            raise ValueError(
                "batch= holds no tensor of a batch that a loader of this package has delivered; pass the batch as it "
                "came, or a view of it, or the number of its samples as weight="
            )
        return found

    def use(self, batch: Batch) -> None:
        """A pass with gradients is computed from it."""
        batch.is_used = True
        while len(self._received) > 1 and self._received[0].is_used:  # the last one stays
            self._received.popleft()
        self._used, self._used_at = batch, next(_clock)

    def candidates(self) -> list[Batch]:
        """The batches that tensors of other memory may have been computed from, the most likely one first.

        It is the oldest that no pass has used: the only one, in a loop that draws each batch when it has done with the
        one before. Where a further one was drawn meanwhile, or waits beside it, either may be meant. Where none waits,
        it is the batch of the pass before: a second view of it, noise of its size. Behind a loop that is over and all
        stepped on, it is none: what comes now comes from elsewhere.
        """
        waiting = [each for each in self._received if not each.is_used]
        waiting = [each for each in waiting if each.loop.is_open] or waiting
        used = self._used
        if used is not None and not used.loop.is_open and used.is_spent:
            used = None
        if used is not None and waiting and waiting[0].at > self._used_at:
            used = None  # it was drawn when that one was done with
        return waiting + ([used] if used is not None else [])

    def since(self, at: int) -> list[Batch]:
        """The batches that came after that moment, in the loop that has received one last; an open one before others.

        Args:
            at: a batch's, or 0.
        """
        latest = max(self._received, key=lambda batch: (batch.loop.is_open, batch.at), default=None)
        if latest is None:
            return []
        return [each for each in self._received if each.at > at and each.loop is latest.loop]

    def recent(self) -> list[Loop]:
        """The last few loops, open and ended, the one that received a batch last first."""
        return sorted([*self._open, *self._ended], key=lambda each: -each.at)[:REMEMBERED]


def name_batches(batches: Sequence[Batch], before: Batch | None = None) -> str:
    """These batches of a rank in words, so that another rank's are equal if they are of the same rounds.

    Args:
        before: the one that came to use before them.
    """
    last = batches[-1]
    numbers = [each.number for each in batches if each.loop is last.loop]
    names = f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {', '.join(map(str, numbers))}"
    order = f", round {last.mark:08x}" if last.mark else ""
    first = before.number + 1 if before is not None and before.loop is last.loop else numbers[0]
    left_out = range(first, numbers[0])
    gap = "" if not left_out else f", {left_out[0]}" if len(left_out) == 1 else f", {left_out[0]} to {left_out[-1]}"
    return f"{names} of its loop{order}{gap}{' left out' if gap else ''}"


def check_counts(batches: Iterable[Batch]) -> None:
    """
    Raises:
        ValueError: it is not known which of these batches is meant, and they count differently.
    """
    counts = {batch.counts for batch in batches}
    if len(counts) > 1:
        shown = " or ".join(sorted(f"{samples} of {total}" for samples, total in counts))
        raise ValueError(
            f"the loss may be the mean over {shown} samples: it comes from several batches, or from one of several "
            "that were drawn ahead, and it cannot be told which; say so by backward(loss, batch=batch), or weight="
        )


_clock = count(1)
