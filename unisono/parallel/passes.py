"""Passes: forward and backward passes through an Accelerator's models, and the microbatches that they make.

A forward pass with gradients on looks its inputs up among what the loaders have delivered, and its outputs carry the
batch to the backward pass, which alone is counted. When a backward pass comes to a model, by an output or, where it
goes past the outputs, by the first of its parameters, the ledger says what the gradients weigh and whether they end a
step. If they do, they are reduced when it ends: then every `.grad` is the step's.

A model's gradients are scaled where they arrive at its parameters, by the part of its batch: so everything that comes
from the batch is, a gradient penalty, too. Where several batches of other parts meet in one backward pass, they differ
in what leaves the loss for the model, and that is scaled against the first of them.

`torch.autograd.grad`, and `backward(inputs=...)` of other tensors, leave nothing in `.grad`: they are no such passes. A
backward pass that runs inside of another one, as those of reentrant checkpoints do, is a part of that one.

*Threads:* the rank's; on accelerators also autograd's, which runs the hooks of one device one after the other.

Invariant: a hook belongs to the backward pass that calls it, by autograd's number of it. One that was interrupted
leaves nothing that another one would take for its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from unisono.deliveries import Batch, all_count_the_same
from unisono.parallel.ledger import Claim, Ledger, claim_of
from unisono.parallel.strategies.engine import Engine, is_left_at
from unisono.parallel.strategies.sharded import is_distributed
from unisono.parallel.weakly import weakly
from unisono.tree import leaves
from unisono.world import World

logger = logging.getLogger(__name__)


class Bound(NamedTuple):
    """The batch of a forward pass: the first of those that may be meant; none, for what comes from elsewhere.

    Attributes:
        syncs: its backward pass may reduce.
    """

    candidates: tuple[Batch, ...] = ()
    syncs: bool = True

    @property
    def batch(self) -> Batch | None:
        return self.candidates[0] if self.candidates else None


class _Run:
    """A backward pass through one model.

    Attributes:
        task: autograd's number of the backward pass.
        scale: of its microbatch; None where nothing arrives in `.grad`.
        part: of the batch that came first.
    """

    def __init__(self, task: int, scale: float | None, part: float = 1.0) -> None:
        self.task, self.scale, self.part = task, scale, part


class Passes:
    """The passes of one rank through the models of one Accelerator.

    Args:
        world: the rank's.
        ledger: counts them.

    Attributes:
        restarted_at: the first step of the rank's loop, where that was called again.
        went_past: a backward pass of the present step was not begun by `backward`.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.ledger = ledger
        self._world, self._deliveries = world, world.state.deliveries
        self._bound = Bound()  # of the last forward pass
        self._parts: set[float] = set()  # of the batches of the forward passes since the last backward pass
        self._block: object = None  # stands for the batch in a `microbatch()` block
        self._elsewhere: object = object()  # stands for a batch that no loader of ours has delivered
        self._was_tried = False  # a step, since that one came
        self.restarted_at = 0
        self.went_past = False
        self._num_restarts = world.state.num_restarts
        self._has_warned = False
        self._is_called = False  # `backward`, and it runs
        self._told: Claim | None = None  # by `backward`, of the pass that it begins
        self._runs: WeakKeyDictionary[Engine, _Run] = WeakKeyDictionary()  # the last ones
        self._engines: WeakSet[Engine] = WeakSet()
        self._tasks: dict[int, tuple[Bound, list[Engine]]] = {}  # backward passes that run: of what, through what
        self._scale, self._is_reducing = 1.0, False  # of the last one that has begun

    def bind(self, values: Any, syncs: bool = True) -> Bound:
        """Find the batch that the inputs of a forward pass come from; its outputs are to carry it."""
        if torch._C._current_graph_task_id() < 0:
            self._tasks.clear()  # what was interrupted never ends
        self.look()
        self._bound = self._found(values, syncs)
        self._parts.add(self._part(self._bound))
        return self._bound

    def look(self) -> None:
        """Notice that the rank's loop has begun anew."""
        if self._world.state.num_restarts != self._num_restarts:
            self._num_restarts = self._world.state.num_restarts
            self.ledger.clear()
            self._was_tried, self.restarted_at = True, self.ledger.number + 1

    def _found(self, values: Any, syncs: bool = True) -> Bound:
        bound = Bound(tuple(self._deliveries.find(values) or self._deliveries.candidates()), syncs)
        if bound.batch is not None:
            self._deliveries.use(bound.batch)
        return bound

    def watch(self, engine: Engine, outputs: Any, bound: Bound) -> None:
        """Let these outputs of the model tell when a backward pass comes to them."""
        if engine.is_released:
            return
        self.watch_parameters(engine)
        arrive = partial(weakly(self._arrive), ref(engine), bound)
        for leaf in leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(arrive)
        if bound.batch is not None:
            self._deliveries.know(outputs, bound.batch)

    def watch_parameters(self, engine: Engine) -> None:
        """Let the model's parameters tell when gradients arrive, and scale them there. Again, as others are trained."""
        self._engines.add(engine)
        trained = engine.leaves()
        if len(trained) != len(engine.hooks) or any(each not in engine.hooks for each in trained):
            arrive = partial(weakly(self._arrive_at_leaf), ref(engine))
            for each in trained:
                if each not in engine.hooks:
                    engine.hooks[each] = each.register_hook(arrive)

    def has(self, parameters: Set[torch.Tensor]) -> bool:
        """Whether some of these are parameters of the models."""
        return any(each in parameters for engine in list(self._engines) for each in engine.hooks)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """The block is one microbatch, whatever passes it has."""
        before, self._block = self._block, object()
        try:
            yield
        finally:
            self._block = before

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None, batch: Any) -> None:
        """`loss.backward()`, where the user says what it is the mean over.

        Args:
            weight: the number of samples, or tokens. None takes the batch's.
            batch: tensors of the batch. None takes those that the model's inputs came from.

        Raises:
            TypeError: the loss was computed from the parts of parameters that strategy="fsdp" leaves on each rank.
        """
        if is_distributed(loss):
            raise TypeError(
                "the loss is a DTensor: a penalty on parameters that strategy='fsdp' has sharded was added to it; give "
                "the penalty a backward pass of its own, penalty.backward(), or let the optimizer add it "
                "(weight_decay=)"
            )
        self._is_called = True
        try:
            self._run_backward(loss, weight, batch)
        finally:
            self._is_called = False

    def _run_backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None, batch: Any) -> None:
        if weight is None and batch is None:
            loss.backward()
            return
        bound = self._bound if batch is None else Bound(tuple(self._deliveries.find(batch)))
        if batch is not None and not bound.candidates:
            raise ValueError(
                "batch= holds no tensor of a batch that a prepared loader has delivered; pass the batch as it came, "
                "or a view of it, or the number of its samples as weight="
            )
        self._check_identity(bound)
        if weight is None:
            _check_counts(bound)
        self._told = claim_of(bound.batch, weight, self._world)
        try:
            self._enter(self._told, bound)
            (loss if self._scale == 1 else loss * self._scale).backward()
        finally:
            self._told = None

    def is_boundary(self) -> bool:
        """Whether a step is taken on the present microbatch, whose backward pass may be still to come."""
        key, ledger = self._key(self._bound), self.ledger
        if ledger.holds(key) or (self._bound.batch is None and self._block is None and not self._was_tried):
            return ledger.is_full()
        count = 0 if ledger.is_closed else ledger.count
        return count + 1 >= ledger.every or (self._bound.batch is not None and self._bound.batch.is_last())

    def adopt(self, engine: Engine) -> None:
        """Gradients of the model were assigned by hand: those of the batch of the last forward pass. A collective.

        Raises:
            ValueError: it is not known what they weigh.
        """
        if len(self._parts) > 1:
            raise ValueError(
                "the gradients were assigned by hand, and may come from several batches, of which this rank had "
                f"different parts ({', '.join(f'{each:.3g}' for each in sorted(self._parts))} of an even one), so that "
                "one number cannot weigh them; let accelerator.backward(loss) leave them in .grad, or step on each "
                "batch and zero_grad() behind each step"
            )
        _check_counts(self._bound)
        claim = claim_of(self._bound.batch, None, self._world)
        self._enter(claim, self._bound)
        engine.adopt(claim.part(self._world.comm.size))

    def begins_step(self) -> bool:
        """Whether a backward pass now would be the first of a step."""
        return self.ledger.is_closed and (self.ledger.every == 1 or not self.ledger.holds(self._key(self._bound)))

    def forget(self) -> None:
        """Gradients were zeroed, of one optimizer: the others' microbatches still count."""
        if self.ledger.every == 1:
            self.ledger.clear()
        self.went_past = False
        self._parts.clear()

    def warn_of_unknown_ends(self) -> None:
        """Say once, on rank zero, what is lost where no loop of ours brings the batches that accumulate."""
        if self._bound.batch is None and self._block is None and not self._has_warned and self._world.rank == 0:
            self._has_warned = True
            logger.warning(
                "accumulate=%d, and the batches come from no prepared loader: nothing tells where a loop ends, so that "
                "what is left of it at its end is not stepped on, and forward passes tell one microbatch from the "
                "next; prepare(loader), or let each batch's lines run in `with accelerator.accumulate():`",
                self.ledger.every,
            )

    def try_step(self) -> None:
        """A step was asked for."""
        self._was_tried = True

    def weight(self) -> float:
        """What gradients of the present batch weigh on this rank against those on others: while a backward pass runs,
        as far as it is known."""
        run = max(self._runs.values(), key=lambda run: run.task, default=None)
        if run is not None and run.task == torch._C._current_graph_task_id():
            return run.part
        return claim_of(self._bound.batch, None, self._world).part(self._world.comm.size)

    # In a backward pass.

    def _arrive(
        self, engine: Callable[[], Engine | None], bound: Bound, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A gradient leaves the loss for an output of the model."""
        model = engine()
        if model is None or gradient is None:
            return None
        run = self._run(model, bound)
        if run.scale is None:
            return None
        part = run.part
        if self._told is None:
            part = self._part(bound)
            if bound.batch is not None and not self.ledger.holds(self._key(bound)):
                self.ledger.join(bound.batch)
        if part == 0:
            return torch.zeros_like(gradient)
        if run.part == 0:  # what came before was made zero there
            run.part = part
        factor = part / run.part
        return None if factor == 1 else gradient * factor

    def _arrive_at_leaf(
        self, engine: Callable[[], Engine | None], gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A gradient arrives at a parameter of the model; None where autograd leaves it out."""
        model = engine()
        if model is None:
            return None
        run = self._run(model, None)
        if run.scale is None or gradient is None:
            return None
        factor = run.scale * run.part
        return None if factor == 1 else gradient * factor if factor else torch.zeros_like(gradient)

    def _run(self, engine: Engine, bound: Bound | None) -> _Run:
        """The present backward pass through that model; begun where it comes to it.

        Args:
            bound: what an output says; None where the pass has come past the outputs.
        """
        task = torch._C._current_graph_task_id()
        run = self._runs.get(engine)
        if run is not None and run.task == task:
            return run
        outer = run if run is not None and run.task in self._tasks else None  # this one runs inside of it
        if not any(is_left_at(each) for each in engine.leaves()):
            run = _Run(task, None)
            if outer is None:
                self._runs[engine] = run
            engine.pass_by()
            return run
        if outer is not None:
            return outer
        if task in self._tasks:
            bound = bound or self._tasks[task][0]
        else:
            bound = bound or self._found(())
            self._tasks[task] = bound, []
            _on_end(partial(weakly(self._end), task))
            self.went_past = self.went_past or not self._is_called
            if self._told is None:
                self._check_identity(bound)
                _check_counts(bound)
                self._enter(claim_of(bound.batch, None, self._world), bound)
        told = self._told
        part = self._part(bound) if told is None else told.part(self._world.comm.size)
        run = self._runs[engine] = _Run(task, self._scale if told is None else 1.0, part)
        self._tasks[task][1].append(engine)
        engine.begin(self._is_reducing and bound.syncs)
        return run

    def _enter(self, claim: Claim, bound: Bound) -> None:
        """Count a backward pass."""
        self._parts.clear()
        key = self._key(bound)
        if key is self._elsewhere:
            self._was_tried = False
        self.ledger.enter(claim, key)
        self._scale, self._is_reducing = self.ledger.scale(claim), self.ledger.is_full()

    def _end(self, task: int) -> None:
        _, engines = self._tasks.pop(task, (None, []))
        for engine in engines:
            engine.finish()

    def _key(self, bound: Bound) -> object:
        """What tells the microbatch from others."""
        if self._block is not None or bound.batch is not None:
            return self._block or bound.batch
        if self._was_tried:
            self._elsewhere, self._was_tried = object(), False
        return self._elsewhere

    def _part(self, bound: Bound) -> float:
        return claim_of(bound.batch, None, self._world).part(self._world.comm.size)

    def _check_identity(self, bound: Bound) -> None:
        """
        Raises:
            ValueError: it is not known which microbatch this is, and steps depend on it.
        """
        if self.ledger.every > 1 and self._block is None and len(bound.candidates) > 1:
            raise ValueError(
                "the model's inputs were computed from a batch, and several were drawn that it may be: which "
                "microbatches make a step cannot be told; let each one's lines run in `with accelerator.accumulate():`"
            )


def _check_counts(bound: Bound) -> None:
    """
    Raises:
        ValueError: it is not known which batch is meant, and they count differently.
    """
    if not all_count_the_same(bound.candidates):
        counts = " or ".join(sorted({f"{each.samples} of {each.total}" for each in bound.candidates}))
        raise ValueError(
            f"the loss may be the mean over {counts} samples: the model's inputs come from several batches, or were "
            "computed from one where several were drawn ahead; say which by accelerator.backward(loss, batch=batch), "
            "or weight="
        )


def _on_end(call: Callable[[], None]) -> None:
    """Call it when the present backward pass has ended, and has not failed."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
