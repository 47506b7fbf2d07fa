"""The rules of a step, as data: what each event leads to in each of its states, and what k decides. docs/exactness.md
shows them; `machine.py` plays by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from unisono.batches.deliveries import Batch
    from unisono.training.machine import Held, Machine, Step

COLLECTING = "collecting"  # fewer microbatches than a step has
FINAL = "final"  # all of them: the gradients are reduced, and are those of the step
TAKEN = "taken"  # an optimizer has stepped

VISIT = "the first pass of a new visit"
PASS = "a pass of the step"
REQUEST = "`step()`"
STEP = "an optimizer steps"
ZERO = "`zero_grad()`"
ZEROED = "all gradients are zero"


class Rule(NamedTuple):
    """What an event leads to in a state, if the condition holds, a method of `Policy`: another state, or an answer.

    The first rule that applies decides. If none does, the state stays, and the answer is no.
    """

    state: str
    event: str
    condition: str
    then: str


YES = "yes"  # a request is taken, gradients are zeroed

RULES = (
    Rule(COLLECTING, PASS, "completes", FINAL),
    Rule(COLLECTING, REQUEST, "was_left", YES),
    Rule(FINAL, REQUEST, "", YES),
    Rule(TAKEN, REQUEST, "is_of_another", YES),
    *(Rule(state, STEP, "", TAKEN) for state in (COLLECTING, FINAL)),
    Rule(TAKEN, VISIT, "", COLLECTING),
    *(Rule(state, ZERO, "holds_nothing", YES) for state in (COLLECTING, FINAL, TAKEN)),
    *(Rule(state, ZERO, "is_abandoned", YES) for state in (COLLECTING, FINAL, TAKEN)),
    *(Rule(state, ZERO, "is_complete", YES) for state in (FINAL, TAKEN)),
    Rule(TAKEN, ZERO, "has_stepped", YES),
    *(Rule(state, ZEROED, "", COLLECTING) for state in (COLLECTING, FINAL)),
)


def always(*_: object) -> bool:
    """always"""
    return True


def never(*_: object) -> bool:
    """never"""
    return False


class Policy:
    """k > 1: the gradients of a step are the mean over the samples of k microbatches.

    The conditions of `RULES`, whose docstrings are the words of the page.

    Attributes:
        every: k; math.inf if the user decides by stepping.
        is_mean: whether the gradients of a step are a mean over its microbatches; otherwise, the sum of the means of
            whatever passes it has, as in a plain script.
        is_counted: whether the number of microbatches ends a step.
        parts: with virtual ranks their number: a step is a round, and a microbatch the part of one; otherwise 0.
        joins: whether losses of several loops may be one microbatch.
        sure: of `rules`, those whose first has no condition, since each pass looks them up.
        rules: what an event leads to in a state: the first whose condition holds.
    """

    is_mean = is_counted = joins = True

    def __init__(self, every: float, parts: int = 0) -> None:
        self.every, self.parts = every, parts
        self.sure: dict[tuple[str, str], str] = {}
        self.rules: dict[tuple[str, str], list[tuple[Callable[..., bool], str]]] = {}
        for state, event, name, then in RULES:
            condition = getattr(self, name) if name else always
            if condition is always and (state, event) not in self.rules:
                self.sure.setdefault((state, event), then)
            self.rules.setdefault((state, event), []).append((condition, then))

    def completes(self, machine: Machine, step: Step, batch: Batch | None, more: int = 0) -> bool:
        """it belongs to the k-th microbatch, or to the first visit of the last batch of a loop (of a round)"""
        if self.parts and batch is not None:
            return batch.ends_round
        # `is_last` may wait for the loader, so it is asked only where the count does not decide.
        return step.count + more >= self.every or machine.ends_loop(batch)

    def was_left(self, machine: Machine, optimizer: Optimizer, before: int) -> bool:
        """the loops of its last microbatch were left, and this is the second request with no pass before it"""
        last = machine.step.current()
        loops = [loop for each in last for loop in each.loops]
        return bool(loops) and not any(each.is_open for each in loops) and all(before > each.began for each in last)

    def is_of_another(self, machine: Machine, optimizer: Optimizer, before: int) -> bool:
        """this optimizer has not stepped on it"""
        return not machine.has_stepped(optimizer)

    def holds_nothing(self, machine: Machine, optimizer: Optimizer, held: Sequence[Held]) -> bool:
        """the optimizer's models hold no gradients of the step"""
        return not held

    def is_abandoned(self, machine: Machine, optimizer: Optimizer, held: Sequence[Held]) -> bool:
        """no request was made since the last pass through its models"""
        return any(each.at > machine.requested for each in held)

    def is_complete(self, machine: Machine, optimizer: Optimizer, held: Sequence[Held]) -> bool:
        """the last microbatch had a pass through one of its models, which is reduced"""
        # Not by a pass through another model, which one through its own may follow in the same microbatch.
        since = machine.step.visits[-1].microbatch
        return any(each.at >= since and each.reduced_by is not None for each in held)

    def has_stepped(self, machine: Machine, optimizer: Optimizer, held: Sequence[Held]) -> bool:
        """the optimizer has stepped on it"""
        return machine.has_stepped(optimizer)


class Plain(Policy):
    """k = 1: the gradients of a step are the sum of what passes have left, as in a plain script."""

    is_mean = is_counted = False
    completes = was_left = is_of_another = holds_nothing = staticmethod(always)  # type: ignore[assignment]


class ByHand(Policy):
    """By hand: the gradients of a step are the mean over the samples of all microbatches before a step."""

    is_counted = joins = False
    completes = staticmethod(never)  # type: ignore[assignment]


def policy_of(every: float, parts: int = 0) -> Policy:
    """The policy of steps of that many microbatches; `parts` as in `Policy`."""
    if parts:
        return Policy(every, parts)
    return Plain(every) if every == 1 else ByHand(every) if every == math.inf else Policy(every)
