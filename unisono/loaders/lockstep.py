"""Lockstep: ranks that read different parts of a stream take the same number of steps, though the parts end unevenly.

Each rank announces which batches it has ready: at least one, or its end. So all know how many rounds they can take
before they must meet again, and how many samples each has. A rank whose part has ended repeats a sample, which does not
count, as long as another rank has batches. No rank waits for a batch that it does not need yet.

*Threads:* the loop's. All ranks must loop over the loader equally often, and leave it at the same batch.

Invariants:
1. All ranks meet before the same rounds, since each rank knows what all others have offered.
2. An error of one rank's source ends the loop on all ranks, after the rounds that were complete.
3. After its end, for whatever reason, a loop meets no other rank: it ends in the same way again.
"""

from __future__ import annotations

import logging
from collections import deque
from time import perf_counter_ns
from typing import Any, NamedTuple, NoReturn

import torch

from unisono.errors import BrokenWorldError, CollectiveMismatchError
from unisono.loaders.channel import EndOfChannel
from unisono.loaders.pipeline import Delivery, Lane, Stamps
from unisono.loaders.sharding import Claim, Rule, Size, check_sizes_known, mark_of
from unisono.loaders.sources import Begun
from unisono.loaders.stream_parts import Read, SameStream, StreamPosition
from unisono.outcome import copy_error
from unisono.tree import batch_size, can_cut, take, tree_map
from unisono.world import World

logger = logging.getLogger(__name__)

_Ready = tuple[Size, Read]
"""A batch of a rank: its size, and what it leaves of the stream."""


class _Offer(NamedTuple):
    """A rank's contribution to the next rounds."""

    start: int  # the number of the epoch's samples before these rounds
    batches: list[_Ready]  # those that are ready; none if its part has ended, or its source has failed
    has_sample: bool  # to repeat
    failure: str | None  # the error that its source raised
    workers: int  # at least 1


class Lockstep:
    """The batches of one rank's lane, in step with the other ranks'.

    Args:
        rule: its `tail` and `fixed_batch_size` determine what happens to rounds for which some rank has no batch.
        ahead: the number of batches that may wait here, besides those in the lane.
    """

    def __init__(self, lane: Lane, world: World, rule: Rule, dim: int, ahead: int, begun: Begun) -> None:
        self._lane, self._world, self._rule, self._dim, self._ahead = lane, world, rule, dim, ahead
        self._offset: int = begun.position["offset"]  # the same on every rank
        self._taken = StreamPosition.of_state(begun.position)  # the same, but for the states of the rank's own parts
        self._same, self._slack = SameStream(self._taken.here), begun.slack
        self._own: deque[Delivery] = deque()
        self._rounds: deque[list[_Ready | None]] = deque()
        self._spare: Delivery | None = None  # a sample to be repeated: a copy, since the loop may write to its batches
        self._full = begun.size or 0  # the size to pad to: that of the largest batch so far, if unknown
        self._wanted = 0  # the size of the first batch of all
        self._end: BaseException | None = None

    def receive(self) -> Delivery:
        """Return the next batch, or a repeated sample; as `Lane.receive`. EndOfChannel if no rank has more; otherwise
        an error is that of `check_offers`, or RuntimeError if the ranks read different streams."""
        if self._end is not None:
            raise copy_error(self._end)
        try:
            # Batches of rounds that were agreed on before are here already: there is no wait to divide.
            stamps = Stamps() if self._rounds else self._agree_on_rounds()
            return self._take_round(self._rounds.popleft(), stamps)
        except Exception as error:
            self._end = copy_error(error).with_traceback(None)  # its frames would keep the loader workers alive
            raise

    def _take_round(self, offered: list[_Ready | None], stamps: Stamps) -> Delivery:
        """Return this rank's batch of a round, or its substitute."""
        batches = [each for each in offered if each is not None]
        sizes, reads = [size.samples for size, _ in batches], [read for _, read in batches]
        self._wanted = self._wanted or sizes[0]
        if self._rule.fixed_batch_size and (None in offered or set(sizes) != {self._wanted}):
            logger.warning("fixed_batch_size=True ends the epoch: the next round has batches of %s samples", sizes)
            self._leave_rest()
        if offered[self._world.rank] is not None:
            own = self._own.popleft()
            self._full = max(self._full, own.claim.samples)
            reads.append(own.position)  # with the dataset's state, which the offer lacks
        else:
            assert self._spare is not None
            own = self._one_sample_of(self._spare)
        self._taken = self._taken.after(reads)
        self._offset += sum(sizes)
        batch, repeated = self._pad_to_full(own)
        claim = Claim(own.claim.samples, sum(sizes), mark_of(self._offset), repeated, sum(map(bool, sizes)))
        return own._replace(batch=batch, claim=claim, position=self._taken.to_state(self._offset), stamps=stamps)

    def _agree_on_rounds(self) -> Stamps:
        """Announce what is ready here, and determine the rounds that all ranks can take."""
        failure = self._receive_ready()
        ready_at = perf_counter_ns()
        stamps = self._own[0].stamps if self._own else Stamps()
        offers: list[_Offer] = self._world.comm.all_gather_object(self._offer_ready(failure))
        # Only after the exchange, in which the peers learn of it: without this rank's offer they would wait.
        if failure is not None:
            self._lane.receive()  # raises it again
        check_offers(offers)
        going = [offer for offer in offers if offer.batches]
        for offer in going:
            for _, read in offer.batches:
                self._same.compare(read)
        if not going:
            self._same.check_ends(self._taken, self._slack)
            raise EndOfChannel
        if len(going) < len(offers) and self._rule.tail == "drop":
            self._leave_rest()
        for place in range(min(len(offer.batches) for offer in going)):
            self._rounds.append([offer.batches[place] if offer.batches else None for offer in offers])
        # All ranks decide this from the same offers, so either all or none take part in the broadcast.
        if not all(offer.has_sample for offer in offers):
            self._share_sample(offers.index(going[0]))
        return stamps._replace(ready_at=ready_at)

    def _receive_ready(self) -> str | None:
        """Receive the batches that are ready, at least one. Return the source's error if no batch precedes it; if one
        does, the error waits: the lane raises it again at each call."""
        try:
            # Beyond the first, only batches that are in the lane already: the peers must not wait for more.
            while not self._own or (len(self._own) < self._ahead and self._lane.sent > self._lane.received):
                self._own.append(self._lane.receive())
                if self._spare is None:
                    self._spare = self._one_sample_of(self._own[0])
        except EndOfChannel:
            pass
        except Exception as error:
            if not self._own:
                return f"{type(error).__name__}: {error}"
        return None

    def _offer_ready(self, failure: str | None) -> _Offer:
        # Without the datasets' states, which concern this rank alone.
        batches = []
        for batch, _, claim, read, *_ in self._own:
            size = Size(claim.samples, unsized="" if claim.is_sized else type(batch).__name__)
            batches.append((size, read._replace(position=read.position._replace(state=None))))
        return _Offer(self._offset, batches, self._spare is not None, failure, self._taken.here.workers)

    def _pad_to_full(self, own: Delivery) -> tuple[Any, int]:
        """Return the batch, padded if the rule says so, and how many of its samples are only repeated."""
        batch, samples = own.batch, own.claim.samples
        size = batch_size(batch, self._dim) or 1
        if self._rule.tail != "pad" or size >= self._full or not can_cut(batch, self._dim):
            return batch, 0 if samples else size
        self._lane.backend.wait_ready(own.token)
        return take(batch, [place % size for place in range(self._full)], self._dim), self._full - samples

    def _one_sample_of(self, own: Delivery) -> Delivery:
        """Return one sample of a batch, to be repeated, or the whole batch if it cannot be cut."""
        if can_cut(own.batch, self._dim):
            self._lane.backend.wait_ready(own.token)
            own = own._replace(batch=take(own.batch, [0], self._dim))
        return own._replace(claim=Claim(0, None), nbytes=0)

    def _share_sample(self, root: int) -> None:
        """Send one sample to the ranks that have never received any."""
        world, sample = self._world, None
        if world.rank == root:
            assert self._spare is not None
            self._lane.backend.wait_ready(self._spare.token)
            # Via the host: a pickled tensor would name the root's device, and each rank moves it to its own.
            to_cpu = lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
            sample = tree_map(to_cpu, self._spare.batch), self._own[0].claim.samples
        batch, size = world.comm.broadcast_object(sample, root)
        if self._spare is None:
            batch, token = world.backend.to_device(batch, self._lane.device)
            self._spare = Delivery(batch, token, Claim(0, None), {}, 0, Stamps())
            self._full = max(self._full, size)

    def _leave_rest(self) -> NoReturn:
        """End the loop, though this rank may have more batches."""
        self._own.clear()
        self._lane.cancel()
        raise EndOfChannel


def check_offers(offers: list[_Offer]) -> None:
    """Check that the ranks can take these rounds. All of them see the same offers, so all raise or none does."""
    for rank, offer in enumerate(offers):
        if offer.failure is not None:
            raise BrokenWorldError(f"the loader of rank {rank} failed with {offer.failure}")
        if offer.start != offers[0].start:
            raise CollectiveMismatchError(
                f"rank 0 asks for what comes after {offers[0].start} samples of the stream, rank {rank} after "
                f"{offer.start}; every rank must loop over the loader equally often, and leave it at the same batch"
            )
    check_sizes_known([size for offer in offers for size, _ in offer.batches])
    cuts = [f"{offer.batches[0][1].by} for {offer.workers} worker(s)" for offer in offers if offer.batches]
    if len(set(cuts)) > 1:
        raise RuntimeError(
            f"the ranks' streams are cut in different ways ({', '.join(cuts)}), so samples would be lost and "
            "repeated; let shard, split and num_workers be the same on all ranks"
        )
