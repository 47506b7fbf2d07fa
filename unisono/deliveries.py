"""Deliveries: the batches that a rank has received, what each counts, and which of them a tensor comes from.

A loader that knows the whole round states, with each batch, that it holds n of the round's N samples. A batch is
recognised by the memory of its tensors, including views, whenever and however often it is used: drawn ahead, replayed,
or from two loaders at once. If several batches came in the same memory, the oldest one that waits for a pass is meant.
A tensor that was computed from a batch has other memory: there the order of delivery decides, if only one batch can be
meant; if several can, nothing is assumed unless all of them count the same.

This is the only connection between `loaders` and `parallel`, which are otherwise independent.

*Threads:* the passes of a rank, and the queries about its batches, run in one thread. Loops may begin and draw in
several. `end` may run at any point, in any thread: the garbage collector ends loops that were left.
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

REMEMBERED = 8  # loops that have ended
_KEPT = 4096  # batches, used or not; if more are drawn ahead, the older ones are recognised by memory alone


class Batch:
    """A batch that a loop has received.

    Attributes:
        samples: n, this rank's part of the round.
        rows: the number of its rows; those after the samples do not count. None if unknown: the batch then counts as
            one sample.
        total: N, of all ranks; None if no rank knows it.
        mark: equal on all ranks that are in the same round.
        loop: the loop that received it.
        dealt: the number of batches that the round takes from the user's loader.
        number: its number in the loop, from 1 on.
        at: a logical time, counted over all deliveries and passes of the process.
        is_waiting: whether no pass with gradients was computed from it yet.
        is_spent: whether an optimizer has stepped on it.
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
        """n and N. Batches with equal counts need not be distinguished to weight them."""
        return self.samples, self.total

    @property
    def counted(self) -> tuple[int, int | None]:
        """The number of its rows that count, and of all its rows."""
        return self.samples, self.rows

    def is_last(self) -> bool:
        """Whether it ends its loop. May wait until the loader knows; then all ranks must call it.

        If all batches were drawn before the first was used, they may be used in any order: the loop ends when all were
        used.
        """
        if self.loop.is_listed:
            return len(self.loop.cycle) == self.loop.num_batches
        return self.number == self.loop.num_batches and (not self.loop.is_open or self.loop.ends_here())


class Loop:
    """One loop over a loader: the batches that it has delivered to this rank.

    Args:
        ends_here: returns whether the batch that was delivered last is the loop's last one.
        lengths: returns the numbers of batches of an epoch: of the user's loader, and of this rank's. None if the
            loader has no length.

    Attributes:
        rows: the rows of its batches.
        is_evaluation: whether all batches were delivered with gradients disabled.
        is_open: whether the loop has not ended.
        is_listed: whether all batches were drawn before the first was used.
        cycle: the numbers of the batches that were used; restarted when one is used again.
        kinds: the first batch with each of the different counts.
        mark: of the batch that was delivered last.
    """

    def __init__(
        self,
        ends_here: Callable[[], bool] = lambda: False,
        lengths: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self.ends_here, self.lengths = ends_here, lengths
        self.mark = 0
        self.rows = LoopRows()
        self.is_evaluation = self.is_open = True
        self.is_listed = False
        self.cycle: set[int] = set()
        self.kinds: dict[tuple[int, int | None], Batch] = {}
        self._last_used = 0

    def use(self, number: int) -> None:
        """Note that a pass with gradients was computed from batch `number`."""
        if not self._last_used:
            # Decided at the first use: if the loop has ended by then, all its batches were drawn before.
            self.is_listed = not self.is_open
        # A batch comes back after another one: the next pass over the drawn batches begins.
        if number in self.cycle and number != self._last_used:
            self.cycle.clear()
        self.cycle.add(number)
        self._last_used = number

    @property
    def is_trained(self) -> bool:
        """Whether a batch was delivered with gradients enabled, or a pass with gradients was computed from one."""
        return not self.is_evaluation or self._last_used > 0

    @property
    def num_batches(self) -> int:
        """The number of batches delivered."""
        return self.rows.num_batches


class Deliveries:
    """The loops of one rank."""

    def __init__(self) -> None:
        self._loops: list[Loop] = []  # the open ones, and the last that have ended, in the order of their last batches
        self._by_memory: StorageMap[list[Batch]] = StorageMap(_are_waiting)  # the latest last
        self._received: deque[Batch] = deque(maxlen=_KEPT)  # from the oldest that waits for a pass on
        self._changing = threading.Lock()  # for changes of the attributes above; `end` never acquires it
        self._used: Batch | None = None  # by the last pass
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
        """Register a loop that begins, nested in those that are open; the arguments are those of `Loop`."""
        loop = Loop(ends_here, lengths)
        with self._changing:
            ended = [each for each in self._loops if not each.is_open]
            forgotten = set(ended[:-REMEMBERED])
            self._loops = [loop, *(each for each in self._loops if each not in forgotten)]
            # Batches of loops that have ended, and only evaluated, wait for no pass.
            untrained = {each for each in ended if not each.is_trained}
            if any(each.loop in untrained for each in self._received):
                self._received = deque((each for each in self._received if each.loop not in untrained), maxlen=_KEPT)
        return loop

    @staticmethod
    def end(loop: Loop) -> None:
        """Note that a loop has ended, or was left. Idempotent."""
        loop.is_open = False  # no more, since this may run at any point: the next `begin` cleans up

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
        """Register a batch that is being delivered, in the loop's thread.

        Args:
            values: the batch itself, tensors in any nesting.
            samples, total, mark, dealt: as for `Batch`.
            repeated: the number of rows that follow the samples and do not count.
            is_told: whether the number of its rows is known.
        """
        loop.rows.count(samples, repeated, is_told)
        loop.is_evaluation = loop.is_evaluation and not torch.is_grad_enabled()
        batch = Batch(loop, samples, total, mark, repeated, dealt, is_told)
        loop.kinds.setdefault(batch.counts, batch)
        loop.mark = mark
        with self._changing:
            if self._loops[-1:] != [loop]:
                # `recent` lists the loops by their latest batches.
                self._loops = [*(each for each in self._loops if each is not loop), loop]
            self.know(values, batch)
            self._received.append(batch)
        return batch

    def know(self, values: Any, batch: Batch) -> None:
        """Register these tensors, and all that share their memory, as belonging to `batch`."""
        for each in tensors(values):
            known = [batch]
            if before := self._by_memory.note(each, known):
                known[:0] = [one for one in before[-_KEPT:] if self._is_meant_beside(one, batch)]

    def _is_meant_beside(self, batch: Batch, later: Batch) -> bool:
        """Whether `batch` may still be meant, although a later one was delivered in the same memory."""
        if batch is later:
            return False
        may_count_else = batch.loop is later.loop and batch.counted != later.counted
        return batch.is_waiting or batch is self._used or may_count_else

    def find(self, values: Any) -> list[Batch]:
        """The batches whose memory the tensors share, the latest first; tensors computed from batches have none."""
        known = self._batches_in(values)
        # Tensors that lie in one batch only decide first; others add a batch only if none of theirs was found.
        found = {batches[0] for batches in known if len(batches) == 1}
        found |= {_oldest_waiting(batches) for batches in known if found.isdisjoint(batches)}
        return sorted(found, key=lambda batch: -batch.at)

    def find_rows(self, values: Any, rows: int) -> list[Batch]:
        """The batches of `rows` rows whose memory the tensors share, if that determines which of the rows count."""
        found = {
            batches[-1]: None
            for batches in self._batches_in(values)
            if batches[-1].rows == rows and len({each.counted for each in batches}) == 1
        }
        return list(found)

    def know_computed(self, inputs: Any, outputs: Any) -> None:
        """Register outputs, computed without gradients, for the one batch that the inputs lie in, to know its rows."""
        known = self._batches_in(inputs)
        batches = {batches[-1] for batches in known if len({each.counted for each in batches}) == 1}
        if len(batches) == 1:
            self.know(outputs, *batches)

    def _batches_in(self, values: Any) -> list[list[Batch]]:
        """For each tensor that shares memory with batches: these batches."""
        return [found for each in tensors(values) if (found := self._by_memory.find(each))]

    def named(self, values: Any) -> list[Batch]:
        """The batches that the user names by these tensors: that of the last pass if it matches, else as `find`.

        Raises:
            ValueError: no tensor belongs to a batch.
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
        """Note that a pass with gradients is computed from a batch."""
        batch.is_waiting = False
        batch.loop.use(batch.number)
        while len(self._received) > 1 and not self._received[0].is_waiting:  # the last one stays
            self._received.popleft()
        self._used, self._used_at = batch, next(_clock)

    def candidates(self) -> list[Batch]:
        """The batches that tensors in other memory may have been computed from, the most likely one first.

        These are the batches that no pass has used: a single one, if the loop draws each batch after it has finished
        with the previous one. If the oldest of them was drawn before the last pass, that pass's batch may be meant,
        too. If none waits, it is the batch of the last pass: the tensor is a second view of it, or noise of its size.
        After a loop that has ended with a step, it may be any of the loop's batches, replayed, or data from elsewhere:
        then one batch for each of the different counts, or none if all count the same.
        """
        # A copy, because loops in other threads may deliver in the meantime.
        unused = [each for each in list(self._received) if each.is_waiting]
        waiting = [each for each in unused if each.loop.is_trained]
        waiting = [each for each in waiting if each.loop.is_open] or waiting
        used = self._used
        is_over = used is not None and not used.loop.is_open and used.is_spent
        if used is not None and not is_over and not (waiting and waiting[0].at > self._used_at):
            return [*waiting, used]  # otherwise the oldest was drawn after the pass over `used`
        if waiting:
            return waiting
        if drawn := [each for each in unused if each.loop.is_open]:  # drawn with gradients disabled, as some readers do
            return drawn
        kinds = list(used.loop.kinds.values()) if used is not None else []
        return kinds if len(kinds) > 1 else []

    def since(self, at: int) -> list[Batch]:
        """The batches delivered after `at` in open loops that train; if there are none, in the last loop that trained.

        Args:
            at: the `at` of a batch, or 0.
        """
        trained = [each for each in list(self._received) if each.loop.is_trained]
        found = [each for each in trained if each.loop.is_open] or [
            each for each in trained if each.loop is trained[-1].loop
        ]
        return [each for each in found if each.at > at]

    def recent(self) -> list[Loop]:
        """The last few loops, open and ended; the loop that received the latest batch comes first."""
        return self._loops[: -REMEMBERED - 1 : -1]


def name_batches(batches: Sequence[Batch], before: Batch | None = None) -> str:
    """Describe a rank's batches in words that are equal on another rank if its batches are of the same rounds.

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
    """Check that all batches that may be meant count the same.

    Args:
        by_part: only the fraction n / N must be equal.

    Raises:
        ValueError: it is not known which of these batches is meant, and they count differently.
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
    """The batch that is meant, of several in the same memory: the oldest that an open loop has drawn and not used."""
    waiting = [each for each in batches if each.is_waiting]
    waiting = [each for each in waiting if each.loop.is_trained] or waiting
    if len(waiting) <= 1:
        return waiting[0] if waiting else batches[-1]
    loop = next((each.loop for each in reversed(waiting) if each.loop.is_open), waiting[-1].loop)
    return next(each for each in waiting if each.loop is loop)


_clock = count(1)
