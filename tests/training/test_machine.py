"""The machine of a step against docs/exactness.md, written down once more from the page (`step_page.py`): random
scripts of passes, requests, `zero_grad()`, blocks and loops, in which both decide alike.

`python tests/training/test_machine.py 100000` plays as many.
"""

from __future__ import annotations

import ast
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from unisono.training import machine as real
from unisono.training import rules

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))

import exactness
from step_page import Page

RANKS = 4


def claim(total: float) -> Any:
    return SimpleNamespace(total=total, is_given=False, is_empty=False)


class Loop:
    """Of batches of one size, and a smaller last one."""

    def __init__(self, length: int, size: int = 4, tail: int = 4) -> None:
        self.length, self.number, self.is_open, self.size, self.tail = length, 0, True, size, tail


class Batch:
    def __init__(self, loop: Loop, each: float) -> None:
        loop.number += 1
        self.loop, self.number = loop, loop.number
        self.ends_round = loop.number % each == 0
        self.total = loop.tail if self.is_last() else loop.size

    def is_last(self) -> bool:
        return self.number == self.loop.length


class Optimizer:
    """Of one model. `passed` is when the last pass through that has left gradients, in `step`."""

    def __init__(self, held: real.Held) -> None:
        self.held = held
        self.step: object = None
        self.asked = self.passed = 0
        self.is_reduced = False


class Script:
    """One random script; the machine, and the page beside it."""

    def __init__(self, seed: int, module: Any = real) -> None:
        self.draw, self.module = random.Random(seed), module
        self.k = self.draw.choice([1, 2, 2, 3, math.inf])
        self.tail = self.draw.choice([4, 4, 3])
        self.parts = RANKS if self.k in (2, 3) and self.draw.random() < 0.3 else 0
        self.machine, self.page = module.Machine(self.k, self.parts), Page(self.k, RANKS, self.parts)
        self.optimizers = [Optimizer(module.Held(self.machine)) for _ in range(2)]
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
            for each in self.optimizers:
                self.same(each.held.is_current, each.step is step)
                self.same(each.held.reduced_by is not None, each.is_reduced)
                self.same(each.held.is_unreduced, each.step is not None and not each.is_reduced)
            factor = step.factor(RANKS) * RANKS  # the sum over the ranks of their parts
            for visit, weight in zip(step.visits, page.weigh(), strict=True):
                self.same(round(step.scale(visit) * factor, 9), round(weight, 9))
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
        loop = self.loops[place] = self.loops[place] or Loop(self.draw.randint(1, 5), tail=self.tail)
        if loop.number == loop.length:
            loop.is_open, self.loops[place] = False, None
            return f"end {place}"
        self.batches.append(Batch(loop, self.k))
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
        self.page.take_in(source, batch, reached, RANKS if batch is None else batch.total)
        machine = self.machine
        step, known = machine.find_visit(source, lambda: reached)
        if known is None:
            visit = machine.begin_visit(source, batch, claim(RANKS if batch is None else batch.total))
            if step.visits:
                machine.join_microbatch(visit, step, lambda: reached)
                if self.k > 1 and step.misfit(visit):
                    return "pass refused"
            machine.add_visit(step, visit)
        else:
            machine.continue_visit(known, batch)
        is_final = self.page.state != "collecting" and self.draw.random() < 0.8  # else, as in no_sync()
        for each in reached:
            each.step, each.passed, each.is_reduced = machine.step, self.page.now, is_final
            each.held.note_pass()
            if is_final:
                each.held.note_reduction(1.0)
        return f"pass {'-' if batch is None else batch.number} to {len(reached)}"

    def ask(self) -> str:
        optimizer = self.draw.choice(self.optimizers)
        expected = self.page.request(optimizer)
        is_taken = self.machine.request(optimizer)
        self.same(is_taken, expected)
        if is_taken:
            self.page.take(optimizer)
            self.machine.take_step(optimizer)
        self.same(self.machine.has_stepped(optimizer), optimizer in self.page.stepped)
        return f"step {self.optimizers.index(optimizer)}: {is_taken}"

    def zero(self) -> str:
        optimizer = self.draw.choice(self.optimizers)
        may = self.machine.zeroes(optimizer, [optimizer.held])
        self.same(may, self.page.zeroes(optimizer, optimizer.step is self.machine.step))
        if may:
            optimizer.step, optimizer.is_reduced = None, False
            optimizer.held.note_zeros()
            if not any(each.step is self.machine.step for each in self.optimizers):
                self.machine.drop_step()
                self.page.give_up()
        return f"zero {self.optimizers.index(optimizer)}: {may}"


def play(seeds: range, module: Any = real) -> None:
    for seed in seeds:
        Script(seed, module).play()


def test_the_machine_decides_as_the_page_says_in_random_scripts() -> None:
    play(range(1500))


def test_the_machine_knows_no_tensor_and_no_rank() -> None:
    for module in (real, rules):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        found = [each.module for each in tree.body if isinstance(each, ast.ImportFrom)]
        found += [name.name for each in tree.body if isinstance(each, ast.Import) for name in each.names]
        known = {*sys.stdlib_module_names, rules.__name__}
        assert known.issuperset(each if each == rules.__name__ else str(each).partition(".")[0] for each in found)


def test_the_page_shows_the_rules_by_which_the_machine_decides() -> None:
    page = exactness.PAGE.read_text()
    assert exactness.fill(page) == page, "run `python docs/generate/exactness.py`"


def build(module: Any, source: str) -> Any:
    found = ModuleType("changed")
    exec(compile(source, "changed", "exec"), vars(found))
    return found if module is real else with_rules(found)


def with_rules(found: Any) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, rules.__name__, found)
        return build(real, Path(str(real.__file__)).read_text())


def without(rule: rules.Rule) -> Any:
    source = Path(str(rules.__file__)).read_text()
    before, rest = source.split("class Policy:")
    kept = f"RULES = tuple(each for each in RULES if each != {tuple(rule)!r})"
    return build(rules, f"{before}{kept}\n\n\nclass Policy:{rest}")


def test_each_rule_is_needed() -> None:
    for rule in rules.RULES:
        print(rule)
        with pytest.raises((AssertionError, AttributeError, LookupError, TypeError, ValueError)):
            play(range(3000), without(rule))


if __name__ == "__main__":
    play(range(int(sys.argv[1])))
