"""Lockstep: ranks that read parts of their own take the same number of steps, though their parts end unevenly.

Each rank tells the others which batches it has ready, at least one or its end. So all know how many rounds they can
take before they must meet again, and how many samples each round has. A rank whose part has ended repeats a sample that
does not count for as long as another one has batches. Nobody waits for a batch that it does not need at once: the more
the loader is ahead of the loop, the less often the ranks meet.

*Threads:* the loop's. All ranks must loop over the loader, as often as the others.

Invariants:
1. All ranks meet at the same rounds, since each knows what all have offered.
2. An error of one rank's source ends the loop on all ranks, behind the rounds that were complete.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from unisono.errors import BrokenWorldError
from unisono.loaders.channel import EndOfChannel
from unisono.loaders.resume import State
from unisono.loaders.sharding import Claim, Tail
from unisono.loaders.stages import Delivery, Lane, Stamps
from unisono.loaders.streams import other_stream
from unisono.timeline import Waits
from unisono.tree import batch_size, can_cut, pick, take, tree_map


class _Ready(NamedTuple):
    """A batch that a rank has: its samples, and behind it what its parts have given, and which of them the last."""

    samples: int
    taken: list[int]
    last: int


class _Offer(NamedTuple):
    """What a rank has for the rounds to come.

    Attributes:
        batches: what is ready; none where its part has ended, or its source has failed.
        has_sample: whether it can repeat one.
        failure: what its source raised.
        by, mark: who cuts its stream, and the mark of that; 0 where it is its own.
    """

    batches: list[_Ready]
    has_sample: bool
    failure: str | None
    by: str
    mark: int


class _Met(NamedTuple):
    """The stamps of a batch for which the ranks met when it was ready."""

    stamps: Stamps
    ready_at: int

    def divide(self, began: int, ended: int) -> Waits:
        source, transfer, peers = self.stamps.divide(began, max(self.ready_at, began))
        return Waits(source, transfer, peers + ended - max(self.ready_at, began))


class Lockstep:
    """The batches of one rank's lane, in step with the other ranks'.

    Args:
        tail: what becomes of the rounds for which some rank has no batch; as in `Rule`.
        dim: the dimension along which the samples of a batch lie.
        ahead: so many batches may wait here, beside those in the lane.
        start: the position where the pass begins.
    """

    def __init__(self, lane: Lane, tail: Tail, dim: int, ahead: int, start: State) -> None:
        self._lane = lane
        self._tail = tail
        self._dim = dim
        self._ahead = ahead
        self._position = start
        self._own: deque[Delivery] = deque()
        self._rounds: deque[list[_Ready | None]] = deque()
        self._latest: Delivery | None = None
        self._full = 0  # the size of the largest batch so far
        self._is_over = False

    def receive(self) -> Delivery:
        """The next batch, or a repeated sample; as `Lane.receive`.

        Raises:
            EndOfChannel: no rank has more.
            BrokenWorldError: another rank's source failed.
            ValueError: a rank has no more, others have, and the rule forbids it.
        """
        if self._is_over:
            raise EndOfChannel
        stamps: Any = Stamps()
        if not self._rounds:
            stamps = self._meet()
        offered = self._rounds.popleft()
        total = sum(each.samples for each in offered if each is not None)
        if offered[self._lane.world.rank] is None:
            own = self._filler()
        else:
            own = self._latest = self._own.popleft()
            self._full = max(self._full, own.claim.samples)
        batch, repeated = self._padded(own.batch, own.claim.samples)
        self._advance(offered, total)
        claim = Claim(own.claim.samples, total, 0, repeated)
        return own._replace(batch=batch, claim=claim, position=self._position, stamps=stamps)

    def _meet(self) -> _Met:
        """Tell the others what is ready here, and find the rounds that all can take."""
        world = self._lane.world
        error = self._fill()
        ready_at = perf_counter_ns()
        stamps = self._own[0].stamps if self._own else Stamps()
        offers: list[_Offer] = world.comm.all_gather_object(self._offer(error))
        if error is not None:
            raise error
        failed = next((rank for rank, offer in enumerate(offers) if offer.failure), None)
        if failed is not None:
            raise BrokenWorldError(f"the loader of rank {failed} failed with {offers[failed].failure}")
        going = [offer for offer in offers if offer.batches]
        if not going:
            self._is_over = True
            raise EndOfChannel
        if going[0].by == "stride" and len({offer.mark for offer in offers if offer.mark}) > 1:
            raise RuntimeError(other_stream("ranks"))
        self._position = {**self._position, "by": going[0].by, "mark": going[0].mark}
        if len(going) < len(offers) and self._tail in ("drop", "error"):
            self._end_uneven(offers)
        for place in range(min(len(offer.batches) for offer in going)):
            self._rounds.append([offer.batches[place] if offer.batches else None for offer in offers])
        if not all(offer.batches or offer.has_sample for offer in offers):
            self._share_sample(offers)
        return _Met(stamps, ready_at)

    def _fill(self) -> BaseException | None:
        """Take what is ready, at least one batch; the error, where the source has none but that."""
        try:
            while not self._own or (len(self._own) < self._ahead and self._lane.sent > self._lane.received):
                self._own.append(self._lane.receive())
        except EndOfChannel:
            return None
        except Exception as error:
            return None if self._own else error
        return None

    def _offer(self, error: BaseException | None) -> _Offer:
        rank = self._lane.world.rank
        batches = []
        for each in self._own:
            _, workers, taken = each.position["layers"][-1]
            own = taken[rank * workers : (rank + 1) * workers]
            batches.append(_Ready(each.claim.samples, own, each.position["last"][rank]))
        has_sample = bool(self._own) or self._latest is not None
        failure = f"{type(error).__name__}: {error}" if error is not None else None
        known = self._own[0].position if self._own else self._position
        return _Offer(batches, has_sample, failure, known["by"], known["mark"] or 0)

    def _advance(self, offered: list[_Ready | None], total: int) -> None:
        """Move the position, which is that of all ranks' parts, behind a round."""
        before = self._position
        ranks, workers, taken = before["layers"][-1]
        taken, last = list(taken), list(before["last"])
        for rank, ready in enumerate(offered):
            if ready is not None:
                taken[rank * workers : (rank + 1) * workers] = ready.taken
                last[rank] = ready.last
        layers = [*before["layers"][:-1], [ranks, workers, taken]]
        self._position = {**before, "offset": before["offset"] + total, "layers": layers, "last": last}
        if self._latest is not None and "states" in self._latest.position:
            self._position["states"] = self._latest.position["states"]

    def _filler(self) -> Delivery:
        """A repeated sample on this rank's device, or the whole of a batch that cannot be cut."""
        latest = self._latest
        assert latest is not None
        batch = take(latest.batch, 0, 1, self._dim) if can_cut(latest.batch, self._dim) else latest.batch
        return latest._replace(batch=batch, claim=Claim(0, None), nbytes=0)

    def _padded(self, batch: Any, samples: int) -> tuple[Any, int]:
        """The batch, padded where that is the rule, and how many of its samples are only repeated."""
        size = batch_size(batch, self._dim) or 1
        if self._tail != "pad" or size >= self._full or not can_cut(batch, self._dim):
            return batch, 0 if samples else size
        return pick(batch, [place % size for place in range(self._full)], self._dim), self._full - samples

    def _share_sample(self, offers: list[_Offer]) -> None:
        """Send one sample to the ranks that have never had any."""
        world = self._lane.world
        root = next(rank for rank, offer in enumerate(offers) if offer.batches)
        sample = None
        if world.rank == root:
            batch = self._own[0].batch
            sample = take(batch, 0, 1, self._dim) if can_cut(batch, self._dim) else batch
            sample = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, sample)
        sample = world.comm.broadcast_object(sample, root)
        if self._latest is None and not self._own:
            batch, token = world.backend.to_device(sample, self._lane.device)
            self._latest = Delivery(batch, token, Claim(0, None), {}, 0, Stamps())
            self._full = max(self._full, offers[root].batches[0].samples)

    def _end_uneven(self, offers: list[_Offer]) -> None:
        ended = [rank for rank, offer in enumerate(offers) if not offer.batches]
        self._is_over = True
        self._lane.cancel()
        if self._tail == "error":
            raise ValueError(
                f"tail='error': the parts of rank(s) {', '.join(map(str, ended))} have ended, others have batches; "
                "pass tail='split' (the default), which repeats a sample there that does not count, or 'drop'"
            )
        self._lane.world.timeline.loop().count("dropped", sum(each.claim.samples for each in self._own))
        self._own.clear()
        raise EndOfChannel
