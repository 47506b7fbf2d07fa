"""Which microbatches make a step, and what this rank's gradients weigh in its reduction.

A microbatch is a batch that the loop received, or, where the batches are no loader's of this package, what lies between
two attempts to step, or a `with accumulate():` block. A step takes so many of them, and the rest at the end of a loop.

Where each microbatch is a step, plain backward passes of several batches may still be added up before it, and mean the
sum of the batches' gradients. The first of them sets the unit p, its part of its round; a batch with the part q counts
q / p of it, and the reduction scales all by p. A batch behind a reduction sets a new unit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from unisono.parallel.weights import Tally, tally_of
from unisono.window import Latest, Share, warn_of_unequal_shares
from unisono.world import World

logger = logging.getLogger(__name__)


class Accumulation:
    """Counts one rank's microbatches.

    Args:
        world: the rank's.
        every: how many make a step.
        weighs_plain: the models apply `plain_factor`, so that plain `loss.backward()` is weighted exactly, too.

    Attributes:
        number: of the present step, from 1 on.
        count: its microbatches so far.
        restarted_at: the first step of the rank's loop, where that was called again.
        has_noted: whether `note` has told the weight of one of them.
    """

    def __init__(self, world: World, every: int, weighs_plain: bool = True) -> None:
        self.every = every
        self.weighs_plain = weighs_plain
        self.number = self.restarted_at = 0
        self._own, self._bare = Tally(world), tally_of(world)  # by `note`, and by `unisono.backward`
        self._size, self._rank = world.comm.size, world.rank
        self._key: object = None
        self._is_explicit = False
        self._num_restarts = self._bare.num_restarts
        self._part_unit = self._first_part = 0.0  # where each microbatch is a step: the unit, the first batch's part
        self._is_settled = self._is_part_even = self._are_parts_weighed = True
        self._is_weighed = self._is_cleared = self._has_warned = False
        self._begin_step()
        self._was_tried = self._is_over = True  # a step, on the present microbatch

    def _begin_step(self) -> None:
        self.number += 1
        self.count = self._samples = self._total = self._unit = 0
        self._is_known = self._is_even = self._are_weighed = True
        self._is_over = self.has_noted = False

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """The block is one microbatch, whatever the loop receives in it."""
        latest = self._own.latest()
        if latest is None or latest.key != self._key:  # `look` may have seen the loop's batch
            self._begin_microbatch(latest)
        before, self._is_explicit = self._is_explicit, True
        try:
            yield
        finally:
            self._is_explicit = before

    def look(self, is_forward: bool = False) -> None:
        """Notice a new microbatch.

        Args:
            is_forward: a forward pass begins, with gradients.
        """
        if self._bare.num_restarts != self._num_restarts:
            self._num_restarts = self._bare.num_restarts
            self._own.clear()
            self._was_tried = self._is_over = True
            self.restarted_at = self.number + 1
        latest = self._own.latest()
        if is_forward and self._is_over and latest is not None and latest.is_over and latest.key == self._key:
            self._own.spent = latest.key
            latest = None
        key = latest.key if latest is not None else None
        is_new = key != self._key if key is not None else is_forward and self._was_tried
        if is_new and not self._is_explicit:
            self._begin_microbatch(latest)

    def _begin_microbatch(self, latest: Latest | None) -> None:
        if self._is_over or self.every == 1:
            self._begin_step()
        was_weighed, self._is_weighed, self._is_cleared = self._is_weighed, False, False
        self._are_weighed = self._are_weighed and (was_weighed or not self.count)
        self.count += 1
        self._key = latest.key if latest is not None else None
        self._was_tried = False
        if self.every == 1:
            self._begin_part(latest, was_weighed)
        if latest is None or not latest.total:
            self._is_known = False
            return
        self._unit = self._unit or latest.samples
        self._samples, self._total = self._samples + latest.samples, self._total + latest.total
        self._is_even = self._is_even and latest.samples * self._total == self._samples * latest.total
        self._is_even = self._is_even and latest.total * self.count == self._total

    def _begin_part(self, latest: Latest | None, was_weighed: bool) -> None:
        """A batch comes, whose gradients may be added to those of the ones before.

        Args:
            was_weighed: the factor for those was asked for.
        """
        part = _part(latest)
        if self._is_settled:
            self._is_settled, self._part_unit, self._first_part, self._is_part_even = False, 0.0, part, True
            self._are_parts_weighed = True
        else:
            self._are_parts_weighed = self._are_parts_weighed and was_weighed
            self._is_part_even = self._is_part_even and part == self._first_part

    def note(self, weight: float | torch.Tensor | None) -> float:
        """Count the present microbatch with its weight; return the factor for its loss. A collective where the weights
        of a step that ends here were given: so the backward pass need not ask for their sum.

        Raises:
            RuntimeError: it is one more than a step takes.
        """
        self.look()
        key = self._key or ((self.number, self.count) if self.every > 1 else None)
        if self.every == 1 and self._own.would_add():
            raise RuntimeError(
                "backward() is called for a further batch, and no step was taken since the one before; pass "
                "Accelerator(accumulate=N) for steps of N batches, add up the losses of one batch, and call "
                "optimizer.zero_grad() where a batch is left out; the step of an optimizer that is not prepared does "
                "not count"
            )
        factor = self._own.note(weight, key)
        self.has_noted = True
        if weight is not None and self.is_boundary():
            self._own.share()
        return factor

    def plain_factor(self) -> float:
        """The factor for the gradients of the present microbatch, where plain `loss.backward()` makes them.

        Whoever asks for it applies it.
        """
        self._is_weighed = True
        latest = self._own.latest()
        if latest is None or not latest.total or not self._is_known:
            return 1.0
        if self.every == 1:
            part = _part(latest)
            self._part_unit = self._part_unit or part
            return part / self._part_unit if self._part_unit else 0.0
        return latest.samples / self._unit if self._unit else 0.0

    def is_noted(self) -> bool:
        """Whether the present microbatch's loss has a factor already."""
        return self._own.is_of(self._key) or self._bare.is_of(self._key)

    def is_first(self) -> bool:
        """Whether the present microbatch is the first of its step, or begins another step on the same batch."""
        return (self.count <= 1 and not self._is_over) or (self._is_over and self._is_cleared)

    def is_boundary(self) -> bool:
        """Whether the step is to be taken on the present microbatch. Where the loader must be asked whether it was the
        last one, it may wait, and is a matter of all ranks."""
        if self.every == 1 or self.count >= self.every or self._is_over:
            return True
        latest = self._own.latest()
        return latest is not None and latest.is_last()

    def skip(self) -> None:
        """A step was asked for, and not taken."""
        self._was_tried = True
        if self._key is None and not self._is_explicit and not self._has_warned and self._rank == 0:
            self._has_warned = True
            logger.warning(
                "accumulate=%d, and the batches come from no prepared loader: nothing tells where a loop ends, so that "
                "what is left of it at its end is not stepped on, and forward passes tell one microbatch from the "
                "next; prepare(loader), or let each batch's lines run in `with accelerator.accumulate():`",
                self.every,
            )

    def close(self, optimizer: Optimizer) -> None:
        """That optimizer has stepped; others, on the same microbatch, belong to this step."""
        self._was_tried = self._is_over = self._is_settled = True
        self._is_cleared = False
        for tally in (self._own, self._bare):
            tally.close(optimizer)

    def clear(self) -> None:
        """Gradients were zeroed. Where each microbatch is a step, the next one begins it, wherever this one stands."""
        if self.every == 1:
            self._own.clear()
            self._bare.clear()
            self._is_cleared = True
            if self._is_weighed:  # a forward pass has got its factor already
                self._is_settled = True
            else:
                self._part_unit, self._first_part = 0.0, _part(self._own.latest())
                self._is_part_even = self._are_parts_weighed = True

    def share(self) -> tuple[Share | None, float]:
        """This rank's share of the step, and the factor of its gradients. A collective where weights were given."""
        tally = self._held()
        if tally is not None:
            return tally.share()
        latest = self._own.latest()
        if self.every == 1:
            return self._part_share(latest)
        count = max(self.count, 1)
        if not self._is_known or not self._total:
            return None, 1 / (self._size * count)
        share = Share(self._samples / self._total, count, latest.mark if latest else 0)
        if self.weighs_plain and self._are_weighed and self._is_weighed:
            return share, self._unit / self._total
        if not self._is_even:
            warn_of_unequal_shares()
        return share, share.part / count

    def _part_share(self, latest: Latest | None) -> tuple[Share | None, float]:
        """The same, where each microbatch is a step."""
        self._is_settled = True
        if latest is None or not latest.total:
            return None, 1 / self._size
        part = _part(latest)
        if self.weighs_plain and self._is_weighed and self._are_parts_weighed:
            return Share(part, 1, latest.mark), self._part_unit
        if not self._is_part_even:
            warn_of_unequal_shares()
        return Share(part, 1, latest.mark), part

    def unit(self) -> float:
        """How much a loss of the present batch that has no factor weighs, relative to that on other ranks; 0 where the
        batch does not count."""
        latest, tally = self._own.latest(), self._held()
        if latest is None or not latest.total:
            return tally.unit if tally is not None else 1.0
        return (tally.unit if tally is not None else latest.samples) if latest.samples else 0.0

    def _held(self) -> Tally | None:
        """Where the weights of the step's losses were counted."""
        if self.has_noted:
            return self._own
        return self._bare if self._bare.is_held() else None


def _part(latest: Latest | None) -> float:
    """This rank's part of the samples of a round; 0 where nobody knows it."""
    return latest.samples / latest.total if latest is not None and latest.total else 0.0
