"""Steps: which microbatches make a step, when it is final, and what their gradients weigh (docs/exactness.md).

    collecting  fewer microbatches than a step has
    final       all of them: the gradients are reduced, and are those of the step
    taken       an optimizer has stepped; the first pass of a new visit begins the next step

*Threads:* a rank's steps belong to the thread of its loop.

Invariants:
1. `count` adds to a step, `close` takes it, `give_up` drops it; `request` notes the time. Questions change nothing.
2. All ranks reach the same states at the same passes and requests: what decides is equal on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from unisono.deliveries import Batch, Loop, name_batches
from unisono.parallel.claims import Claim, Origin, check_counts, check_repeated, check_same, claim_of
from unisono.world import World

COLLECTING, FINAL, TAKEN = "collecting", "final", "taken"

_ELSEWHERE = object()  # stands for the batch, and the loop, of data from no loader


class Visit:
    """One use of a batch between two requests of an optimizer.

    Attributes:
        source: the batch; or the `accumulate()` block, or what stands for data of no loader, which has no batch.
        loops: of all its batches; a block may have several.
        began: the logical time of its first pass (`Steps.now`).
        microbatch: the time of the first pass of its microbatch, which identifies it within the step.
    """

    __slots__ = ("batch", "began", "claim", "loops", "microbatch", "source")

    def __init__(self, source: object, batch: Batch | None, claim: Claim, began: int, microbatch: int) -> None:
        self.source, self.batch, self.claim, self.began, self.microbatch = source, batch, claim, began, microbatch
        self.loops: tuple[Loop, ...] = () if batch is None else (batch.loop,)

    @property
    def loop(self) -> object:
        """Losses of different ones may be one microbatch."""
        return _ELSEWHERE if self.batch is None else self.batch.loop


class Step:
    """The visits whose gradients an optimizer applies together, in the order of their first passes.

    Attributes:
        number: from 1 on; a step that was given up does not count.
        every: k, the number of its microbatches, as for `Steps`.
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


class _Requests:
    """The requests of an optimizer: the time of the last one; the step that it has stepped on last, and when."""

    __slots__ = ("at", "stepped", "stepped_at")

    def __init__(self) -> None:
        self.at = self.stepped_at = 0
        self.stepped: Step | None = None


class Steps:
    """The steps of one rank's training loop.

    Attributes:
        every: the number of microbatches of the next step, over whose samples it is the mean; math.inf if the user
            decides by stepping. With 1, it is the sum of the means of whatever passes it has, as in a plain script.
        origin: of the last forward pass; None after a pass or a request.
        now: a logical time, counted over visits and requests: what began at a time is over for an optimizer that has
            made a request since.
        requested: the time of the last request of any optimizer.
    """

    def __init__(self, world: World, every: float = 1) -> None:
        self.world, self.every = world, every
        self._size = world.comm.size
        self._block: object = None  # stands for the batch in an `accumulate()` block
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
    def block(self) -> Iterator[None]:
        """The block is one visit, whatever passes it has."""
        before, self._block = self._block, object()
        try:
            yield
        finally:
            self._block = before

    def _check_microbatch(self, origin: Origin) -> None:
        """Check that it is known which microbatch a pass is of, and whether its loop ends."""
        batch, is_in_block = origin.batch, self._block is not None
        if not origin.is_computed:
            return
        if batch is not None and is_in_block:
            is_known = not batch.loop.begins_ahead or not self._ends_loop(batch)
        elif batch is None:
            others = origin.candidates[1:]
            is_known = not any(each is not None and each.loop.has_gap for each in others) if is_in_block else not others
        else:
            is_known = len(origin.candidates) == 1 and not batch.loop.has_gap and not origin.may_lag
        if not is_known:
            way = "" if is_in_block else "let each one's lines run in `with accelerator.accumulate():`, or "
            raise ValueError(
                "the model's inputs were computed from a batch, and it may be any of several that were drawn, or come "
                f"from no loader: which microbatches make a step cannot be known; {way}name the batch, "
                "accelerator.backward(loss, batch=batch), or say that it is no loader's, batch=()"
            )

    def count(
        self,
        origin: Origin,
        weight: float | torch.Tensor | None = None,
        is_named: bool = False,
        optimizers: Callable[[], Collection[Optimizer]] = tuple,
        elsewhere: object = _ELSEWHERE,
    ) -> Visit:
        """Count a pass that begins: in the current visit of its batch, or in a new one. A small collective where the
        weight is given.

        Args:
            is_named: whether the user has named the microbatch, by a weight or a batch.
            optimizers: returns those of the models that the pass reaches.
            elsewhere: distinguishes data of no loader.

        Raises:
            ValueError: nothing is counted, since it has no known claim, or its claim does not fit those of the step.
        """
        batch, step = origin.batch, self.step
        source = self._block or batch or elsewhere
        known = step.latest.get(source)
        if known is not None and source is not self._block and self._is_over(known.began, optimizers):
            known = None
        if known is None and step.state == TAKEN:
            step = Step(step.number + bool(step.visits), every=self.every)
        self._check_origin(origin, weight, is_named, step.every)
        claim = origin.claim if weight is None else claim_of(batch, weight, self.world)
        self.origin = None
        if batch is not None and 1 < step.every < math.inf:
            if claim.is_empty:  # as if it were skipped, as on one device: known, and none of the step's visits
                self.step, self.now = step, self.now + 1
                return known or step.latest.setdefault(source, Visit(source, batch, claim, self.now, self.now))
            if known is not None and known.claim.is_empty:  # a block goes on to a batch that counts
                known = None
        if known is not None:
            check_same(known.claim, claim)
            if source is self._block:  # it may go on to another loop, and to the last batch of one
                if batch is not None and batch.loop not in known.loops:
                    known.loops += (batch.loop,)
                self._note_batch(batch)
            return known
        self.now += 1
        visit = Visit(source, batch, claim, self.now, self.now)
        if step.visits:
            self._join(visit, step, optimizers)
        # An error above leaves the step as it was.
        self.step = step
        step.visits.append(visit)
        step.latest[source] = visit
        self._note_batch(batch)
        return visit

    def _check_origin(self, origin: Origin, weight: float | torch.Tensor | None, is_named: bool, every: float) -> None:
        """Check that the pass has a known claim, in a step of so many microbatches."""
        if len(origin.candidates) > 1:
            if weight is None:
                check_counts(origin.candidates, self.world, every > 1)
            else:
                check_repeated(origin.candidates, weight)
        if 1 < every < math.inf and not is_named:
            self._check_microbatch(origin)
        if weight is None and origin.batch is not None and origin.batch.is_guess and (self._size > 1 or every > 1):
            raise ValueError(
                "it is not known how many rows this batch has, which a collate_fn has made; let it return tensors with "
                "the rows along their first dimension, or pass their number, accelerator.backward(loss, weight=number)"
            )

    def _note_batch(self, batch: Batch | None) -> None:
        """Make the step final, if the batch of its latest visit ends it."""
        step = self.step
        # `is_last` may wait for the loader, so it is asked only where the count does not decide.
        if step.every == 1 or step.count >= step.every or self._ends_loop(batch):
            step.state = TAKEN if step.state == TAKEN else FINAL
        if batch is not None and step.every > 1:
            known = self._visited.get(batch.loop, 0)
            step.visited.setdefault(batch.loop, known)
            self._visited[batch.loop] = max(batch.number, known)

    def _join(self, visit: Visit, step: Step, optimizers: Callable[[], Collection[Optimizer]]) -> None:
        """Make a new visit one of the current microbatch, if that has none of its loop yet; check the claims of all."""
        current = [each for each in step.visits if each.microbatch == step.visits[-1].microbatch]
        joins = self._block is None and self.every != math.inf and all(each.loop is not visit.loop for each in current)
        if joins and not self._is_over(current[0].microbatch, optimizers):
            visit.microbatch = current[0].microbatch
        if step.every > 1:
            _check_totals([*step.visits, visit])

    def _is_over(self, began: int, optimizers: Callable[[], Collection[Optimizer]]) -> bool:
        """Whether every optimizer of the models that a pass reaches has requested a step since that time."""
        if self.requested < began:  # spares looking the optimizers up
            return False
        return all(self._requests_of(each).at >= began for each in optimizers())

    def _requests_of(self, optimizer: Optimizer) -> _Requests:
        known = self._requests.get(ref(optimizer))
        if known is None:
            requests = self._requests
            # Garbage may be collected in another rank's thread, while this one restarts: then there is nothing to pop.
            known = requests[ref(optimizer, lambda key: requests.pop(key, None))] = _Requests()
        return known

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has stepped on the current step."""
        return self._requests_of(optimizer).stepped is self.step

    def stepped_at(self, optimizer: Optimizer) -> int:
        """When the optimizer has stepped last; 0 if it has not."""
        return (self._requests.get(ref(optimizer)) or self._requests_of(optimizer)).stepped_at

    def _ends_loop(self, batch: Batch | None) -> bool:
        if batch is None or self.every == math.inf:
            return False
        return batch.number > self._visited.get(batch.loop, 0) and batch.is_last()

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

    def is_boundary(self) -> bool:
        """Whether a request at this point is taken; after a request, whether it was."""
        step, origin = self.step, self.origin
        every = self.every if step.state == TAKEN else step.every
        if every == 1:
            return True
        if self._block is not None:
            is_counted = self._block in step.latest
        elif origin is not None:
            visit = step.latest.get(origin.batch or _ELSEWHERE)
            is_counted = visit is not None and not self._is_over(visit.began, origin.optimizers)
        else:
            is_counted = True
        if is_counted or step.state == FINAL:
            return step.state != COLLECTING
        # The pass that begins the next visit is still to come; one on a batch of which no row is left begins none.
        if origin is not None and origin.claim.is_empty:
            return step.state == FINAL
        loops = self.world.state.deliveries.open_loops() if origin is None else []
        batch = origin.batch if origin is not None else loops[0].last if loops else None
        count = 0 if step.state == TAKEN else step.count
        return count + 1 >= every or self._ends_loop(batch)

    def has_unknown_end(self) -> bool:
        """Whether nothing says where the current loop ends: its data is no loader's, and in no block."""
        visits = self.step.visits
        return self._block is None and (visits[-1].source is _ELSEWHERE if visits else not self.step.latest)

    def is_recent(self) -> bool:
        """Whether there was a forward or backward pass since the last request of a step."""
        visits = self.step.visits
        return self.origin is not None or (bool(visits) and visits[-1].began > self.requested)

    def begins_step(self) -> bool:
        """Whether a backward pass now would be the first of a step."""
        return self.step.state == TAKEN or not self.step.visits

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

    # The numbers of docs/exactness.md, "The weights".

    def scale(self, visit: Visit) -> float:
        """The size of that visit's batch against the step's first: a factor for all that its passes compute."""
        if self.step.every == 1 or self.step.is_joint:
            return 1.0
        return visit.claim.total / (self.step.unit or 1)

    def factor(self) -> float:
        """The factor for the accumulated gradients, in the reduction that makes them those of the step."""
        step = self.step
        if step.every == 1:
            return 1 / self._size
        if step.is_joint:
            return 1 / (self._size * step.count)
        total = sum(each.claim.total for each in step.visits)
        # Where nothing counts, what is there is a penalty's, alike on all ranks.
        return step.unit / (self._size * total) if total else 1 / self._size

    def fraction(self) -> float:
        """This rank's fraction of the samples of the step: the weight of its loss in the sum over the ranks."""
        claims = [each.claim for each in self.step.visits]
        if self.step.every == 1 and len({each.part(self._size) for each in claims}) > 1:
            raise ValueError(
                "the closure has losses of batches of which this rank has different parts, and returns one number for "
                "all of them, which cannot be weighed; compute the loss of one batch in a closure, or use batches that "
                "the ranks share evenly (drop_last=True)"
            )
        counted = claims if self.step.every > 1 else claims[-1:]
        total = sum(each.total for each in counted)
        return sum(each.samples for each in counted) / total if total else 1 / self._size


def _check_totals(visits: list[Visit]) -> None:
    """Check that the claims of one step's visits can be averaged, before the last one is added."""
    # Samples and the user's numbers, such as tokens, have different units: their sum W would mean nothing.
    if any(each.claim.is_given != visits[-1].claim.is_given for each in visits):
        raise ValueError(
            "one microbatch of this step has a weight of its own, another one has none; pass backward(..., "
            "weight=) for each of them, or for none"
        )
    step, before = Step(visits=visits), Step(visits=visits[:-1])
    if not step.is_joint:
        return
    firsts: dict[object, float] = {}
    for each in visits:
        first = firsts.setdefault(each.loop, each.claim.total)
        was_scaled = not before.is_joint and each is not visits[-1] and each.claim.total != before.unit
        if each.claim.total != first or was_scaled:
            raise ValueError(
                "the losses of one step are of several loaders, whose batches differ in size from those before by "
                f"different factors ({each.claim.total:g} after {first:g} samples); train them with an Accelerator "
                "each, or drop the loaders' last batches"
            )
