"""Microbatches: which one this rank is at, and whether it ends a step.

A forward pass with gradients on looks its inputs up among what the loaders have delivered. Its batch is the microbatch;
in a `with accelerator.accumulate():` block, the block is. Batches from elsewhere cannot be distinguished: there a
microbatch ends when a step is requested.

*Threads:* the rank's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from unisono.deliveries import Batch
from unisono.parallel.ledger import Claim, Ledger
from unisono.world import World

logger = logging.getLogger(__name__)


class Bound(NamedTuple):
    """The batch of a forward pass: the first of the possible ones; none, for inputs from elsewhere.

    Attributes:
        syncs: whether its backward pass may reduce.
    """

    candidates: tuple[Batch, ...] = ()
    syncs: bool = True

    @property
    def batch(self) -> Batch | None:
        return self.candidates[0] if self.candidates else None


class Microbatches:
    """The microbatches of one rank, for the models of one Accelerator.

    Args:
        world: the rank's.
        ledger: counts them.

    Attributes:
        bound: of the last forward pass.
        num_asked: how often the loop has requested a step: then it is done with a microbatch.
        skips: how often in a row a step was requested where none ends.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world, self.ledger = world, ledger
        self._has_warned = False
        self.restart()

    def restart(self) -> None:
        """The rank's loop starts again."""
        self.ledger.restart()
        self.bound = Bound()
        self.num_asked = 0
        self.skips: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._counted_at: int | None = None  # the last backward pass since a step was requested, by num_asked
        self._block: object = None  # stands for the batch in an `accumulate()` block
        self._elsewhere: object = object()  # stands for a batch that did not come from a loader of this package
        self._parts: set[float] = set()  # of the batches of the forward passes since the last backward pass

    def bind(self, values: Any, syncs: bool = True) -> Bound:
        """The batch that the inputs of a forward pass come from."""
        self.bound = self.find(values, syncs)
        self._parts.add(self.part(self.bound))
        return self.bound

    def find(self, values: Any, syncs: bool = True) -> Bound:
        """Return the batch that these tensors come from, and mark it as used."""
        deliveries = self.world.state.deliveries
        bound = Bound(tuple(deliveries.find(values) or deliveries.candidates()), syncs)
        if bound.batch is not None:
            deliveries.use(bound.batch)
        return bound

    @contextmanager
    def block(self) -> Iterator[None]:
        """The block is one microbatch, whatever passes it has."""
        before, self._block = self._block, object()
        try:
            yield
        finally:
            self._block = before

    def enter(self, claim: Claim, bound: Bound) -> None:
        """Count a backward pass."""
        self._parts.clear()
        self._counted_at = self.num_asked
        self.ledger.enter(claim, self._key(bound))

    def part(self, bound: Bound) -> float:
        """Return the part of the batch, as `Claim.part`."""
        return self.ledger.claim(bound.batch, None, self.world).part(self.world.comm.size)

    def is_counted(self, bound: Bound) -> bool:
        """Whether the batch has a backward pass in the current step."""
        return self._key(bound) in self.ledger.step.claims

    def is_boundary(self) -> bool:
        """Whether a step is taken at the current microbatch, whose backward pass may not have run yet."""
        is_further = self._block is not None or (self._counted_at != self.num_asked and self.bound.batch is not None)
        is_next = is_further and not self.is_counted(self.bound)  # than that of the last backward pass
        self.num_asked += 1
        return self._ends_step(has_counted=self._counted_at is not None and not is_next)

    def ask_step(self) -> bool:
        """A step is requested: return whether it is taken, on the microbatch of the last backward pass, if there was
        one since the last request; a forward pass alone does not count."""
        is_taken = self._ends_step(has_counted=self._counted_at is not None)
        self.num_asked += 1
        # After a request, the next backward pass on a batch from elsewhere belongs to another microbatch.
        self._counted_at, self._elsewhere = None, object()
        return is_taken

    def _ends_step(self, has_counted: bool) -> bool:
        """
        Args:
            has_counted: the microbatch is that of the last backward pass; else that of the last forward pass.
        """
        bound, ledger = self.bound, self.ledger
        is_elsewhere = bound.batch is None and self._block is None
        if has_counted or is_elsewhere or self.is_counted(bound):
            return ledger.is_full()
        count = ledger.count if ledger.step.is_open else 0
        # The current microbatch is not counted yet: its backward pass is still to come.
        return count + 1 >= ledger.every or (bound.batch is not None and bound.batch.is_last())

    def begins_step(self) -> bool:
        """Whether a backward pass now would be the first of a step."""
        return not self.ledger.step.is_open and (self.ledger.every == 1 or not self.is_counted(self.bound))

    def forget(self) -> None:
        """Note that all gradients are zero."""
        self.ledger.clear()
        self._parts.clear()
        self._counted_at = None

    def check_told(self, bound: Bound) -> None:
        """Raise ValueError if it may be one microbatch or another, and steps depend on it."""
        if self.ledger.every > 1 and self._block is None and len(bound.candidates) > 1:
            raise ValueError(
                "the model's inputs were computed from a batch, and it may be any of several that were drawn: which "
                "microbatches make a step cannot be known; let each one's lines run in `with "
                "accelerator.accumulate():`"
            )

    def check_alike(self) -> None:
        """Raise ValueError for gradients that no backward pass has left, of batches that may count differently."""
        if len(self._parts) > 1:
            raise ValueError(
                "the gradients were assigned by hand, and may come from several batches, of which this rank had "
                f"different parts ({', '.join(f'{each:.3g}' for each in sorted(self._parts))} of an even one), so that "
                "one number cannot weigh them; let accelerator.backward(loss) leave them in .grad, or step on each "
                "batch and zero_grad() after each step"
            )

    def warn_of_unknown_ends(self) -> None:
        """Warn once, on rank zero, of what is lost if the batches that accumulate come from no loader of this
        package."""
        is_unknown = self.bound.batch is None and self._block is None
        if is_unknown and not self._has_warned and self.world.rank == 0:
            self._has_warned = True
            logger.warning(
                "gradient_accumulation_steps=%d, and the batches come from no prepared loader, or no prepared model is "
                "called: nothing says where a loop ends, so that what is left of it at its end is not stepped on, and "
                "forward passes distinguish one microbatch from the next; prepare(loader), say "
                "model.mark_forward_method(name) if the loop calls a method of the model, or let each batch's lines "
                "run in `with accelerator.accumulate():`",
                self.ledger.every,
            )

    def _key(self, bound: Bound) -> object:
        """What distinguishes the microbatch from others."""
        return self._block or bound.batch or self._elsewhere
