"""Deliveries: the batches that a rank has received, the weight of each, and the batch that a tensor comes from.

A loader that knows the whole round declares, with each batch, that it holds n of the round's N samples. The batch is
later recognised by the memory of its tensors, including views, whenever and however often it is used: drawn ahead,
replayed, or from two loaders at once. If several batches came in the same memory, the oldest that waits for a pass is
taken. Tensors computed from a batch have other memory. For them the order of delivery decides if only one batch is
possible; if several are, nothing is assumed unless all of them count the same.

This record is the only link between `loaders` and `parallel`, which do not import each other.

*Threads:* the passes of a rank, and queries about its batches, run in one thread. Loops may begin and draw in several.
`end` may be called at any moment, in any thread: the garbage collector ends abandoned loops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

import torch

from unisono.rows import LoopRows
from unisono.storages import StorageMap
from unisono.tree import tensors

REMEMBERED = 8  # number of ended loops that are kept
_KEPT = 4096  # batches, used or not; a loop that draws more of them ahead is distinguished by memory alone


class Batch:
    """A batch that a loop has received.

    Attributes:
        samples: n, this rank's part of the round.
        rows: the number of rows; those after the samples do not count. None if it is unknown: the batch then counts as
            one sample.
        total: N, over all ranks; None if unknown.
        mark: equal on all ranks that are in the same round.
        loop: the loop that received it.
        dealt: the number of batches of the user's loader in the round.
        number: its position in its loop, starting at 1.
        at: its position in the order of all events of this rank.
        is_waiting: no pass with gradients has used it yet.
        is_spent: an optimizer has stepped on it.
    """

    __slots__ = ("at", "dealt", "is_spent", "is_waiting", "loop", "mark", "number", "rows", "samples", "total")

    def __init__(
        self,
        loop: Loop,
        samples: int,
        total: int | None,
        mark: int,
        repeated: int = 0,
        dealt: int = 1,
        is_told: bool = True,
    ) -> None:
        self.loop, self.samples, self.total, self.mark = loop, samples, total, mark
        self.rows, self.dealt = samples + repeated if is_told else None, dealt
        self.number, self.at = loop.num_batches, next(_clock)
        self.is_waiting, self.is_spent = True, False

    @property
    def counts(self) -> tuple[int, int | None]:
        """n and N: batches that agree in both have the same weight, so they need not be distinguished."""
        return self.samples, self.total

    @property
    def counted(self) -> tuple[int, int | None]:
        """The number of rows that count, and the number of rows."""
        return self.samples, self.rows

    def is_last(self) -> bool:
        """Whether it ends its loop. May wait for the loader to find out, which then involves all ranks.

        If all batches were drawn before the first was used, they may be used in any order: the last used is the end.
        """
        if self.loop.is_listed:
            return len(self.loop.cycle) == self.loop.num_batches
        return self.number == self.loop.num_batches and (not self.loop.is_open or self.loop.ends_here())


class Loop:
    """The deliveries of one loop over a loader to this rank.

    Args:
        ends_here: returns whether the latest batch is the loop's last one.
        lengths: the number of batches per epoch of the user's loader, and of this rank. None if the loader has no
            length.

    Attributes:
        rows: the numbers of rows of its batches.
        is_evaluation: all of them were delivered with gradients off.
        is_open: whether it has not ended.
        is_listed: whether all batches were drawn before the first was used.
        cycle: the numbers of the batches used since one was used again.
        kinds: one batch for each different weight.
    """

    def __init__(
        self,
        ends_here: Callable[[], bool] = lambda: False,
        lengths: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self.ends_here, self.lengths = ends_here, lengths
        self.rows = LoopRows()
        self.is_evaluation = self.is_open = True
        self.is_listed = False
        self.cycle: set[int] = set()
        self.kinds: dict[tuple[int, int | None], Batch] = {}
        self._last_used = 0

    def use(self, number: int) -> None:
        """Record that a pass with gradients used that batch."""
        if not self._last_used:
            self.is_listed = not self.is_open
        if number in self.cycle and number != self._last_used:
            self.cycle.clear()
        self.cycle.add(number)
        self._last_used = number

    @property
    def is_trained(self) -> bool:
        """Whether a batch came with gradients on, or a pass with gradients was computed from one."""
        return not self.is_evaluation or self._last_used > 0

    @property
    def num_batches(self) -> int:
        """The number of its deliveries."""
        return self.rows.num_batches


class Deliveries:
    """The loops of one rank."""

    def __init__(self) -> None:
        self._loops: list[Loop] = []  # the open ones and the last ones that ended, ordered by their latest batches
        self._by_memory: StorageMap[list[Batch]] = StorageMap(_are_waiting)  # the latest last
        self._received: deque[Batch] = deque(maxlen=_KEPT)  # from the oldest batch that waits for a pass
        self._changing = threading.Lock()  # guards attributes that are replaced, or read and changed; not held by `end`
        self._used: Batch | None = None  # used by the last pass
        self._used_at = 0

    @property
    def is_unused(self) -> bool:
        """Whether no loop over a loader has begun."""
        return not self._loops

    def begin(
        self,
        ends_here: Callable[[], bool] = lambda: False,
        lengths: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> Loop:
        """Begin a loop, nested in those that are open; the arguments are those of `Loop`."""
        loop = Loop(ends_here, lengths)
        with self._changing:
            ended = [each for each in self._loops if not each.is_open]
            forgotten = set(ended[:-REMEMBERED])
            self._loops = [loop, *(each for each in self._loops if each not in forgotten)]
            untrained = {each for each in ended if not each.is_trained}
            if any(each.loop in untrained for each in self._received):
                self._received = deque((each for each in self._received if each.loop not in untrained), maxlen=_KEPT)
        return loop

    @staticmethod
    def end(loop: Loop) -> None:
        """Record that the loop has ended, or was abandoned. Idempotent."""
        loop.is_open = False  # and nothing else: the next loop that begins removes the remains

    def add(
        self,
        loop: Loop,
        values: Any,
        samples: int,
        total: int | None,
        mark: int = 0,
        repeated: int = 0,
        dealt: int = 1,
        is_told: bool = True,
    ) -> Batch:
        """Record a batch that the loop's thread is about to receive.

        Args:
            values: the batch, tensors in any nesting.
            samples, total, mark, dealt: as for `Batch`.
            repeated: the number of rows after its samples, which do not count.
            is_told: whether the number of its rows is known.
        """
        loop.rows.count(samples, repeated, is_told)
        loop.is_evaluation = loop.is_evaluation and not torch.is_grad_enabled()
        batch = Batch(loop, samples, total, mark, repeated, dealt, is_told)
        loop.kinds.setdefault(batch.counts, batch)
        with self._changing:
            if self._loops[-1:] != [loop]:
                self._loops = [*(each for each in self._loops if each is not loop), loop]
            self.know(values, batch)
            self._received.append(batch)
        return batch

    def know(self, values: Any, batch: Batch) -> None:
        """Register these tensors, and all that share their memory, for that batch."""
        for each in tensors(values):
            known = [batch]
            if before := self._by_memory.note(each, known):
                known[:0] = [one for one in before[-_KEPT:] if self._is_meant_beside(one, batch)]

    def _is_meant_beside(self, batch: Batch, later: Batch) -> bool:
        """Whether it may still be in use although a later one came in the same memory."""
        if batch is later:
            return False
        may_count_else = batch.loop is later.loop and batch.counted != later.counted
        return batch.is_waiting or batch is self._used or may_count_else

    def find(self, values: Any) -> list[Batch]:
        """The batches whose memory holds the tensors, latest first; none for tensors computed from batches."""
        known = self._batches_in(values)
        found = {batches[0] for batches in known if len(batches) == 1}
        found |= {_oldest_waiting(batches) for batches in known if found.isdisjoint(batches)}
        return sorted(found, key=lambda batch: -batch.at)

    def find_rows(self, values: Any, rows: int) -> list[Batch]:
        """The batches with that many rows whose memory holds the tensors, if this determines the rows that count."""
        found = {
            batches[-1]: None
            for batches in self._batches_in(values)
            if batches[-1].rows == rows and len({each.counted for each in batches}) == 1
        }
        return list(found)

    def know_computed(self, inputs: Any, outputs: Any) -> None:
        """Register outputs computed without gradients for the one batch that holds the inputs, for its rows."""
        known = self._batches_in(inputs)
        batches = {batches[-1] for batches in known if len({each.counted for each in batches}) == 1}
        if len(batches) == 1:
            self.know(outputs, *batches)

    def _batches_in(self, values: Any) -> list[list[Batch]]:
        """For each tensor in the memory of batches: those batches."""
        return [found for each in tensors(values) if (found := self._by_memory.find(each))]

    def named(self, values: Any) -> list[Batch]:
        """The batches that the user names by these tensors: that of the last pass, if possible; otherwise as `find`.

        Raises:
            ValueError: they belong to no batch.
        """
        used = self._used
        if used is not None and any(used in batches for batches in self._batches_in(values)):
            return [used]
        found = self.find(values)
        if not found:
            raise ValueError(
                "batch= holds no tensor of a batch that a loader of this package has delivered; pass the batch as it "
                "came, or a view of it, or the number of its samples as weight="
            )
        return found

    def use(self, batch: Batch) -> None:
        """Record that a pass with gradients uses it."""
        batch.is_waiting = False
        batch.loop.use(batch.number)
        while len(self._received) > 1 and not self._received[0].is_waiting:  # the last one is kept
            self._received.popleft()
        self._used, self._used_at = batch, next(_clock)

    def candidates(self) -> list[Batch]:
        """The batches that tensors of other memory may have been computed from, the most likely one first.

        It is the oldest that no pass has used: the only one, in a loop that draws each batch after finishing the
        previous one. If another was drawn meanwhile, or also waits, either is possible. If none waits, it is the batch
        of the previous pass: a second view of it, or noise of its size. After a loop that has ended with all its
        batches stepped on, it is any of its batches, replayed, or one from elsewhere: none, if these count the same.
        """
        unused = [each for each in list(self._received) if each.is_waiting]
        waiting = [each for each in unused if each.loop.is_trained]
        waiting = [each for each in waiting if each.loop.is_open] or waiting
        used = self._used
        is_over = used is not None and not used.loop.is_open and used.is_spent
        if used is not None and not is_over and not (waiting and waiting[0].at > self._used_at):
            return [*waiting, used]  # otherwise it was drawn after that one had been used
        if waiting:
            return waiting
        if drawn := [each for each in unused if each.loop.is_open]:  # with gradients off, as some loops do
            return drawn
        kinds = list(used.loop.kinds.values()) if used is not None else []
        return kinds if len(kinds) > 1 else []

    def since(self, at: int) -> list[Batch]:
        """The batches delivered after that event, in open loops; if none is open, in the last one that trained.

        Args:
            at: the position of a batch, or 0.
        """
        trained = [each for each in list(self._received) if each.loop.is_trained]
        found = [each for each in trained if each.loop.is_open] or [
            each for each in trained if each.loop is trained[-1].loop
        ]
        return [each for each in found if each.at > at]

    def recent(self) -> list[Loop]:
        """The last few loops, open and ended, ordered from the latest delivery."""
        return self._loops[: -REMEMBERED - 1 : -1]


def name_batches(batches: Sequence[Batch], before: Batch | None = None) -> str:
    """Describe these batches of a rank in words that are equal on another rank for the same rounds.

    Args:
        before: the batch that was used before them.
    """
    last = batches[-1]
    numbers = [each.number for each in batches if each.loop is last.loop]
    names = f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {', '.join(map(str, numbers))}"
    order = f", round {last.mark:08x}" if last.mark else ""
    first = before.number + 1 if before is not None and before.loop is last.loop else numbers[0]
    left_out = range(first, numbers[0])
    gap = "" if not left_out else f", {left_out[0]}" if len(left_out) == 1 else f", {left_out[0]} to {left_out[-1]}"
    return f"{names} of its loop{order}{gap}{' left out' if gap else ''}"


def check_counts(batches: Collection[Batch], by_part: bool = False) -> None:
    """
    Args:
        by_part: only this rank's fraction of the samples of all ranks matters.

    Raises:
        ValueError: it is unknown which of these batches is meant, and they count differently.
    """
    counts = {batch.counts for batch in batches}
    parts = {samples / total if total else None for samples, total in counts}
    if len(parts if by_part else counts) > 1:
        if len({batch.loop for batch in batches}) > 1:
            raise ValueError(
                "the loss may be the mean over batches of several loaders, which count differently, and it is not "
                "known which; call backward once for the loss of each, and name its batch, accelerator.backward(loss, "
                "batch=batch)"
            )
        shown = " or ".join(sorted(f"{samples} of the {total} samples of all ranks" for samples, total in counts))
        raise ValueError(
            f"the loss may be the mean over {shown}: it comes from several batches, or from one of several that were "
            "drawn ahead, and it is not known which; name the batch, accelerator.backward(loss, batch=batch) (by "
            "hand: unisono.backward(loss, batch=batch)), or its samples, weight="
        )


def _are_waiting(batches: list[Batch]) -> bool:
    return any(each.is_waiting for each in batches)


def _oldest_waiting(batches: list[Batch]) -> Batch:
    """The batch meant, of those in the same memory: the one that a continuing loop has drawn and not used yet."""
    waiting = [each for each in batches if each.is_waiting]
    waiting = [each for each in waiting if each.loop.is_trained] or waiting
    if len(waiting) <= 1:
        return waiting[0] if waiting else batches[-1]
    loop = next((each.loop for each in reversed(waiting) if each.loop.is_open), waiting[-1].loop)
    return next(each for each in waiting if each.loop is loop)


_clock = count(1)
