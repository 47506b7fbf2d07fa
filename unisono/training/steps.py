"""The steps of a rank: `Machine` says which microbatches make one; this module, what their gradients weigh and which
claims fit together (docs/exactness.md).

*Threads:* a rank's steps belong to the thread of its loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch.optim import Optimizer

from unisono.batches.deliveries import Batch
from unisono.batches.virtual_ranks import VirtualRanks
from unisono.comm.operations import HOST, WEIGHTS
from unisono.training.claims import Claim, Origin, check_counts, check_repeated, check_same, claim_of
from unisono.training.machine import ELSEWHERE, UNITS, Machine, Misfit, Step, Visit
from unisono.training.rules import Policy
from unisono.world import World


class Steps(Machine):
    """The steps of one rank's training loop, with their weights.

    Attributes:
        virtual: the virtual ranks that it carries, if there are any.
        parts: the number of parts of a round: of ranks, or of virtual ones.
    """

    def __init__(self, world: World, every: float = 1, virtual: VirtualRanks | None = None) -> None:
        self.world, self.virtual = world, virtual
        self.parts = world.comm.size if virtual is None else virtual.count
        super().__init__(every if virtual is None else virtual.each, 0 if virtual is None else virtual.count)
        self._total: tuple[Step | None, float] = None, 0.0

    def _check_microbatch(self, origin: Origin) -> None:
        """Check that it is known which microbatch a pass belongs to, and whether its loop ends."""
        batch, is_in_block = origin.batch, self.block is not None
        if not origin.is_computed:
            return
        if batch is not None and is_in_block:
            is_known = not batch.loop.begins_ahead or not self.ends_loop(batch)
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
        elsewhere: object = ELSEWHERE,
    ) -> Visit:
        """Count a pass that begins: in the current visit of its batch, or in a new one. A small collective where the
        weight is given.

        Args:
            is_named: whether the user has named the microbatch, by a weight or a batch.
            optimizers: returns those of the models that the pass reaches.
            elsewhere: distinguishes data from no loader.

        Raises:
            ValueError: nothing is counted, since it has no known claim, or its claim does not fit those of the step.
        """
        batch = origin.batch
        self.world.state.deliveries.learn(batch)
        parts = 0 if batch is None or batch.draw is None else batch.draw.carried.count
        if batch is not None and parts != self.step.policy.parts:
            raise ValueError(
                f"a batch of a loader with virtual_ranks={parts or None} cannot be trained on with "
                f"virtual_ranks={self.step.policy.parts or None}; give the Accelerator and its loaders the same"
            )
        source = self.block or batch or elsewhere
        step, known = self.find_visit(source, optimizers)
        self._check_origin(origin, weight, is_named, step.policy)
        claim = origin.claim if weight is None else claim_of(batch, weight, self.world)
        self.origin = None
        if batch is not None and step.policy.is_counted:
            if claim.is_empty:  # as if it were skipped, as on one device
                return self.skip_pass(step, known, source, batch, claim)
            if known is not None and known.claim.is_empty:  # a block continues to a batch that counts
                known = None
        if known is not None:
            check_same(known.claim, claim, self.virtual is not None)
            self.continue_visit(known, batch)
            return known
        visit = self.begin_visit(source, batch, claim)
        if step.visits:
            self.join_microbatch(visit, step, optimizers)
            if step.policy.is_mean and (misfit := step.misfit(visit)):
                raise ValueError(_describe_misfit(misfit))
        self.add_visit(step, visit)  # an error above leaves the step as it was
        return visit

    @staticmethod
    def count_whole(visit: Visit) -> bool:
        """Note that the loss of a visit is that of all ranks: this rank's weight counts even where its batch only
        repeats rows. Returns whether that makes a difference."""
        if visit.claim.uncut is None:
            return False
        visit.claim = Claim(*visit.claim.uncut, True)
        return True

    def _check_origin(
        self, origin: Origin, weight: float | torch.Tensor | None, is_named: bool, policy: Policy
    ) -> None:
        """Check that the pass has a known claim, in a step of that many microbatches."""
        if len(origin.candidates) > 1:
            if weight is None:
                check_counts(origin.candidates, self.world, policy.is_mean)
            else:
                check_repeated(origin.candidates, weight)
        if policy.is_counted and not is_named:
            self._check_microbatch(origin)
        if weight is None and origin.batch is not None and origin.batch.is_guess and (self.parts > 1 or policy.is_mean):
            raise ValueError(
                "it is not known how many rows this batch has, which a collate_fn has made; let it return tensors with "
                "the rows along their first dimension, or pass their number, accelerator.backward(loss, weight=number)"
            )

    def delivered_last(self) -> Batch | None:
        loops = self.world.state.deliveries.open_loops()
        return loops[0].last if loops else None

    @property
    def is_plain(self) -> bool:
        """Whether steps are those of a plain script: one rank and k = 1, so that nothing is reduced or scaled."""
        return self.parts == 1 and not self.step.policy.is_mean

    def given_total(self) -> float | None:
        """With virtual ranks, the sum of the weights that the user gave for the batches of this step, over all of them,
        rounded once; None if there are none. A collective, once a step."""
        step, virtual = self.step, self.virtual
        given = [each for each in step.visits if each.claim.is_given and each.batch is not None]
        if virtual is None or not given:
            return None
        if self._total[0] is not step:
            draws = {each.batch.draw: each.claim.samples for each in given if each.batch and each.batch.draw}
            by_rank = {draw.rank: samples for draw, samples in draws.items() if draw.counts}
            carried = next(iter(draws)).carried
            own = [by_rank.get(rank, 0.0) for rank in carried.own] + [0.0] * (carried.each - len(carried.own))
            self.world.comm.announce(WEIGHTS)
            found = self.world.comm.all_gather(torch.tensor(own, dtype=torch.float64, device=HOST))
            self._total = step, math.fsum(torch.cat(found).tolist())
        return self._total[1]

    def is_empty(self) -> bool:
        """Whether nothing counts in this step, on any rank: then there is no mean to take the gradient of."""
        return self.step.is_empty() or self.given_total() == 0

    def factor(self) -> float:
        """As `Step.factor`, in this world."""
        return self.step.factor(self.parts)

    def fraction(self) -> float:
        """This rank's fraction of the samples of the step: the weight of its loss in the sum over the ranks."""
        claims, is_mean = [each.claim for each in self.step.visits], self.step.policy.is_mean
        if not is_mean and len({each.part(self.parts) for each in claims}) > 1:
            raise ValueError(
                "the closure has losses of several batches, and returns one number for all of them, which cannot be "
                "weighed, since this rank's parts of them differ; compute the loss of one batch in a "
                "closure, or use batches that the ranks share evenly (drop_last=True)"
            )
        counted = claims if is_mean else claims[-1:]
        total = sum(each.total for each in counted)
        return sum(each.samples for each in counted) / total if total else 1 / self.parts


def _describe_misfit(misfit: Misfit) -> str:
    if misfit.reason == UNITS:
        return (
            "one microbatch of this step has a weight of its own, another one has none; pass backward(..., weight=) "
            "for each of them, or for none"
        )
    return (
        "the losses of one step are of several loaders, and the sizes of their batches have changed by different "
        f"factors ({misfit.total:g} after {misfit.first:g} samples); train them with an Accelerator each, or drop the "
        "loaders' last batches"
    )
