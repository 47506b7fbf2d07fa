"""The machine of a step: which passes are one microbatch, and which microbatches one step; when a step is final; which
requests are taken; what `zero_grad()` zeroes; what each microbatch weighs. docs/exactness.md says the same in words,
and shows `RULES`, the table that decides.

It knows neither tensors nor ranks: batches, loops, optimizers and claims are given to it, and it asks a batch only for
its loop, its number and whether it is the loop's last.

Invariants:
1. `add_visit` adds to a step, `take_step` takes it, `drop_step` drops it; `request` notes the time. Questions change
   nothing.
2. All ranks reach the same states at the same passes and requests: what decides is equal on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from unisono.training.rules import COLLECTING, FINAL, PASS, REQUEST, STEP, TAKEN, VISIT, ZERO, ZEROED, Policy, policy_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from unisono.batches.deliveries import Batch, Loop
    from unisono.training.claims import Claim, Origin

ELSEWHERE = object()  # stands for the batch, and the loop, of data from no loader


class Visit:
    """One use of a batch between two requests of an optimizer.

    Attributes:
        source: the batch; or the `accumulate()` block, or what stands for data from no loader, which has no batch.
        loops: of all its batches; a block may have several.
        began: the logical time of its first pass (`Machine.now`).
        microbatch: the time of the first pass of its microbatch, which identifies it within the step.
    """

    __slots__ = ("batch", "began", "claim", "loops", "microbatch", "source")

    def __init__(self, source: object, batch: Batch | None, claim: Claim, began: int, microbatch: int) -> None:
        self.source, self.batch, self.claim, self.began, self.microbatch = source, batch, claim, began, microbatch
        self.loops: tuple[Loop, ...] = () if batch is None else (batch.loop,)

    @property
    def loop(self) -> object:
        """Losses of different loops may be one microbatch."""
        return ELSEWHERE if self.batch is None else self.batch.loop


class Step:
    """The visits whose gradients an optimizer applies together, in the order of their first passes.

    Attributes:
        number: from 1 on; a step that was dropped does not count.
        latest: the latest visit of each source.
        visited: for each loop, the number of the latest batch that was visited before this step.
    """

    __slots__ = ("latest", "number", "policy", "state", "visited", "visits")

    def __init__(self, policy: Policy, number: int = 1) -> None:
        self.policy, self.number = policy, number
        self.visits: list[Visit] = []
        self.latest: dict[object, Visit] = {}
        self.visited: dict[Loop, int] = {}
        self.state = COLLECTING

    @property
    def count(self) -> int:
        """The number of its microbatches."""
        return len({each.microbatch for each in self.visits})

    def current(self) -> list[Visit]:
        """The visits of its last microbatch."""
        return [each for each in self.visits if each.microbatch == self.visits[-1].microbatch]

    @property
    def last(self) -> Batch | None:
        """The batch visited last."""
        return self.visits[-1].batch if self.visits else None

    @property
    def is_joint(self) -> bool:
        """Whether its microbatches do not form a sequence of samples: some have several losses, or unknown sizes."""
        return _are_joint(self.visits)

    # The numbers of docs/exactness.md, "The weights".

    def scale(self, visit: Visit) -> float:
        """The size of that visit's batch against the step's first: a factor for all that its passes compute."""
        if not self.policy.is_mean or self.policy.parts or self.is_joint:
            return 1.0
        return visit.claim.total / (_unit(self.visits) or 1)

    def factor(self, ranks: int) -> float:
        """The factor for the accumulated gradients, in the reduction that makes them those of the step."""
        if not self.policy.is_mean or self.policy.parts:
            return 1 / ranks
        if self.is_joint:
            return 1 / (ranks * self.count)
        total = sum(each.claim.total for each in self.visits)
        # Where nothing counts, the gradients are a penalty's, alike on all ranks.
        return _unit(self.visits) / (ranks * total) if total else 1 / ranks

    def misfit(self, visit: Visit) -> Misfit | None:
        """Why that visit cannot be one of the step: there would be no such numbers. None if it can."""
        visits = [*self.visits, visit]
        # Samples and the user's numbers, such as tokens, have different units: their sum W would mean nothing.
        if any(each.claim.is_given != visit.claim.is_given for each in visits):
            return Misfit(UNITS)
        if self.policy.parts or not _are_joint(visits):
            return None
        unit = 0.0 if self.is_joint else _unit(self.visits)  # the scale of those before, if they were scaled
        firsts: dict[object, float] = {}
        for each in visits:
            first = firsts.setdefault(each.loop, each.claim.total)
            was_scaled = not self.is_joint and each is not visit and each.claim.total != unit
            if each.claim.total != first or was_scaled:
                return Misfit(SIZES, each.claim.total, first)
        return None

    def is_empty(self) -> bool:
        """Whether nothing counts in this step, on any rank: then there is no mean to take the gradient of."""
        for each in self.visits:
            if each.claim.total:
                return False
        return bool(self.visits)

    def num_dealt(self) -> int:
        """The number of batches of the user's loader in the step; if microbatches have losses of several loops, of the
        first loop of each."""
        if len(self.visits) == 1 or self.policy.parts:
            batch = self.visits[0].batch
            return 1 if batch is None else batch.dealt
        counted: dict[int, Visit] = {}
        for each in self.visits:
            counted.setdefault(each.microbatch, each)
        return sum(1 if each.batch is None else each.batch.dealt for each in counted.values())

    def per_device_step(self) -> float:
        """The number of microbatches that make a step of one device: k, or this step's, if the user steps by hand."""
        if self.policy.parts:
            return 1
        if self.policy.is_counted:
            return self.policy.every
        return self.count if len(self.visits) > 1 else 1

    def place(self) -> str:
        """Describe where this rank is: equal on all ranks, unless they have lost step."""
        batches = list(filter(None, map(attrgetter("batch"), self.visits)))
        if not batches:
            return f"step {self.number}" + (f" ({self.count} microbatches of no loader)" if self.count > 1 else "")
        if self.policy.parts:  # ranks may have different numbers of them
            return f"step {self.number} (round {batches[-1].mark:08x})"
        return f"step {self.number} ({name_batches(batches)})"


def _are_joint(visits: Sequence[Visit]) -> bool:
    if len(visits) < 2:
        return False
    microbatches, are_dealt = {each.microbatch for each in visits}, {each.batch is None for each in visits}
    return len(microbatches) < len(visits) or len(are_dealt) > 1


def _unit(visits: Sequence[Visit]) -> float:
    """U: the first total; 0 if nothing counts."""
    # Microbatches in which nothing counts on any rank are passed over: U is a divisor.
    return next((each.claim.total for each in visits if each.claim.total), 0.0)


UNITS, SIZES = "units", "sizes"


class Misfit(NamedTuple):
    """Why a visit cannot be one of a step: some of its claims are the user's numbers, and others samples (`UNITS`); or
    its microbatches count the same, and the batches of a loop differ in size (`SIZES`)."""

    reason: str
    total: float = 0.0
    first: float = 0.0


class Held:
    """What `.grad` of one model holds on this rank.

    Attributes:
        step, at: the step of the last counted backward pass through the model, and its time (`Machine.now`); None if
            the gradients are zero.
        reduced_by: the factor of their reduction over the ranks; None if they are not reduced.
        is_divided: whether they are what a reduction has left, so that the next one multiplies again.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.step: Step | None = None
        self.at = 0
        self.reduced_by: float | None = None
        self.is_divided = False

    @property
    def is_current(self) -> bool:
        """Whether they are of the step that the rank is in."""
        return self.step is self._machine.step

    @property
    def is_unreduced(self) -> bool:
        """Whether counted passes have left them on this rank alone."""
        return self.step is not None and self.reduced_by is None

    def note_pass(self) -> None:
        """Note that a counted backward pass adds to them, or that they were assigned."""
        self.step, self.at, self.reduced_by = self._machine.step, self._machine.now, None

    def note_reduction(self, factor: float) -> None:
        """Note that they were reduced, by that factor."""
        if self.step is None:
            self.note_pass()
        self.reduced_by, self.is_divided = factor, False

    def note_zeros(self) -> None:
        """Note that they are zero."""
        self.step = self.reduced_by = None
        self.is_divided = False

    def resume(self) -> None:
        """Note that they are those of the current step so far."""
        self.step, self.at, self.reduced_by = self._machine.step, 0, None


def name_batches(batches: Sequence[Batch]) -> str:
    """Describe a rank's batches in words that are equal on another rank if its batches are of the same rounds."""
    last = batches[-1]
    numbers = [last.number] if len(batches) == 1 else [each.number for each in batches if each.loop is last.loop]
    names = f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {', '.join(map(str, numbers))}"
    return f"{names} of its loop{f', round {last.mark:08x}' if last.mark else ''}"


class _Requests:
    """The requests of an optimizer: the time of the last one; the step that it has stepped on last, and when."""

    __slots__ = ("at", "stepped", "stepped_at")

    def __init__(self) -> None:
        self.at = self.stepped_at = 0
        self.stepped: Step | None = None


class Machine:
    """Where one rank's training loop is.

    Attributes:
        policy: of the next step.
        origin: of the last forward pass; None after a pass or a request.
        block: stands for the batch in an `accumulate()` block.
        now: a logical time, counted over visits and requests: what began at a time is over for an optimizer that has
            made a request since.
        requested: the time of the last request of any optimizer.
    """

    def __init__(self, every: float = 1, parts: int = 0) -> None:
        self.policy = policy_of(every, parts)
        self.block: object = None
        # Weak: a rank keeps its steps, and must not keep an optimizer alive that the user has dropped.
        self._requests: dict[ref[Optimizer], _Requests] = {}
        self._visited: WeakKeyDictionary[Loop, int] = WeakKeyDictionary()  # the number of the latest batch visited
        self.restart()

    def restart(self) -> None:
        """The rank's loop starts again; where it was before, the ranks need not agree."""
        self.origin: Origin | None = None
        self._requests.clear()
        self._visited.clear()
        self.now = self.requested = 0
        self.step = Step(self.policy)

    def set_every(self, every: int) -> None:
        """Set k from the next step on: one that has begun is not affected."""
        self.policy = policy_of(every)
        if not self.step.visits:
            self.step.policy = self.policy

    @contextmanager
    def in_block(self) -> Iterator[None]:
        """The block is one visit, whatever passes it has."""
        before, self.block = self.block, object()
        try:
            yield
        finally:
            self.block = before

    def _decide(self, event: str, *facts: Any) -> str | None:
        """What the event leads to, by `RULES`."""
        for condition, then in self.step.policy.rules.get((self.step.state, event), ()):
            if condition(self, *facts):
                return then
        return None

    # A pass.

    def find_visit(self, source: object, optimizers: Callable[[], Collection[Optimizer]]) -> tuple[Step, Visit | None]:
        """The step that a pass on that source belongs to, perhaps a new one, and the visit, if it has begun before;
        `optimizers` returns those of the models that the pass reaches."""
        step = self.step
        known = step.latest.get(source)
        if known is not None and source is not self.block and self._is_over(known.began, optimizers):
            known = None
        if known is None and (step.state, VISIT) in step.policy.sure:
            step = Step(self.policy, step.number + bool(step.visits))
        return step, known

    def skip_pass(self, step: Step, known: Visit | None, source: object, batch: Batch, claim: Claim) -> Visit:
        """Note a pass on a batch in which nothing counts: it is known, but not a visit of the step."""
        self.step, self.now = step, self.now + 1
        return known or step.latest.setdefault(source, Visit(source, batch, claim, self.now, self.now))

    def continue_visit(self, known: Visit, batch: Batch | None) -> None:
        """Note another pass of a visit: a block may move to another loop, and to the last batch of one."""
        if known.source is self.block:
            if batch is not None and batch.loop not in known.loops:
                known.loops += (batch.loop,)
            self._note_batch(batch)

    def begin_visit(self, source: object, batch: Batch | None, claim: Claim) -> Visit:
        """A visit that begins now; `add_visit` makes it one of the step."""
        self.now += 1
        return Visit(source, batch, claim, self.now, self.now)

    def join_microbatch(self, visit: Visit, step: Step, optimizers: Callable[[], Collection[Optimizer]]) -> None:
        """Make a new visit one of the step's last microbatch, if that has none of its loop yet."""
        current = step.current()
        joins = self.block is None and step.policy.joins and all(each.loop is not visit.loop for each in current)
        if joins and not self._is_over(current[0].microbatch, optimizers):
            visit.microbatch = current[0].microbatch

    def add_visit(self, step: Step, visit: Visit) -> None:
        """Make a visit one of the step, which may become final by it."""
        self.step = step
        step.visits.append(visit)
        step.latest[visit.source] = visit
        self._note_batch(visit.batch)

    def _note_batch(self, batch: Batch | None) -> None:
        """Make the step final, if the batch of its latest visit ends it."""
        step = self.step
        step.state = step.policy.sure.get((step.state, PASS)) or self._decide(PASS, step, batch) or step.state
        if batch is not None and step.policy.is_mean:
            known = self._visited.get(batch.loop, 0)
            step.visited.setdefault(batch.loop, known)
            self._visited[batch.loop] = max(batch.number, known)

    def _is_over(self, began: int, optimizers: Callable[[], Collection[Optimizer]]) -> bool:
        """Whether every optimizer of the models that a pass reaches has requested a step since that time."""
        if self.requested < began:  # spares looking the optimizers up
            return False
        return all(self._requests_of(each).at >= began for each in optimizers())

    def ends_loop(self, batch: Batch | None) -> bool:
        """Whether a visit of this batch would be the first of its loop's last one."""
        return batch is not None and batch.number > self._visited.get(batch.loop, 0) and batch.is_last()

    # A request.

    def _requests_of(self, optimizer: Optimizer) -> _Requests:
        known = self._requests.get(ref(optimizer))
        if known is None:
            requests = self._requests
            # Garbage may be collected in another rank's thread, while this one restarts: then there is nothing to pop.
            known = requests[ref(optimizer, lambda key: requests.pop(key, None))] = _Requests()
        return known

    def request(self, optimizer: Optimizer) -> bool:
        """Note that a step is requested: return whether it is taken."""
        step, requests = self.step, self._requests.get(ref(optimizer)) or self._requests_of(optimizer)
        self.origin, before = None, requests.at
        self.now += 1
        self.requested = requests.at = self.now
        return (step.state, REQUEST) in step.policy.sure or self._decide(REQUEST, optimizer, before) is not None

    def take_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        step, requests = self.step, self._requests.get(ref(optimizer)) or self._requests_of(optimizer)
        self.now += 1  # later than gradients that were assigned, which count at the step
        requests.stepped, requests.stepped_at = step, self.now
        step.state = step.policy.sure.get((step.state, STEP), step.state)

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has stepped on the current step."""
        return self._requests_of(optimizer).stepped is self.step

    def stepped_at(self, optimizer: Optimizer) -> int:
        """When the optimizer has stepped last; 0 if it has not."""
        return self._requests_of(optimizer).stepped_at

    def zeroes(self, optimizer: Optimizer, held: Sequence[Held]) -> bool:
        """Whether `zero_grad()` zeroes what the optimizer's models hold; between microbatches that is kept."""
        step = self.step
        if (step.state, ZERO) in step.policy.sure or step.policy.parts:  # what was asked for is set aside
            return True
        return self._decide(ZERO, optimizer, [each for each in held if each.step is step]) is not None

    def drop_step(self) -> None:
        """Note that all gradients are zero: the next visit begins a step."""
        step = self.step
        if (step.state, ZEROED) in step.policy.sure and step.visits and not step.policy.parts:
            self._visited.update(step.visited)
            self.step = Step(self.policy, step.number)

    def resume(self, step: Step) -> None:
        """Continue in the middle of a step; its last visit is over."""
        self.step, step.policy = step, self.policy
        last = max((each.microbatch for each in step.visits), default=0)
        for each in step.visits:  # over for each optimizer, even for those without a request in this run
            each.microbatch -= last
        self.now = self.requested = 1

    # Questions.

    def delivered_last(self) -> Batch | None:
        """The batch that the innermost open loop has delivered last, if that is known."""
        return None

    def is_boundary(self) -> bool:
        """Whether a request at this point is taken; after a request, whether it was."""
        step, origin = self.step, self.origin
        policy = self.policy if step.state == TAKEN else step.policy
        if not policy.is_mean:
            return True
        if self.block is not None:
            is_counted = self.block in step.latest
        elif origin is not None:
            visit = step.latest.get(origin.batch or ELSEWHERE)
            is_counted = visit is not None and not self._is_over(visit.began, origin.optimizers)
        else:
            is_counted = True
        if is_counted or step.state == FINAL:
            return step.state != COLLECTING
        # The pass that begins the next visit is still to come; one on a batch with no row left does not begin any.
        if origin is not None and origin.claim.is_empty:
            return False
        step = Step(policy) if step.state == TAKEN else step
        return policy.completes(self, step, self.delivered_last() if origin is None else origin.batch, 1)

    def has_unknown_end(self) -> bool:
        """Whether nothing says where the current loop ends: its data comes from no loader, and is in no block."""
        visits = self.step.visits
        return self.block is None and (visits[-1].source is ELSEWHERE if visits else not self.step.latest)

    def is_recent(self) -> bool:
        """Whether there was a forward or backward pass since the last request of a step."""
        visits = self.step.visits
        return self.origin is not None or (bool(visits) and visits[-1].began > self.requested)

    def begins_step(self) -> bool:
        """Whether a backward pass now would be the first of a step."""
        return self.step.state == TAKEN or not self.step.visits
