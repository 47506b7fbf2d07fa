"""The oracle of step programs: one device, plain torch, the global batches; what a step is, by `step_page.py`.

A microbatch is the batches of all ranks together, and its loss the mean over all of their samples. So no rank, no part
and no reduction is here: only which passes make a step, when it is taken, and the mean over what it consists of.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from step_page import Page
from step_programs import SEEDS, Loss, Machine, Outcome, Program, data, decay, networks, optimizers

NO_LOADER: Any = "no loader"  # stands for the batch, and for the loop, of data from elsewhere
FLAW = 1e-9  # relative


class Refused(Exception):  # noqa: N818
    """What comes has no meaning: it must be an error."""


class Unsaid(Exception):  # noqa: N818
    """What comes has a meaning that is nowhere said."""


@dataclass(eq=False)
class Loop:
    is_open: bool = True
    was_left: bool = False


@dataclass(eq=False)
class Batch:
    """A round: the batches of all ranks."""

    tensors: Sequence[torch.Tensor]
    loop: Any
    start: int = 0
    ends: bool = False  # its loop
    is_computed: bool = False  # its tensors are new ones

    @property
    def key(self) -> Any:
        return self.loop, self.start

    @property
    def number(self) -> int:
        return self.start + 1

    def is_last(self) -> bool:
        return self.ends and not self.loop.was_left


@dataclass(eq=False)
class Asking:
    """An optimizer, for the page."""

    asked: int = 0
    passed: int = 0
    is_reduced: bool = False


class Plain(Machine):
    """
    Attributes:
        states: the parameters before each operation, and at the end; None while the ranks have states of their own.
        stop: why the program has no end.
    """

    def __init__(self, program: Program, ranks: int, is_sharded: bool) -> None:
        super().__init__(program.setup)
        self.is_sharded, self.ranks, self.is_mean = is_sharded, ranks, program.setup.every > 1
        self.positions = {"a": 0, "b": 0}  # in the last loop; 0 if it has ended
        self.starts = {"a": 0, "b": 0}  # where the next loop begins
        self.open: dict[Any, Batch] = {}  # the last batch of each open loop; the loop that delivered last is the last
        self.used: set[Any] = set()  # batches that a forward pass was computed from
        self.states: list[list[torch.Tensor] | None] = []
        self.stop: Exception | None = None
        self.prepare()
        try:
            self.run(program.ops)
        except (Refused, Unsaid) as end:
            self.stop = end

    def prepare(self) -> None:
        self.models = networks(self.setup, is_sparse=False)
        self.optimizers = optimizers(self.setup, self.models)
        self.parameters = [each for model in self.models.values() for each in model.parameters()]
        self.owner = {each: name for name, one in self.optimizers.items() for each in one.param_groups[0]["params"]}
        self.page, self.asking = Page(self.setup.every, self.ranks), {name: Asking() for name in self.optimizers}
        self.mean = {each: torch.zeros_like(each) for each in self.parameters}  # of the current step
        self.held = set[str]()  # the optimizers that have gradients of the current step
        self.is_weighed: bool | None = None  # whether the current step's weights are given
        self.assigned = set[str]()  # the optimizers whose gradients have been, with k > 1
        self.is_own = False  # whether gradients have been assigned, which each rank has of its own until the step
        self.is_pending = False  # whether there is a forward pass since the last pass or request
        self.last: Batch | None = None  # of the last forward pass since the last request
        self.skips = dict.fromkeys(self.optimizers, False)
        self.is_apart = False  # whether the ranks have loaded several states

    def note(self) -> None:
        self.states.append(None if self.is_apart else [each.detach().clone() for each in self.parameters])

    # Batches.

    def loop(self, which: str) -> Iterator[Batch]:
        tensors = data({"a": self.setup.samples, "b": self.setup.others}[which], SEEDS[which]).tensors
        if which == "a" and self.setup.is_same:
            batch = data(self.setup.batch, SEEDS["a"]).tensors
            tensors = tuple(torch.cat([each] * (self.setup.samples // self.setup.batch)) for each in batch)
        loop, size, samples = Loop(), self.ranks * self.setup.batch, len(tensors[0])
        first, self.starts[which] = self.starts[which], 0
        try:
            for start in range(first, samples, size):
                self.positions[which] = start + size
                self.open.pop(loop, None)
                rows = [each[start : start + size] for each in tensors]
                self.open[loop] = batch = Batch(rows, loop, start, start + size >= samples)
                yield batch
            self.positions[which] = 0
        except GeneratorExit:
            loop.was_left = True
        finally:
            self.open.pop(loop, None)
            loop.is_open = False

    def tensors(self, batch: Batch) -> Sequence[torch.Tensor]:
        return batch.tensors

    def forward(self, kind: str) -> None:
        count = len(self.losses)
        self.check_rows()
        super().forward(kind)
        if len(self.losses) > count:
            self.last, self.is_pending = self.meant(self.hand, self.hand.is_computed or kind == "copied"), True
            self.used.add(self.hand.key)
            ((value, _),) = self.losses[-1].parts
            self.losses[-1] = self.losses[-1]._replace(parts=((value, self.last),))

    def meant(self, batch: Batch, is_computed: bool) -> Batch:
        """Data of no loader is taken for the batch that the innermost loop has delivered last, if rows agree."""
        if (batch.loop is not NO_LOADER and not is_computed) or not self.open:
            return batch
        last = list(self.open.values())[-1]
        is_kept = batch.loop is not NO_LOADER and batch.loop not in self.open
        is_used = batch.key in self.used
        # Of other rows, they may be no loader's; with a row on each rank, of either.
        is_tail = len(batch.tensors[0]) < self.ranks >= len(last.tensors[0])
        if is_kept and is_used and (is_tail or len(last.tensors[0]) != len(batch.tensors[0])):
            raise Unsaid("computed inputs of a batch that was used and kept, while another loop delivers")
        if len(last.tensors[0]) != len(batch.tensors[0]):
            return batch
        if is_kept and self.setup.every > 1:
            raise Unsaid("computed inputs of a batch that was kept, while another loop delivers")
        return last if batch.loop is NO_LOADER else batch

    def foreign(self, number: str) -> None:
        parts = [data(3, 10 + 10 * int(number) + rank).tensors for rank in range(self.ranks)]
        self.hand = Batch([torch.cat(each) for each in zip(*parts, strict=True)], NO_LOADER)

    def compute(self) -> None:
        if self.hand is not None:
            self.hand = dataclasses.replace(self.hand, is_computed=True)

    def evaluate(self, count: str) -> None:
        pass

    def failing(self, where: str) -> None:
        self.check_rows()
        self.is_pending = True

    def check_rows(self) -> None:
        if self.setup.net == "norm" and self.hand is not None and len(self.hand.tensors[0]) < 2:
            raise Unsaid("statistics of one row")

    def erase_grad(self, row: str) -> None:
        if self.is_sharded and self.setup.every > 1 and self.page.state == "collecting":
            raise Unsaid("a write to gradients that are not sharded yet")
        super().erase_grad(row)
        self.mean[self.models["f"][-1].weight][int(row)].zero_()

    # Passes.

    def passed(self, loss: Loss, way: str) -> None:
        if loss.weight is not None:  # by `accelerator.backward`
            way = "plain"
        trained = [each for each in self.parameters if each.requires_grad]
        if not loss.value.requires_grad:
            raise Unsaid("nothing is trained")
        parts = []
        for value, batch in loss.parts:
            try:
                found = torch.autograd.grad(value, trained, retain_graph=True, allow_unused=True)
            except RuntimeError as error:  # the parameters have changed since the forward pass
                raise Unsaid(f"plain torch refuses: {str(error)[:60]}") from None
            pairs = zip(trained, found, strict=True)
            parts.append(({each: gradient for each, gradient in pairs if gradient is not None}, batch))
        if way == "assigned" and self.setup.every > 1 and self.page.state == "collecting":
            self.assigned |= {self.owner[each] for gradients, _ in parts for each in gradients}
        self.is_own = way == "assigned" and self.ranks > 1
        for each in trained if way == "assigned" else ():
            if any(each in gradients for gradients, _ in parts):
                each.grad = None
                self.mean[each].zero_()
        if way != "assigned" or self.setup.every == 1:
            self.arrive(parts, None if loss.weight is None else float(loss.weight))
            return
        for gradients, _ in parts:  # an edit of the gradients of a step that is complete
            self.leave_at(gradients, 1.0)

    def decay(self) -> None:
        if self.setup.every > 1 and self.last is None:
            raise Unsaid("a penalty of no batch")
        self.passed(Loss(((decay(self.models["f"]), self.last or Batch((), NO_LOADER)),)), "plain")  # type: ignore[arg-type]

    def arrive(self, parts: Sequence[tuple[dict[Any, torch.Tensor], Batch]], weight: float | None) -> None:
        """A backward pass leaves gradients of the means over these batches."""
        gradients = {each for part, _ in parts for each in part}
        models = [model for model in self.models.values() if not gradients.isdisjoint(model.parameters())]
        hit = {self.owner[each] for model in models for each in model.parameters()}
        for batch in dict.fromkeys(batch for _, batch in parts):
            self.count(batch, hit, weight)
        weights = {each.source: share for each, share in zip(self.page.visits, self.page.weigh(), strict=True)}
        for part, batch in parts:
            share = weights.get(self.page.block or batch.key, 0.0) if self.is_mean else 0.0 if weight == 0 else 1.0
            self.leave_at(part, share)
        for name in hit:
            self.asking[name].passed = self.page.now
            self.asking[name].is_reduced = self.page.state != "collecting"
        self.held |= hit
        self.is_pending = False

    def leave_at(self, gradients: dict[Any, torch.Tensor], share: float) -> None:
        for each, gradient in gradients.items():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            each.grad.add_(gradient, alpha=share)
            self.mean[each].add_(gradient, alpha=share)

    def count(self, batch: Batch, hit: set[str], weight: float | None) -> None:
        """Count a pass: what has arrived so far weighs less by it."""
        page, source, reached = self.page, self.page.block or batch.key, [self.asking[name] for name in hit]
        size = weight if weight is not None else self.size(batch)
        known, step, before = page.find(source, reached), page.steps, page.weigh()
        if known is not None and known.total != size and self.is_mean:
            raise Unsaid("one visit, two sizes")
        if known is None and page.state == "taken":
            if self.setup.every > 1 and any(self.asking[name] not in page.stepped for name in hit & self.held):
                raise Unsaid("microbatches of two steps")
            self.restart()
        if known is None and self.is_mean:
            if self.is_weighed not in (None, weight is not None):
                raise Refused("weights for a part of a step")
            self.is_weighed = weight is not None
        if page.take_in(source, None if batch.loop is NO_LOADER else batch, reached, size) is None:
            raise Refused("sizes of several loops")
        if self.is_mean and before and page.steps == step:
            share = next((after / was for was, after in zip(before, page.weigh(), strict=False) if was), 0.0)
            for each, mean in self.mean.items():
                if each.grad is not None:
                    each.grad.add_(mean, alpha=share - 1)
                mean.mul_(share)

    def size(self, batch: Batch) -> float:
        return self.ranks if batch.loop is NO_LOADER else len(batch.tensors[0])

    def restart(self) -> None:
        self.held, self.is_weighed = set(), None
        for each in self.mean.values():
            each.zero_()

    # Requests.

    def step(self, name: str) -> None:
        if name not in self.optimizers:
            return
        is_due, self.is_pending, self.is_own = self.page.request(self.asking[name]), False, False
        self.last = None
        if is_due and self.is_apart:
            raise Refused("states of their own")
        if is_due and name in self.assigned:
            raise Refused("gradients that were assigned while microbatches accumulate")
        if is_due:
            held = [each.grad for each in self.optimizers[name].param_groups[0]["params"] if each.grad is not None]
            visits = self.page.visits
            self.skips[name] = bool(visits) and not sum(each.total for each in visits) and not any(map(torch.any, held))
            if not self.skips[name]:
                self.optimizers[name].step()
            if visits:
                self.page.take(self.asking[name])

    step_by_hand = step

    def zero(self, name: str, how: str) -> None:
        if name in self.optimizers:
            self.give_up({name}, self.optimizers[name].param_groups[0]["params"], how)

    def zero_model(self, name: str, how: str) -> None:
        if name in self.models:
            parameters = list(self.models[name].parameters())
            if name == "f" and "t" in self.models:
                bare = list(self.models["t"].parameters())
                self.clear(bare, how)  # by hand, also between two microbatches
                parameters += bare
            self.give_up({self.owner[each] for each in parameters}, parameters, how)

    def give_up(self, names: set[str], parameters: Sequence[Any], how: str) -> None:
        """Zero, and drop what these optimizers have of the step, unless they are between two microbatches."""
        page, held = self.page, {self.asking[name] for name in names & self.held}
        if page.state == "taken" and self.setup.every > 1 and held - page.stepped:
            raise Unsaid("a step that another optimizer has taken, and this one gives up")
        is_held = page.state != "taken" and held
        if self.setup.every > 1 and is_held:
            if not all(page.zeroes(each, True) for each in held):
                if any(page.zeroes(each, True) for each in held):
                    raise Unsaid("a step that one of two optimizers gives up")
                return
            if page.state == "final" and any(each.passed <= page.asked_last for each in held):
                raise Unsaid("a step that was requested before it was final")
            if self.held - names:
                raise Unsaid("a step that one of two optimizers gives up")
        self.clear(parameters, how)
        self.held -= names
        self.assigned -= names
        if is_held and not self.held:
            page.give_up()
            self.restart()

    def clear(self, parameters: Sequence[Any], how: str) -> None:
        for each in parameters:
            each.grad = None if how == "none" or each.grad is None else torch.zeros_like(each)
            self.mean[each].zero_()

    def clip(self, way: str) -> None:
        if self.is_ahead():
            raise Unsaid("a clip between the forward and the backward pass")
        if way == "torch" and self.is_own:
            raise Unsaid("a clip of assigned gradients, by torch")
        norm = None
        if self.is_due_now():
            parameters = [each for each in self.models["f"].parameters() if each.grad is not None]
            norm = torch.stack([each.grad.norm() for each in parameters]).norm() if parameters else torch.zeros(())
            for each in parameters:
                factor = min(float(0.1 / (norm + 1e-6)), 1.0)
                each.grad.mul_(factor)
                self.mean[each].mul_(factor)
        self.seen.append(None if norm is None else float(norm))

    def is_ahead(self) -> bool:
        """Whether a microbatch has begun whose pass is still to come."""
        return self.setup.every > 1 and (
            self.is_pending or (bool(self.page.block) and self.page.find(self.page.block, ()) is None)
        )

    def is_due_now(self) -> bool:
        if self.setup.every == 1:
            return True
        return self.page.state != "collecting"

    def read(self, what: str) -> None:
        if what == "sync" and self.is_ahead():
            self.seen.append(...)  # the answer may be that for the pass to come
            return
        known = {"sync": self.is_due_now(), "every": self.setup.every, "skipped": any(self.skips.values())}
        self.seen.append(known[what])

    def keep_state(self) -> Any:
        return copy.deepcopy(self.models["f"].state_dict())

    def load_kept(self) -> None:
        first = self.bests[0]
        self.models["f"].load_state_dict(first)
        others = [] if self.is_sharded else [self.kept_by(rank) for rank in range(self.ranks)]
        trained = [name for name, _ in self.models["f"].named_parameters()]  # all ranks get rank zero's buffers
        self.is_apart = any(not torch.equal(state[name], first[name]) for state in others for name in trained)

    def save(self) -> None:
        page, held = self.page, {self.asking[name] for name in self.held}
        if page.state == "final" or (page.state == "taken" and held - page.stepped):
            raise Unsaid("a save before the step")
        is_open = page.state == "collecting" and page.visits
        self.has_saved = True
        self.saved = copy.deepcopy(
            (
                [each.detach() for each in self.parameters],
                [each.state_dict() for each in self.optimizers.values()],
                [each.grad if is_open else None for each in self.parameters],
                [each if is_open else torch.zeros_like(each) for each in self.mean.values()],
                self.positions,
            )
        )
        self.saved_step = (list(page.visits), set(self.held), self.is_weighed) if is_open else ([], set(), None)

    def restore(self) -> None:
        self.prepare()
        parameters, states, gradients, means, positions = copy.deepcopy(self.saved)
        for each, value, gradient, mean in zip(self.parameters, parameters, gradients, means, strict=True):
            each.data.copy_(value)
            each.grad, self.mean[each] = gradient, mean
        for optimizer, state in zip(self.optimizers.values(), states, strict=True):
            optimizer.load_state_dict(state)
        self.positions, self.starts = dict(positions), dict(positions)
        visits, held, self.is_weighed = self.saved_step
        self.held = set(held)
        self.page.resume(visits)
        for each in self.asking.values():
            each.asked = self.page.now

    def enter_block(self) -> None:
        self.block.close()
        self.page.block = object()
        self.block.callback(setattr, self.page, "block", None)


class Verdict(NamedTuple):
    """`kind` is "exact", "refused", "different" (a bug), or "unsaid"."""

    kind: str
    reason: str = ""


def judge(program: Program, ranks: int, outcomes: Sequence[Outcome], is_sharded: bool = False) -> Verdict:
    """Compare what the ranks have with what one device has."""
    plain = Plain(program, ranks, is_sharded)
    end = len(program.ops) + 1 if plain.stop is None else plain.at
    if len(outcomes) < ranks and not any(each.error for each in outcomes):
        return Verdict("different", f"only {len(outcomes)} ranks of {ranks} came to an end")
    if isinstance(plain.stop, Unsaid) and not any(each.at < end for each in outcomes):
        return Verdict("unsaid", str(plain.stop))
    if plain.stop is not None and not any(each.error for each in outcomes):
        return Verdict("different", f"must be refused: {plain.stop}")
    failed_at = min((each.at for each in outcomes if each.error is not None and not each.is_secondary), default=end)
    for outcome in outcomes:
        rank, at = outcome.rank, min(outcome.at, end)
        if outcome.error is None and at > failed_at:
            continue  # with no further collective, it came to its end after another rank's error, which is the run's
        expected = plain.states[at]
        if expected is None:
            continue
        if is_sharded:  # but for what is gathered at the moment
            expected = [
                whole if own.shape == whole.shape else _part(whole, ranks, rank)
                for own, whole in zip(outcome.state, expected, strict=True)
            ]
        flaw = max(
            (
                float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))
                for one, other in zip(outcome.state, expected, strict=True)
                if other.numel()
            ),
            default=0.0,
        )
        place = f"at {outcome.at} ({program.ops[outcome.at]})" if outcome.at < len(program.ops) else "at the end"
        if not flaw <= FLAW:
            return Verdict("different", f"rank {rank} is off by {flaw:.3g} {place}: {outcome.error}")
        wrong = [
            (one, other) for one, other in zip(outcome.seen, plain.seen, strict=False) if not _is_close(one, other)
        ]
        if wrong:
            return Verdict("different", f"rank {rank} sees {wrong[0][0]} for {wrong[0][1]}")
    first = [each for each in outcomes if each.error is not None and not each.is_secondary]
    if first:
        strange = [each.error for each in first if not each.is_worded]
        return Verdict("different", f"not worded: {strange[0]}") if strange else Verdict("refused", str(first[0].error))
    if found := [each.error for each in outcomes if each.error is not None]:
        if isinstance(plain.stop, Refused):  # a rank alone has noticed it, and the others are at their end
            return Verdict("refused", found[0])
        return Verdict("different", f"no first cause: {found[0]}")
    if (
        not is_sharded
        and plain.states[-1] is not None
        and any(
            not torch.equal(one, other)
            for each in outcomes
            for one, other in zip(each.state, outcomes[0].state, strict=True)
        )
    ):
        return Verdict("different", "the ranks have other bits")
    return Verdict("exact")


def _part(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    parts = whole.chunk(ranks)
    return parts[rank] if rank < len(parts) else whole[:0]


def _is_close(one: Any, other: Any) -> bool:
    if other is ...:
        return True
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    return abs(one - other) <= FLAW * max(1.0, abs(other))
