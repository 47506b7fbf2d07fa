"""What a step is, written down from docs/exactness.md without looking at the code: the oracle of random scripts
(`training/test_machine.py`) and of whole programs (`plain_steps.py`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any


class Visit:
    def __init__(self, source: object, loop: Any, total: float, time: int) -> None:
        self.source, self.began, self.microbatch = source, time, time
        self.loops, self.total = [loop], float(total)


class _Loop:
    is_open = True


class Page:
    """Sections 1 and 2 of docs/exactness.md.

    A batch has a `loop`, which has `is_open`; a `number` in it; `is_last()`; and `ends_round`, with parts. An optimizer
    has `asked`, the time of its last request; `passed`, that of the last pass through its model; and `is_reduced`.
    """

    def __init__(self, k: float, ranks: int, parts: int = 0) -> None:
        self.k, self.ranks, self.parts, self.now, self.asked_last = k, ranks, parts, 0, 0
        self.state, self.visits = "collecting", list[Visit]()
        self.stepped, self.steps = set[Any](), 0
        self.seen, self.seen_before = dict[Any, int](), dict[Any, int]()
        self.block: object = None

    def is_over(self, time: int, reached: Sequence[Any]) -> bool:
        return all(each.asked >= time for each in reached)

    def last(self) -> list[Visit]:
        return [each for each in self.visits if each.microbatch == self.visits[-1].microbatch] if self.visits else []

    def are_joint(self, visits: list[Visit]) -> bool:
        microbatches = [each.microbatch for each in visits]
        return len(set(microbatches)) < len(microbatches) or {each.loops[0] is None for each in visits} == {True, False}

    def refuses(self, visit: Visit) -> bool:
        """Section 4: microbatches that count the same have one size in each loop; those so far were not scaled."""
        after = [*self.visits, visit]
        sizes = {(each.loops[0], each.total) for each in after}
        is_scaled = not self.are_joint(self.visits) and len({each.total for each in self.visits}) > 1
        return (
            self.are_joint(after)
            and not self.parts
            and (len(sizes) > len({each.loops[0] for each in after}) or is_scaled)
        )

    def weigh(self) -> list[float]:
        """Of each visit, the weight of a gradient that is the mean over all samples of its microbatch."""
        totals = [each.total for each in self.visits]
        if self.k == 1 or self.parts:  # of the sum over the virtual ranks, whose factor is 1 / V
            return [1.0 for _ in totals]
        if self.are_joint(self.visits):
            return [1 / len({each.microbatch for each in self.visits}) for _ in totals]
        return [each / sum(totals) if sum(totals) else 0.0 for each in totals]

    def find(self, source: object, reached: Sequence[Any]) -> Visit | None:
        """The visit that a pass would continue."""
        visit = next((each for each in reversed(self.visits) if each.source == source), None)
        is_over = visit is not None and source is not self.block and self.is_over(visit.began, reached)
        return None if is_over else visit

    def take_in(self, source: object, batch: Any, reached: Sequence[Any], total: float) -> Visit | None:
        """A pass. Returns its visit; None if it is refused."""
        visit = self.find(source, reached)
        if visit is None:
            if self.state == "taken":
                self.begin_step(self.steps + 1)
            self.now += 1
            visit = Visit(source, batch.loop if batch else None, total, self.now)
            last = self.last()
            joins = (
                last
                and self.block is None
                and self.k != math.inf
                and visit.loops[0] not in [each.loops[0] for each in last]
            )
            if joins and not self.is_over(last[0].microbatch, reached):
                visit.microbatch = last[0].microbatch
            if self.k > 1 and self.visits and self.refuses(visit):
                return None
            self.visits.append(visit)
        elif source is self.block:
            visit.loops += [batch.loop if batch else None]
        else:
            return visit
        is_new = batch is not None and batch.number > self.seen.get(batch.loop, 0)
        ends = self.k != math.inf and not self.parts and batch is not None and is_new and batch.is_last()
        is_full = len({each.microbatch for each in self.visits}) >= self.k
        if batch.ends_round if self.parts and batch is not None else self.k == 1 or ends or is_full:
            self.state = "taken" if self.state == "taken" else "final"
        if batch is not None:
            self.seen[batch.loop] = max(batch.number, self.seen.get(batch.loop, 0))
        return visit

    def begin_step(self, number: int) -> None:
        self.state, self.visits, self.stepped, self.steps = "collecting", [], set(), number
        self.seen_before = dict(self.seen)

    def request(self, optimizer: Any) -> bool:
        before = optimizer.asked
        self.now += 1
        optimizer.asked = self.asked_last = self.now
        if self.k == 1 or self.state == "final":
            return True
        if self.state == "taken":
            return optimizer not in self.stepped
        loops = [loop for each in self.last() for loop in each.loops if loop is not None]
        was_left = bool(loops) and not any(each.is_open for each in loops)
        return was_left and all(before > each.began for each in self.last())

    def take(self, optimizer: Any) -> None:
        self.now += 1
        self.state = "taken"
        self.stepped.add(optimizer)

    def zeroes(self, optimizer: Any, is_of_step: bool) -> bool:
        if self.k == 1 or self.parts or optimizer in self.stepped or not is_of_step:
            return True
        is_final = optimizer.is_reduced and optimizer.passed >= self.visits[-1].microbatch
        return is_final or optimizer.passed > self.asked_last

    def give_up(self) -> None:
        if self.state != "taken" and self.visits and not self.parts:
            self.seen = dict(self.seen_before)
            self.begin_step(self.steps)

    def resume(self, visits: Sequence[Visit]) -> None:
        """Continue in the middle of a step, with loops that go on: its visits are over for each optimizer."""
        last = max((each.microbatch for each in visits), default=0)
        self.visits = [copy.copy(each) for each in visits]
        going_on = {loop: _Loop() for each in visits for loop in each.loops if loop is not None}
        for each in self.visits:
            each.microbatch -= last
            each.loops = [going_on.get(loop) for loop in each.loops]
        self.now = self.asked_last = 1
