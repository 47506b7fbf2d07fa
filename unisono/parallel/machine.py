"""The machine of a step: which passes are one microbatch, and which microbatches one step; when a step is final; which
requests are taken; what `zero_grad()` zeroes. docs/exactness.md, sections 1 and 2, says the same in words.

    collecting  fewer microbatches than a step has
    final       all of them: the gradients are reduced, and are those of the step
    taken       an optimizer has stepped; the first pass of a new visit begins the next step

It knows neither tensors nor ranks: batches, loops, optimizers and claims are given to it, and it asks a batch only for
its loop, its number and whether it is the loop's last.

Invariants:
1. `add` adds to a step, `close` takes it, `give_up` drops it; `request` notes the time. Questions change nothing.
2. All ranks reach the same states at the same passes and requests: what decides is equal on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from unisono.deliveries import Batch, Loop
    from unisono.parallel.claims import Claim, Origin

COLLECTING, FINAL, TAKEN = "collecting", "final", "taken"

ELSEWHERE = object()  # stands for the batch, and the loop, of data from no loader


class Visit:
    """One use of a batch between two requests of an optimizer.

    Attributes:
        source: the batch; or the `accumulate()` block, or what stands for data of no loader, which has no batch.
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
        """Losses of different ones may be one microbatch."""
        return ELSEWHERE if self.batch is None else self.batch.loop


class Step:
    """The visits whose gradients an optimizer applies together, in the order of their first passes.

    Attributes:
        number: from 1 on; a step that was given up does not count.
        every: k, the number of its microbatches, as for `Machine`.
        latest: the latest visit of each source.
        visited: of each loop, the number of the latest batch that was visited before this step.
    """

    __slots__ = ("every", "latest", "number", "state", "visited", "visits")

    def __init__(self, number: int = 1, visits: Sequence[Visit] = (), every: float = 1) -> None:
        self.number, self.visits, self.every = number, list(visits), every
        self.latest: dict[object, Visit] = {}
        self.visited: dict[Loop, int] = {}
        self.state = COLLECTING

    @property
    def count(self) -> int:
        """The number of its microbatches."""
        return len({each.microbatch for each in self.visits})

    @property
    def last(self) -> Batch | None:
        """The batch visited last."""
        return self.visits[-1].batch if self.visits else None

    @property
    def is_joint(self) -> bool:
        """Whether its microbatches are no sequence of samples: some have several losses, or unknown sizes."""
        return self.count < len(self.visits) or len({each.batch is None for each in self.visits}) > 1

    @property
    def unit(self) -> float:
        """U: the first total; 0 if nothing counts."""
        # Microbatches in which nothing counts on any rank are passed over: U is a divisor.
        return next((each.claim.total for each in self.visits if each.claim.total), 0.0)

    def is_empty(self) -> bool:
        """Whether nothing counts in this step, on any rank: then there is no mean whose gradient could be taken."""
        for each in self.visits:
            if each.claim.total:
                return False
        return bool(self.visits)

    def num_dealt(self) -> int:
        """The number of batches of the user's loader in the step; if microbatches have losses of several loops, of the
        first of each."""
        if len(self.visits) == 1:
            batch = self.visits[0].batch
            return 1 if batch is None else batch.dealt
        counted: dict[int, Visit] = {}
        for each in self.visits:
            counted.setdefault(each.microbatch, each)
        return sum(1 if each.batch is None else each.batch.dealt for each in counted.values())

    def per_device_step(self) -> float:
        """The number of microbatches that make a step of one device: k, or this step's, if the user steps by hand."""
        if 1 < self.every < math.inf:
            return self.every
        return self.count if len(self.visits) > 1 else 1

    def place(self) -> str:
        """Describe where this rank is: equal on all ranks, unless they have lost step."""
        batches = list(filter(None, map(attrgetter("batch"), self.visits)))
        if not batches:
            return f"step {self.number}" + (f" ({self.count} microbatches of no loader)" if self.count > 1 else "")
        return f"step {self.number} ({name_batches(batches)})"


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
        every: the number of microbatches of the next step, over whose samples it is the mean; math.inf if the user
            decides by stepping. With 1, it is the sum of the means of whatever passes it has, as in a plain script.
        origin: of the last forward pass; None after a pass or a request.
        block: stands for the batch in an `accumulate()` block.
        now: a logical time, counted over visits and requests: what began at a time is over for an optimizer that has
            made a request since.
        requested: the time of the last request of any optimizer.
    """

    def __init__(self, every: float = 1) -> None:
        self.every = every
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
        self.step = Step(every=self.every)

    def accumulate(self, every: int) -> None:
        """Set the number of microbatches per step, from the next step on: one that has begun is not affected."""
        self.every = every
        if not self.step.visits:
            self.step.every = every

    @contextmanager
    def in_block(self) -> Iterator[None]:
        """The block is one visit, whatever passes it has."""
        before, self.block = self.block, object()
        try:
            yield
        finally:
            self.block = before

    # A pass.

    def find(self, source: object, optimizers: Callable[[], Collection[Optimizer]]) -> tuple[Step, Visit | None]:
        """The step that a pass on that source is of, which may be a new one, and the visit, if it has begun before.

        Args:
            optimizers: returns those of the models that the pass reaches.
        """
        step = self.step
        known = step.latest.get(source)
        if known is not None and source is not self.block and self._is_over(known.began, optimizers):
            known = None
        if known is None and step.state == TAKEN:
            step = Step(step.number + bool(step.visits), every=self.every)
        return step, known

    def skip(self, step: Step, known: Visit | None, source: object, batch: Batch, claim: Claim) -> Visit:
        """Note a pass on a batch in which nothing counts: it is known, and none of the step's visits."""
        self.step, self.now = step, self.now + 1
        return known or step.latest.setdefault(source, Visit(source, batch, claim, self.now, self.now))

    def go_on(self, known: Visit, batch: Batch | None) -> None:
        """Note a further pass of a visit: a block may go on to another loop, and to the last batch of one."""
        if known.source is self.block:
            if batch is not None and batch.loop not in known.loops:
                known.loops += (batch.loop,)
            self._note_batch(batch)

    def begin(self, source: object, batch: Batch | None, claim: Claim) -> Visit:
        """A visit that begins now; `add` makes it one of the step."""
        self.now += 1
        return Visit(source, batch, claim, self.now, self.now)

    def join(self, visit: Visit, step: Step, optimizers: Callable[[], Collection[Optimizer]]) -> None:
        """Make a new visit one of the current microbatch, if that has none of its loop yet."""
        current = [each for each in step.visits if each.microbatch == step.visits[-1].microbatch]
        joins = self.block is None and self.every != math.inf and all(each.loop is not visit.loop for each in current)
        if joins and not self._is_over(current[0].microbatch, optimizers):
            visit.microbatch = current[0].microbatch

    def add(self, step: Step, visit: Visit) -> None:
        """Make a visit one of the step, which may become final by it."""
        self.step = step
        step.visits.append(visit)
        step.latest[visit.source] = visit
        self._note_batch(visit.batch)

    def _note_batch(self, batch: Batch | None) -> None:
        """Make the step final, if the batch of its latest visit ends it."""
        step = self.step
        # `is_last` may wait for the loader, so it is asked only where the count does not decide.
        if step.every == 1 or step.count >= step.every or self.ends_loop(batch):
            step.state = TAKEN if step.state == TAKEN else FINAL
        if batch is not None and step.every > 1:
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
        if batch is None or self.every == math.inf:
            return False
        return batch.number > self._visited.get(batch.loop, 0) and batch.is_last()

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
        if step.every == 1 or step.state == FINAL:
            return True
        if step.state == TAKEN:
            return requests.stepped is not step
        # What remains of a loop that was left: asked for again, without a further pass.
        last = [each for each in step.visits if each.microbatch == step.visits[-1].microbatch]
        loops = [loop for each in last for loop in each.loops]
        return bool(loops) and not any(each.is_open for each in loops) and all(before > each.began for each in last)

    def close(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        requests = self._requests.get(ref(optimizer)) or self._requests_of(optimizer)
        self.now += 1  # later than gradients that were assigned, which count at the step
        requests.stepped, requests.stepped_at = self.step, self.now
        self.step.state = TAKEN

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has stepped on the current step."""
        return self._requests_of(optimizer).stepped is self.step

    def stepped_at(self, optimizer: Optimizer) -> int:
        """When the optimizer has stepped last; 0 if it has not."""
        return (self._requests.get(ref(optimizer)) or self._requests_of(optimizer)).stepped_at

    def may_zero(self, optimizer: Optimizer, passed: Iterable[tuple[Step, int] | None], is_reduced: bool) -> bool:
        """Whether gradients may be zeroed: they hold nothing of the current step, or it is over or abandoned.

        A step is given up if its gradients are final but the optimizer has not stepped, or if no step was requested
        since the last backward pass.

        Args:
            passed: of each of the optimizer's models, the step of the last pass through it, and its time.
            is_reduced: whether the gradients of one of them are.
        """
        step = self.step
        if step.every == 1 or self.has_stepped(optimizer):
            return True
        times = [each[1] for each in passed if each is not None and each[0] is step]
        # Final by a pass of its own, not by that of another model, which its own may follow in the same microbatch.
        is_final = is_reduced and any(at >= step.visits[-1].microbatch for at in times)
        return not times or is_final or any(at > self.requested for at in times)

    def give_up(self) -> None:
        """Note that all gradients are zero: the next visit begins a step."""
        self.origin = None
        if self.step.state != TAKEN and self.step.visits:
            self._visited.update(self.step.visited)
            self.step = Step(self.step.number, every=self.every)

    def resume(self, step: Step) -> None:
        """Continue in the middle of a step; its last visit is over."""
        self.step, step.every = step, self.every
        last = max((each.microbatch for each in step.visits), default=0)
        for each in step.visits:  # over for each optimizer, also for those without a request in this run
            each.microbatch -= last
        self.now = self.requested = 1

    # Questions.

    def is_boundary(self, delivered: Callable[[], Batch | None] = lambda: None) -> bool:
        """Whether a request at this point is taken; after a request, whether it was.

        Args:
            delivered: returns the batch that the innermost open loop has delivered last.
        """
        step, origin = self.step, self.origin
        every = self.every if step.state == TAKEN else step.every
        if every == 1:
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
        # The pass that begins the next visit is still to come; one on a batch of which no row is left begins none.
        if origin is not None and origin.claim.is_empty:
            return False
        count = 0 if step.state == TAKEN else step.count
        return count + 1 >= every or self.ends_loop(delivered() if origin is None else origin.batch)

    def has_unknown_end(self) -> bool:
        """Whether nothing says where the current loop ends: its data is no loader's, and in no block."""
        visits = self.step.visits
        return self.block is None and (visits[-1].source is ELSEWHERE if visits else not self.step.latest)

    def is_recent(self) -> bool:
        """Whether there was a forward or backward pass since the last request of a step."""
        visits = self.step.visits
        return self.origin is not None or (bool(visits) and visits[-1].began > self.requested)

    def begins_step(self) -> bool:
        """Whether a backward pass now would be the first of a step."""
        return self.step.state == TAKEN or not self.step.visits
