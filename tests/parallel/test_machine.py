"""The machine of a step against docs/exactness.md, written down once more from the page: random scripts of passes,
requests, `zero_grad()`, blocks and loops, in which both decide alike. `python tests/parallel/test_machine.py 100000`
plays as many; with `mutants`, it changes each condition of the machine in turn, and says which changes nobody notices.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from unisono.parallel import machine as real

CLAIM = SimpleNamespace(total=1.0, is_empty=False)


class Loop:
    def __init__(self, length: int) -> None:
        self.length, self.number, self.is_open = length, 0, True


class Batch:
    def __init__(self, loop: Loop) -> None:
        loop.number += 1
        self.loop, self.number = loop, loop.number

    def is_last(self) -> bool:
        return self.number == self.loop.length


class Optimizer:
    """Of one model; `passed` is when the last pass through that has left gradients, and in which step."""

    def __init__(self) -> None:
        self.passed: tuple[Any, int] | None = None
        self.asked = 0
        self.is_reduced = False


class PageVisit:
    def __init__(self, source: object, batch: Batch | None, time: int) -> None:
        self.source, self.began, self.microbatch = source, time, time
        self.loops = [batch.loop if batch else None]


class Page:
    """Sections 1 and 2 of docs/exactness.md."""

    def __init__(self, k: float) -> None:
        self.k, self.now, self.asked_last = k, 0, 0
        self.state, self.visits = "collecting", list[PageVisit]()
        self.stepped, self.steps = set[Optimizer](), 0
        self.seen, self.seen_before = dict[Loop, int](), dict[Loop, int]()
        self.block: object = None

    def is_over(self, time: int, reached: list[Optimizer]) -> bool:
        return all(each.asked >= time for each in reached)

    def last(self) -> list[PageVisit]:
        return [each for each in self.visits if each.microbatch == self.visits[-1].microbatch] if self.visits else []

    def take_in(self, source: object, batch: Batch | None, reached: list[Optimizer]) -> None:
        visit = next((each for each in reversed(self.visits) if each.source is source), None)
        if visit is None or (source is not self.block and self.is_over(visit.began, reached)):
            if self.state == "taken":
                self.begin_step(self.steps + 1)
            self.now += 1
            visit = PageVisit(source, batch, self.now)
            last = self.last()
            joins = last and self.block is None and visit.loops[0] not in [each.loops[0] for each in last]
            if joins and not self.is_over(last[0].microbatch, reached):
                visit.microbatch = last[0].microbatch
            self.visits.append(visit)
        elif source is self.block:
            visit.loops += [batch.loop if batch else None]
        else:
            return
        is_new = batch is not None and batch.number > self.seen.get(batch.loop, 0)
        ends = batch is not None and is_new and batch.is_last()
        if self.k == 1 or ends or len({each.microbatch for each in self.visits}) >= self.k:
            self.state = "taken" if self.state == "taken" else "final"
        if batch is not None:
            self.seen[batch.loop] = max(batch.number, self.seen.get(batch.loop, 0))

    def begin_step(self, number: int) -> None:
        self.state, self.visits, self.stepped, self.steps = "collecting", [], set(), number
        self.seen_before = dict(self.seen)

    def request(self, optimizer: Optimizer) -> bool:
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

    def take(self, optimizer: Optimizer) -> None:
        self.now += 1
        self.state = "taken"
        self.stepped.add(optimizer)

    def zeroes(self, optimizer: Optimizer, is_of_step: bool) -> bool:
        if self.k == 1 or optimizer in self.stepped or not is_of_step or optimizer.passed is None:
            return True
        is_final = optimizer.is_reduced and optimizer.passed[1] >= self.visits[-1].microbatch
        return is_final or optimizer.passed[1] > self.asked_last

    def give_up(self) -> None:
        if self.state != "taken" and self.visits:
            self.seen = dict(self.seen_before)
            self.begin_step(self.steps)


class Script:
    """One random script; the machine, and the page beside it."""

    def __init__(self, seed: int, module: Any = real) -> None:
        self.draw, self.module = random.Random(seed), module
        self.k = self.draw.choice([1, 2, 2, 3])
        self.machine, self.page = module.Machine(self.k), Page(self.k)
        self.optimizers = [Optimizer() for _ in range(2)]
        self.loops: list[Loop | None] = [None, None]
        self.batches: list[Batch] = []
        self.block: Any = None
        self.log: list[str] = []

    def play(self) -> None:
        events: list[tuple[int, Callable[[], str]]] = [
            (30, self.draw_batch), (40, self.pass_on), (25, self.ask), (20, self.zero), (4, self.leave), (6, self.turn),
        ]  # fmt: skip
        weights, acts = zip(*events, strict=True)
        for _ in range(self.draw.randint(5, 40)):
            self.log.append(self.draw.choices(acts, weights)[0]())
            step, page = self.machine.step, self.page
            self.same(step.state, page.state)
            self.same(step.count, len({each.microbatch for each in page.visits}))
            self.same(self.machine.begins_step(), page.state == "taken" or not page.visits)
            if page.visits or page.state == "taken" or self.k == 1:
                self.machine.origin = None
                expected = self.k == 1 or page.state != "collecting"
                is_counted = self.block is None or any(each.source is self.page.block for each in page.visits)
                if is_counted:
                    self.same(self.machine.is_boundary(), expected)

    def same(self, found: object, expected: object) -> None:
        assert found == expected, (
            f"k={self.k}: {found} where the page has {expected}, after {'; '.join(self.log[-14:])}"
        )

    def draw_batch(self) -> str:
        place = self.draw.randrange(2)
        loop = self.loops[place] = self.loops[place] or Loop(self.draw.randint(1, 5))
        if loop.number == loop.length:
            loop.is_open, self.loops[place] = False, None
            return f"end {place}"
        self.batches.append(Batch(loop))
        return f"draw {place}"

    def leave(self) -> str:
        place = self.draw.randrange(2)
        loop, self.loops[place] = self.loops[place], None
        if loop is not None:
            loop.is_open = False
        return f"leave {place}"

    def turn(self) -> str:
        """Into a block, or out of it."""
        if self.block is None:
            self.block = self.machine.in_block()
            self.block.__enter__()
            self.page.block = self.machine.block
            return "block"
        self.block.__exit__(None, None, None)
        self.block = self.page.block = None
        return "end of block"

    def pass_on(self) -> str:
        batch = self.draw.choice([*self.batches[-3:], None])
        reached = self.optimizers if self.draw.random() < 0.5 else [self.draw.choice(self.optimizers)]
        source = self.machine.block or batch or self.module.ELSEWHERE
        self.page.take_in(source, batch, reached)
        machine = self.machine
        step, known = machine.find(source, lambda: reached)
        if known is None:
            visit = machine.begin(source, batch, CLAIM)
            if step.visits:
                machine.join(visit, step, lambda: reached)
            machine.add(step, visit)
        else:
            machine.go_on(known, batch)
        for each in reached:
            each.passed, each.is_reduced = (machine.step, machine.now), machine.step.state != "collecting"
        return f"pass {'-' if batch is None else batch.number} to {len(reached)}"

    def ask(self) -> str:
        optimizer = self.draw.choice(self.optimizers)
        expected = self.page.request(optimizer)
        is_taken = self.machine.request(optimizer)
        self.same(is_taken, expected)
        if is_taken:
            self.page.take(optimizer)
            self.machine.close(optimizer)
        self.same(self.machine.has_stepped(optimizer), optimizer in self.page.stepped)
        return f"step {self.optimizers.index(optimizer)}: {is_taken}"

    def zero(self) -> str:
        optimizer = self.draw.choice(self.optimizers)
        is_of_step = optimizer.passed is not None and optimizer.passed[0] is self.machine.step
        may = self.machine.may_zero(optimizer, [optimizer.passed], optimizer.is_reduced)
        self.same(may, self.page.zeroes(optimizer, is_of_step))
        if may:
            optimizer.passed, optimizer.is_reduced = None, False
            if all(each.passed is None or each.passed[0] is not self.machine.step for each in self.optimizers):
                self.machine.give_up()
                self.page.give_up()
        return f"zero {self.optimizers.index(optimizer)}: {may}"


def play(seeds: range, module: Any = real) -> None:
    for seed in seeds:
        Script(seed, module).play()


def test_the_machine_decides_as_the_page_says_in_random_scripts() -> None:
    play(range(2000))


def test_the_machine_knows_no_tensor_and_no_rank() -> None:
    tree = ast.parse(Path(str(real.__file__)).read_text())
    found = [each.module for each in tree.body if isinstance(each, ast.ImportFrom)]
    found += [name.name for each in tree.body if isinstance(each, ast.Import) for name in each.names]
    assert sys.stdlib_module_names.issuperset(str(each).partition(".")[0] for each in found)


# Each changes one condition of the machine; not those that only save time, as `every == 1` before the count does.
MUTANTS = [
    ("source is not self.block and self._is_over", "self._is_over"),
    ("known is not None and source is not self.block", "source is not self.block"),
    ("known is None and step.state == TAKEN", "known is None and step.state == FINAL"),
    ("if known.source is self.block:", "if known.source is not self.block:"),
    ("if batch is not None and batch.loop not in known.loops:", "if False:"),
    ("joins = self.block is None and", "joins ="),
    ("and all(each.loop is not visit.loop for each in current)", ""),
    ("and all(each.loop is not visit.loop for each in current)", "and current[0].loop is not visit.loop"),
    ("if joins and not self._is_over(current[0].microbatch, optimizers):", "if joins:"),
    ("if joins and not self._is_over(current[0].microbatch, optimizers):",
     "if joins and not self._is_over(current[-1].began, optimizers):"),
    ("step.count >= step.every or", "step.count > step.every or"),
    ("step.count >= step.every or self.ends_loop(batch)", "step.count >= step.every"),
    ("TAKEN if step.state == TAKEN else FINAL", "FINAL"),
    ("self._visited[batch.loop] = max(batch.number, known)", "self._visited[batch.loop] = batch.number"),
    ("step.visited.setdefault(batch.loop, known)", "step.visited[batch.loop] = known"),
    ("return all(self._requests_of(each).at", "return any(self._requests_of(each).at"),
    ("batch.number > self._visited.get(batch.loop, 0) and batch.is_last()", "batch.is_last()"),
    ("batch.number > self._visited.get(batch.loop, 0) and batch.is_last()",
     "batch.number >= self._visited.get(batch.loop, 0) and batch.is_last()"),
    ("if step.every == 1 or step.state == FINAL:", "if step.state == FINAL:"),
    ("if step.every == 1 or step.state == FINAL:", "if step.every == 1:"),
    ("return requests.stepped is not step", "return False"),
    ("return requests.stepped is not step", "return True"),
    ("return bool(loops) and not any", "return not any"),
    ("not any(each.is_open for each in loops)", "not all(each.is_open for each in loops)"),
    ("and all(before > each.began for each in last)", ""),
    ("all(before > each.began for each in last)", "any(before > each.began for each in last)"),
    ("self.step.state = TAKEN", "pass"),
    ("if step.every == 1 or self.has_stepped(optimizer):", "if step.every == 1:"),
    ("if step.every == 1 or self.has_stepped(optimizer):", "if self.has_stepped(optimizer):"),
    ("each is not None and each[0] is step", "each is not None"),
    ("is_reduced and any(at >= step.visits[-1].microbatch for at in times)", "is_reduced"),
    ("is_reduced and any(at >= step.visits[-1].microbatch for at in times)", "bool(times)"),
    ("any(at >= step.visits[-1].microbatch", "any(at >= step.visits[-1].began"),
    ("return not times or is_final or", "return is_final or"),
    ("return not times or is_final or", "return not times or"),
    ("or any(at > self.requested for at in times)", ""),
    ("or any(at > self.requested for at in times)", "or any(at >= self.requested for at in times)"),
    ("if self.step.state != TAKEN and self.step.visits:", "if self.step.visits:"),
    ("self._visited.update(self.step.visited)", "pass"),
    ("return step.state != COLLECTING", "return step.state == FINAL"),
    ("return self.step.state == TAKEN or not self.step.visits", "return not self.step.visits"),
]  # fmt: skip


def mutant(before: str, after: str) -> Any:
    """The machine with that change."""
    source = Path(str(real.__file__)).read_text()
    assert source.count(before) == 1, f"{before!r} is {source.count(before)} times in the machine"
    found = ModuleType("mutant")
    exec(compile(source.replace(before, after), "mutant", "exec"), vars(found))
    return found


def survivors(seeds: range) -> Iterator[tuple[str, str]]:
    for before, after in MUTANTS:
        try:
            play(seeds, mutant(before, after))
        except Exception:
            continue
        yield before, after


def test_each_condition_of_the_machine_is_needed() -> None:
    assert not list(survivors(range(3000)))


if __name__ == "__main__":
    if sys.argv[1] == "mutants":
        print(*(f"survives: {before!r} -> {after!r}" for before, after in survivors(range(20_000))), sep="\n")
    else:
        play(range(int(sys.argv[1])))
