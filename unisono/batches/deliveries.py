"""Deliveries: the batches that a rank has received, what each counts, and which of them a tensor comes from.

A loader that knows the whole round states, with each batch, that it holds n of the round's N samples. A batch is
recognised by memory, or by its rows (docs/exactness.md, "A pass has one claim"). Where several batches can be meant,
all of them are returned, and the caller compares what they count. This is the only connection between `loading` and
`training`.

*Threads:* the passes of a rank, and the queries about its batches, run in one thread. Loops may begin and draw in
several. `end` may run at any point, in any thread: the garbage collector ends loops that were left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakMethod

import torch

from unisono.batches.alone import Evaluations, LoneSteps
from unisono.batches.storages import StorageMap
from unisono.batches.virtual_ranks import WITNESS, Draw
from unisono.torch_private import VERSION
from unisono.tree import tensors

REMEMBERED = 8  # loops that have ended
_KEPT = 4096  # batches in the same memory


class Batch:
    """A batch that a loop has received.

    Attributes:
        samples, total: n, this rank's part of the round, and N; None if no rank knows it.
        rows: the number of its rows; `repeated` ones, after the samples, do not count. None if it is unknown (not
            `is_sized`): the batch then counts as one sample.
        mark: equal on all ranks that are in the same round.
        dealt: the number of batches that the round takes from the user's loader.
        number, at: its number in the loop, from 1 on, and a logical time, over all deliveries of the process.
        is_summed: whether the total is to be summed over the ranks before it is used.
        is_guess: whether it may have other rows than samples, made by a `collate_fn`.
        is_used: whether a pass with gradients was computed from it.
        draw: which one it is, with virtual ranks.
    """

    __slots__ = (
        *("at", "dealt", "draw", "is_guess", "is_summed", "is_used", "loop"),
        *("mark", "number", "rows", "samples", "total"),
    )

    def __init__(
        self,
        loop: Loop,
        samples: int,
        total: int | None,
        mark: int = 0,
        repeated: int = 0,
        dealt: int = 1,
        is_sized: bool = True,
        is_summed: bool = False,
        is_guess: bool = False,
    ) -> None:
        self.loop, self.samples, self.total, self.mark = loop, samples, total, mark
        self.rows, self.dealt = samples + repeated if is_sized else None, dealt
        self.number, self.at = loop.num_batches, next(_clock)
        self.is_summed, self.is_guess, self.is_used = is_summed, is_guess, False
        self.draw: Draw | None = None

    @property
    def is_repeated(self) -> bool:
        """Whether it only repeats rows of others, or has none: then it weighs 0, whatever its loss is the mean over."""
        return not self.weight

    @property
    def weight(self) -> int:
        """The number of samples that a loss of it counts for: that of a witness is computed as where it counts."""
        return self.samples if self.draw is None or self.draw.turn != WITNESS else self.draw.weight

    @property
    def ends_round(self) -> bool:
        """Whether it is the last one that the rank has of a round; always without virtual ranks."""
        return self.draw is None or self.draw.ends_round

    def samples_of_epoch(self) -> range:
        """The numbers of samples that an epoch may have, if its last batch alone is smaller; none if it is unknown."""
        batches, size = (self.loop.lengths() or (0, 0))[0], (self.total or 0) // self.dealt
        return range((batches - 1) * size + 1, batches * size + 1) if batches > 1 else range(0)

    @property
    def counted(self) -> tuple[int, int | None]:
        """The number of its rows that count, and of all its rows."""
        return self.samples, self.rows

    def note_metric(self) -> None:
        """Note that a metric was taken of it."""
        self.loop.gathered = self.number if self is self.loop.last else 0  # where batches are drawn ahead

    def is_last(self) -> bool:
        """Whether it ends its loop; a loop that was left has no last batch. May wait until the loader knows; then all
        ranks must call it."""
        loop = self.loop
        return self.number == loop.num_batches and (loop.ends_here() if loop.is_open else loop.is_exhausted)


class Loop:
    """One loop over a loader: the batches that it has delivered to this rank.

    Attributes:
        ends_here: returns whether the batch that was delivered last is the loop's last one.
        lengths: returns the numbers of batches of an epoch: of the user's loader, and of this rank's. None if the
            loader has no length.
        tail: returns n and N of a rank that has an uneven part of the last round; None if there is none, or it is not
            known before.
        num_batches, num_rows: the numbers of batches delivered, and of their rows.
        has_repeated: whether some of the rows repeat samples, and do not count.
        is_sized: whether the number of rows of every batch is known.
        gathered: the number of the batch that a metric was last taken of; 0 if a later one had been delivered.
        is_evaluation: whether all batches were delivered with gradients disabled.
        is_learned_from: whether a backward pass was computed from a batch.
        is_exhausted: whether it has ended with its last batch.
        is_settled: whether it does not matter where it is left.
        num_used: the number of batches that passes with gradients were computed from.
        begins_ahead: whether several batches were delivered before the first pass with gradients.
        lags: whether an earlier batch was used since the last one was delivered, and that one was not.
        kinds: the first batch with each of the different counts and numbers of rows.
        num_met: that of `Evaluations` when it began.
        seeding: with virtual ranks, what has seeded the generators for it last.
    """

    def __init__(
        self,
        ends_here: Callable[[], bool] = lambda: False,
        lengths: Callable[[], tuple[int, int] | None] = lambda: None,
        tail: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self.ends_here, self.lengths, self.tail = ends_here, lengths, tail
        self.is_evaluation = self.is_open = self.is_sized = True
        self.is_exhausted = self.begins_ahead = self.lags = self.has_repeated = False
        self.is_settled = self.is_learned_from = False
        self.num_batches = self.num_rows = self.gathered = self.num_used = self.num_met = 0
        self.last: Batch | Any = None
        self.seeding: Callable[[], int] | None = None
        self.kinds: dict[Any, Batch] = {}

    @property
    def is_trained(self) -> bool:
        """Whether a batch was delivered with gradients enabled, or a pass with gradients was computed from one."""
        return not self.is_evaluation or self.num_used > 0

    @property
    def mark(self) -> int:
        """Of the batch that was delivered last."""
        return self.last.mark if self.last else 0

    @property
    def has_gap(self) -> bool:
        """Whether a batch was not used (in an open loop, one before the last): it was skipped, or drawn ahead."""
        return self.num_used + (self.is_open and not self.last.is_used) < self.num_batches


class Deliveries:
    """The loops of one rank.

    Attributes:
        evaluations: those without backward passes.
        lone_steps: those of optimizers by the script itself.
        at_draw: a method that is called with a loop, and its iterator, before it draws its next batch, or ends.
    """

    def __init__(self) -> None:
        self.at_draw: WeakMethod[Callable[[Loop, Any], None]] | None = None
        self.evaluations, self.lone_steps = Evaluations(), LoneSteps()
        self._loops: list[Loop] = []  # the open ones, and the last that have ended, in the order of their last batches
        # By memory: the batches in it, the latest last.
        self._by_memory: StorageMap[list[Batch]] = StorageMap(lambda held: not all(each.is_used for each in held))
        # By the memory of computed inputs: the batch that they were taken for, and torch's count of writes to them.
        self._computed: StorageMap[tuple[Batch, int]] = StorageMap()
        self._changing = threading.Lock()  # for the loops and what is known by memory; `end` never acquires it
        self._used: Batch | None = None  # by the last pass

    def note_draw(self, loop: Loop, iterator: Any) -> None:
        """Note that a loop is about to draw a batch, or to end."""
        with self._changing:
            self._by_memory.sweep()  # before the batch is made: it takes the memory of those that are gone
        if self.at_draw is not None and (look := self.at_draw()) is not None:
            look(loop, iterator)

    def begin(self, *asked: Callable[[], Any]) -> Loop:
        """Register a loop that begins, nested in those that are open; the arguments are those of `Loop`."""
        loop = Loop(*asked)
        with self._changing:
            forgotten = set([each for each in self._loops if not each.is_open][:-REMEMBERED])
            self._loops = [loop, *(each for each in self._loops if each not in forgotten)]
        return loop

    @staticmethod
    def end(loop: Loop, is_exhausted: bool = False) -> None:
        """Note that a loop has ended with its last batch, or was left. Idempotent."""
        # No more than this, since it may run at any point: the next `begin` forgets the loop.
        loop.is_exhausted = is_exhausted or loop.is_exhausted
        loop.is_open = False

    def settle(self) -> None:
        """Note that a run begins, or continues from a loaded state: it may have left its loops anywhere."""
        for each in self.recent():
            each.is_settled = True

    def add(self, loop: Loop, found: Sequence[torch.Tensor], *claim: Any, **others: Any) -> Batch:
        """Register a batch that is delivered, in the loop's thread: its tensors, and what it counts, as for `Batch`."""
        batch = Batch(loop, *claim, **others)
        loop.num_batches = batch.number = loop.num_batches + 1
        samples, rows = batch.samples, batch.rows
        loop.num_rows += samples if rows is None else rows
        kind = samples, batch.total, rows
        if kind not in loop.kinds:
            loop.kinds[kind] = batch
            loop.has_repeated |= rows not in (None, samples)
            loop.is_sized &= rows is not None
        loop.is_evaluation = loop.is_evaluation and not torch.is_grad_enabled()
        loop.last, loop.lags = batch, False
        if self._loops[-1] is not loop:
            with self._changing:
                # `recent` lists the loops by their latest batches.
                self._loops = [*(each for each in self._loops if each is not loop), loop]
        self.know(found, batch)
        return batch

    def know(self, found: Sequence[torch.Tensor], batch: Batch) -> None:
        """Register these tensors, and all that share their memory, as belonging to `batch`."""
        alone = [batch]  # one list for all: a batch may have thousands of tensors
        with self._changing:
            for each, before in self._by_memory.note_all(found, alone):
                kept = [one for one in before[-_KEPT:] if self._is_meant_beside(one, batch)]
                if kept:
                    self._by_memory.note(each, [*kept, batch])

    def _is_meant_beside(self, batch: Batch, later: Batch) -> bool:
        """Whether `batch` may still be meant, although a later one was delivered in the same memory."""
        if batch is later:
            return False
        may_count_else = batch.loop is later.loop and batch.counted != later.counted
        return not batch.is_used or batch is self._used or may_count_else

    def find(self, values: Any) -> list[Batch]:
        """The batches whose memory the tensors share, the latest first; tensors computed from batches have none."""
        return self.find_in(tensors(values))

    def find_in(self, inputs: Sequence[torch.Tensor]) -> list[Batch]:
        """The same for the tensors among the values."""
        known = list(filter(None, map(self._by_memory.find, inputs)))
        if len(known) == 1 and len(known[0]) == 1:
            return known[0]
        # Tensors that lie in only one batch decide first; others add a batch only if none of theirs was found.
        found = {batches[0] for batches in known if len(batches) == 1}
        found |= {_oldest_unused(batches) for batches in known if found.isdisjoint(batches)}
        return sorted(found, key=lambda batch: -batch.at)

    def find_rows(self, values: Any, rows: int) -> list[Batch]:
        """The batches of `rows` rows whose memory the tensors share, if that determines which of the rows count."""
        return [each for each in self._certain_in(values) if each.rows == rows]

    def know_computed(self, inputs: Any, outputs: Any) -> None:
        """Register outputs, computed without gradients, for the one batch that the inputs lie in, to know its rows."""
        if len(batches := self._certain_in(inputs)) == 1:
            self.know(tensors(outputs), *batches)

    def _certain_in(self, values: Any) -> dict[Batch, None]:
        """The batches whose memory tensors share, except where several count differently."""
        known = self._batches_in(values)
        return dict.fromkeys(each[-1] for each in known if len({batch.counted for batch in each}) == 1)

    def _batches_in(self, values: Any) -> list[list[Batch]]:
        """For each tensor that shares memory with batches: these batches."""
        return list(filter(None, map(self._by_memory.find, tensors(values))))

    def named(self, values: Any) -> list[Batch]:
        """The batches that the user names by these tensors: that of the last pass if it matches, else as `find`."""
        used, known = self._used, self._batches_in(values)
        if used is not None and known and all(used in batches for batches in known):
            return [used]
        found = self.find(values)
        if not found:
            raise ValueError(
                "batch= holds no tensor of a batch that a loader of this package has delivered; pass the batch as it "
                "came, or a view of it, or the number of its samples as weight=; or batch=() for data of no loader"
            )
        return found

    def use(self, batch: Batch) -> None:
        """Note that a pass with gradients is computed from a batch."""
        if not batch.is_used:
            batch.is_used, loop = True, batch.loop
            loop.begins_ahead = loop.begins_ahead or (not loop.num_used and loop.num_batches > 1)
            loop.num_used += 1
        batch.loop.lags = not batch.loop.last.is_used
        self._used = batch

    def learn(self, batch: Batch | None) -> None:
        """Note that a backward pass begins, from a batch or data of no loader."""
        self.evaluations.settle()
        if batch is not None:
            batch.loop.is_learned_from = True

    def computed_from(self, rows: int | None, inputs: Sequence[torch.Tensor] = ()) -> list[Batch | None]:
        """What inputs outside any batch's memory may have been computed from, the most likely first; None stands for
        data of no loader. Without rows and inputs, no forward pass was observed."""
        loops = self.open_loops()
        if loops:
            last = loops[0].last
            found = {last: None} | self._taken_before(inputs, last)
            if len(found) > 1:  # what a loop uses with two batches, it uses with its last one
                found |= dict.fromkeys(_tails(loops[:1]))
            if None in (rows, last.rows) or rows == last.rows:
                found |= self._confusable(last, rows)
                others = [each.last for each in loops]
                found |= {each: None for each in others if not each.is_used or each.samples != last.samples}
                return [each for each in found if rows is None or each.rows in (rows, None)]
            # With another number of rows: from no loader, or computed from any batch of the loops, or of an ended one.
            return [
                None,
                *(each for loop in loops for each in loop.kinds.values()),
                *_tails(loops),
                *(each for each in self._left_of_ended() if each.rows == rows),
            ]
        # No loop is open: a replay of a batch of the last one, or data of no loader.
        ended = next((each for each in reversed(self._loops) if each.last and each.is_trained), None)
        if ended is None:
            return [None]
        kinds = list(ended.kinds.values())
        if rows is not None:
            return [None, *(each for each in kinds if each.rows in (rows, None))]
        return [*kinds] if ended.has_gap else [None, *kinds]  # listed, or drawn ahead: one of them

    def _confusable(self, last: Batch, rows: int | None) -> dict[Batch, None]:
        """Batches that may be meant instead of an open loop's last one, and that no rank can distinguish by their rows.

        Batches that count differently have different rows on some rank, unless rows are repeated there. Unused
        batches of an ended loop may still be used.
        """
        own = last.loop.kinds.values() if last.loop.has_gap else ()
        if rows is None or last.rows is None:
            return dict.fromkeys(each for each in own if (each.samples, each.total) != (last.samples, last.total))
        return dict.fromkeys(
            each for each in (*own, *self._left_of_ended()) if each.rows == rows and each.samples != last.samples
        )

    def _left_of_ended(self) -> list[Batch]:
        """The kinds of batches of loops that have ended with some batch unused."""
        loops = [each for each in self._loops if each.last and not each.is_open and each.is_trained and each.has_gap]
        return [each for loop in loops for each in loop.kinds.values()]

    def _taken_before(self, inputs: Sequence[torch.Tensor], batch: Batch) -> dict[Batch, None]:
        """The batch that the same computed inputs were taken for before, if they have not changed; now for `batch`."""
        first = next((each for each in inputs if each.ndim and not each.is_inference()), None)
        if first is None:
            return {}
        self._computed.sweep()
        known, version = self._computed.find(first), getattr(first, VERSION)
        self._computed.note(first, (batch, version))
        return {known[0]: None} if known is not None and known[1] == version else {}

    def open_loops(self) -> list[Loop]:
        """The open loops, the innermost first; one of evaluation only if no other is open."""
        found = [each for each in reversed(self._loops) if each.is_open and each.last]
        return [each for each in found if each.is_trained] or found[:1]

    def recent(self) -> list[Loop]:
        """The last few loops, open and ended; the one that received the latest batch first. Empty before any."""
        return self._loops[: -REMEMBERED - 1 : -1]


def _tails(loops: Sequence[Loop]) -> list[Batch]:
    """For each loop that ends unevenly, a batch of its last round. What would be refused there is refused at once."""
    return [Batch(loop, *tail, is_sized=False) for loop in loops if (tail := loop.tail())]


def _oldest_unused(batches: list[Batch]) -> Batch:
    """The batch that is meant, among several in the same memory: after the last one that was used, the oldest of the
    latest open loop, or of the latest loop if none is open."""
    last_used = max((number for number, each in enumerate(batches, 1) if each.is_used), default=0)
    unused = batches[last_used:]
    unused = [each for each in unused if each.loop.is_trained] or unused
    loops = [each.loop for each in reversed(unused)]
    loop = next((each for each in loops if each.is_open), loops[0] if loops else None)
    return next((each for each in unused if each.loop is loop), batches[-1])


_clock = count(1)
