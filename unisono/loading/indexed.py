"""Pieces of a DataLoader over a map-style dataset: the indices are sharded, so each rank loads its own samples only."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from types import NoneType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from unisono.comm.outcome import Outcome
from unisono.devices.randomness import seed_of, seeded
from unisono.errors import StateError
from unisono.loading.comparison import place_in
from unisono.loading.fetcher import Fetcher, FetcherBeside, Look, Request, few
from unisono.loading.jobs import Job, Made, count_rows, pieces_of
from unisono.loading.order import batches_of, epoch_asked_of
from unisono.loading.permutation import Permutation
from unisono.loading.sharding import Claim, Part, Round, Rule, Size, deal, mark_of, rounds
from unisono.loading.sources import LOOKED_AT, Begun, Source, State
from unisono.loading.tuning import Tuner
from unisono.loading.workers import WorkerPool, start_worker

_SPREAD = 4  # samples from all of a dataset by which it is compared

logger = logging.getLogger(__name__)


def is_sharded(loader: Any, rank: int, ranks: int) -> bool:
    """Whether the loader's own sampler already gives each rank its part, as torch's DistributedSampler, and any with
    its attributes `num_replicas` and `rank`, or with this rank and number of ranks under other usual names. ValueError
    if it shards for another rank or number of ranks."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    samplers: list[Any] = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    for sampler in samplers:
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            if (sampler.rank, sampler.num_replicas) != (rank, ranks):
                raise ValueError(
                    f"the loader's {type(sampler).__name__} cuts the data for rank {sampler.rank} of "
                    f"{sampler.num_replicas}, but this is rank {rank} of {ranks}; leave the sharding to this loader (a "
                    "plain sampler), or pass DeviceLoader(loader, already_sharded=True) if this is what you want"
                )
            return True
        if _place_of(sampler) == (rank, ranks):
            return True
    return False


def _place_of(sampler: Any) -> tuple[int, int] | None:
    """The rank, and the number of ranks, for which a sampler with these attributes under other names shards."""
    return place_in(getattr(sampler, "__dict__", {})) if not hasattr(sampler, "num_replicas") else None


class IndexedSource(Source):
    """A map-style DataLoader, epoch after epoch, which is not modified. If `seed` is None, it is that of the loader's
    generator, or 0; the rows of a batch lie along `dim`."""

    def __init__(self, loader: DataLoader[Any], seed: int | None, dim: int = 0) -> None:
        self._batch_sampler: Any = loader.batch_sampler
        self._sampler: Any = getattr(self._batch_sampler, "sampler", loader.sampler)
        generator = loader.generator
        if not type(self._sampler).__module__.startswith("torchdata."):  # they create one, seeded by each rank
            generator = getattr(self._sampler, "generator", None) or generator
        has_seed = isinstance(generator, torch.Generator)
        own_seed = generator.initial_seed() if has_seed else 0
        follows = self._batch_sampler if type(self._batch_sampler) not in (BatchSampler, NoneType) else self._sampler
        order, place = type(follows).__name__, _place_of(follows)
        if place is not None and place[1] > 1:  # another number of ranks may have another order
            order += f" of {place[1]} ranks"
        super().__init__(loader.dataset, own_seed if seed is None else seed, order)
        self._fetcher = Fetcher(loader, dim)
        self._dim = dim
        self._is_collated = loader.batch_sampler is not None and loader.collate_fn is not default_collate
        self._has_warned = False
        self._is_compared = False  # with the other ranks' loaders
        self._pool: WorkerPool | None = None
        self.tuner: Tuner | None = None  # where the number of loader workers is found while loops run
        if loader.num_workers:
            self._pool = self._pool_of(loader)

    def _pool_of(self, loader: DataLoader[Any]) -> WorkerPool:
        start = partial(start_worker, loader.dataset, loader.worker_init_fn)
        return WorkerPool(loader, self._fetcher, start)

    def tune(self, loader: DataLoader[Any]) -> Tuner:
        """Find the number of loader workers while loops run, from that of the loader on."""
        if self.tuner is None:
            self._pool = self._pool or self._pool_of(loader)
            self.tuner = Tuner(loader.num_workers)
            self._beside = FetcherBeside(self._fetcher)
        return self.tuner

    def begin_tuned(self, may_read_here: bool) -> None:
        """A pass begins, whose loop may read for itself."""
        assert self.tuner is not None
        self._beside.begin()
        self.tuner.begin(self._beside.fewest if may_read_here else 1)

    def begin(self, rule: Rule) -> Begun:
        """As in `Source`. Warns of an epoch that was set on the sampler, and is not the one that begins."""
        asked = epoch_asked_of(self._batch_sampler, self._sampler)
        if asked not in (None, self.epoch) and not self._has_warned and rule.kept[0] == rule.shard == 0:
            self._has_warned = True
            logger.warning(
                "epoch %d was set on the %s, and the loop takes epoch %d: a prepared loader counts its loops, and sets "
                "the sampler's epoch; call set_epoch on the loader itself",
                asked,
                self.order,
                self.epoch,
            )
        return super().begin(rule)

    def _open(self, epoch: int, position: State, rule: Rule) -> Begun:
        """The order is drawn, and loader workers are started, in the calling thread."""
        first = _local(position["offset"], rule.shards)
        batches, nominal = batches_of(self._sampler, self._batch_sampler, self.seed, epoch, first, self.length or 0)
        seed = seed_of(self.seed, epoch, "samples")
        look, is_several = None, rule.shards == 1 and rule.count > len(rule.kept)
        if is_several and rule.is_compared and not self._is_compared:
            look, batches = _look_at(batches, self._spread(), epoch, seed)
            self._is_compared = True
        jobs = _jobs(batches, nominal, rule, first, epoch, seed)
        made: Iterator[list[Made]]
        # One rank may go on with the next batch. Of several, the others have got theirs of this round.
        skips = rule.count * rule.shards == 1 and rule.virtual is None
        if self.tuner is not None:
            own_seed = seed_of(self.seed, epoch, "workers", rule.kept[0] + rule.shard)
            serve = partial(self._serve_tuned, self.tuner, threading.get_ident(), own_seed, skips)
            made = _serve_pass(serve, jobs, look)
        elif self._pool is None:
            fetch = self._try_to_fetch if skips else partial(self._fetcher.batch, is_seeded=rule.virtual is not None)
            made = ([(job, fetch(job.request)) for job in each] for each in jobs)
            if look is not None:
                with seeded(seed):
                    made = _with_mark(made, self._fetcher.look(look))
        else:
            own_seed = seed_of(self.seed, epoch, "workers", rule.kept[0] + rule.shard)
            made = _serve_pass(partial(self._pool.serve, own_seed, skips=skips), jobs, look)
        if self._is_collated:
            return Begun(epoch, position, count_rows(made, self._dim, rule))
        return Begun(epoch, position, map(pieces_of, made))

    def _spread(self) -> list[int]:
        """Some indices from all of the dataset, if its sampler takes each: shards may begin alike."""
        count, sampler = self.length or 0, self._sampler
        is_whole = type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == count
        return [count * part // _SPREAD - 1 for part in range(1, _SPREAD + 1)] if is_whole and count > LOOKED_AT else []

    def _serve_tuned(
        self,
        tuner: Tuner,
        loop: int,
        seed: int,
        skips: bool,
        requests: Iterator[Request | Look],
        describe: Callable[[], str],
    ) -> Iterator[Any]:
        """The values of the requests, by as many loader workers as the tuner wants; by none, as a worker makes them, in
        the thread of the `loop` only: elsewhere the loop draws from the generators that reading saves and restores."""

        def make(request: Request | Look) -> Any:
            try:
                made = self._beside.make(request)
                tuner.need(self._beside.fewest)
                return made
            except Exception as error:
                if not skips:
                    raise
                return Outcome.failure(error)

        def begin(number: int, these: Iterator[Request | Look]) -> Iterator[Any]:
            if number == 0 and threading.get_ident() == loop:
                return map(make, these)
            assert self._pool is not None
            return self._pool.serve(seed, these, describe, skips, max(number, 1))

        return tuner.serve(begin, requests)

    def _try_to_fetch(self, request: Request) -> Any:
        """The batch, or the failure in its place."""
        try:
            return self._fetcher.batch(request)
        except Exception as error:
            return Outcome.failure(error)

    def seek(self, epoch: int, position: State, rule: Rule) -> None:
        """As in `Source`: the position lies within the epoch."""
        offset, samples = position["offset"], self._order_length()
        _local(offset, rule.shards)
        if samples is not None and offset > samples * rule.shards:
            raise StateError(f"the state's offset is {offset}, but an epoch has {samples * rule.shards} samples")
        super().seek(epoch, {"offset": offset}, rule)

    def num_rounds(self, rule: Rule) -> int:
        samples = self._order_length()
        if samples is None:
            return rule.rounds_of(len(self._batch_sampler))
        batch_sampler = self._batch_sampler
        size, drop_last = (1, False) if batch_sampler is None else (batch_sampler.batch_size, batch_sampler.drop_last)
        samples -= samples % size if drop_last else 0
        full, more = divmod(samples, size * rule.batches)
        if rule.fixed_batch_size:  # an epoch of a single short batch has a single size, too
            return full or int(more > 0 and rule.batches == 1 and rule.tail != "drop")
        return full + (more > 0 and rule.tail != "drop")

    def last_parts(self, rule: Rule, position: State) -> list[Part]:
        """As in `Source`: torch's own batch sampler cuts the order into batches of one size."""
        samples, size = self._order_length(), getattr(self._batch_sampler, "batch_size", None)
        if samples is None or size is None or rule.tail == "drop" or rule.fixed_batch_size or rule.shards > 1:
            return []
        samples -= position["offset"] + (samples % size if self._batch_sampler.drop_last else 0)
        batches = range(0, samples, size)
        last = batches[(len(batches) - 1) // rule.batches * rule.batches :]
        return deal([_size(min(size, samples - each)) for each in last], rule.count) if last else []

    def _order_length(self) -> int | None:
        """The number of samples of an epoch's order; None if it must be drawn to know that."""
        if self._batch_sampler is not None and type(self._batch_sampler) is not BatchSampler:
            return None
        try:
            return len(self._sampler)
        except TypeError:
            return None


def _jobs(
    batches: Iterator[Sequence[Any]], nominal: int | None, rule: Rule, start: int, epoch: int, seed: int
) -> Iterator[list[Job]]:
    """The pieces to load in a pass, round by round, for the places that the rule keeps."""
    dealt_as: tuple[Any, Any] = None, None
    plans: list[tuple[Part, int, Claim]] = []  # of each kept place, what is equal in all rounds that are dealt equally
    # Only other processes can be in another round; with shards, the ranks' indices differ anyway.
    shards, is_marked = rule.shards, rule.shards == 1 and rule.count > len(rule.kept)
    for number, dealt in enumerate(rounds(batches, rule, lambda indices, _: _size(len(indices)), nominal, start)):
        kept = rule.kept_of(number)
        if dealt.parts is not dealt_as[0] or kept is not dealt_as[1]:
            dealt_as = dealt.parts, kept
            plans = [_plan(dealt, place, shards) for place in kept]
        position = {"offset": dealt.stop * shards}
        mark = 0
        if is_marked:
            # To compute each batch's ends would take longer than the rest of a large round.
            seen = dealt.batches[:1] if isinstance(dealt.batches[0], Permutation) else dealt.batches
            mark = mark_of(epoch, dealt.start, [(batch[0], batch[-1]) for batch in seen if batch])
        jobs = []
        for part, ahead, claim in plans:
            batch, own = dealt.batches[part.batch], part.stop - part.start
            if part.padding:
                indices = [batch[place] for place in part.order()]
            else:
                meant = batch if own == len(batch) else batch[part.start : part.stop]
                indices = meant if type(meant) is list else list(meant)
            request = Request(indices, (dealt.start + ahead) * shards + rule.shard, own, epoch, seed, shards)
            jobs.append(Job(request, claim._replace(mark=mark) if mark else claim, position))
        yield jobs


def _plan(dealt: Round[Any], place: int, shards: int) -> tuple[Part, int, Claim]:
    """The part of a place in a round, the number of samples before it, and its claim."""
    part = dealt.parts[place]
    ahead = sum(size.samples for size in dealt.sizes[: part.batch]) + part.start
    total = part.total if shards == 1 else None  # with shards, no rank knows the size of the whole round
    return part, ahead, Claim(part.samples, total, 0, part.repeated, len(dealt.batches))


def _look_at(
    batches: Iterator[Sequence[Any]], spread: list[int], epoch: int, seed: int
) -> tuple[Look | None, Iterator[Sequence[Any]]]:
    """What all ranks read to compare it, of the epoch's first batch and of all data, and the batches; None if there is
    none."""
    if (first := next(batches, None)) is None:
        return None, batches
    indices = [*first[: LOOKED_AT - len(spread)], *spread]
    return Look(Request(indices, 0, len(indices), epoch, seed)), chain([first], batches)


def _with_mark(made: Iterator[list[Made]], seen: int) -> Iterator[list[Made]]:
    """The rounds; the mark of the first one says what was seen of the dataset, too."""

    def marked(job: Job) -> Job:
        return job._replace(claim=job.claim._replace(mark=mark_of(job.claim.mark, seen)))

    return chain(([(marked(job), batch) for job, batch in each] for each in islice(made, 1)), made)


def _serve_pass(
    serve: Callable[..., Iterator[Any]], rounds_of_jobs: Iterator[list[Job]], look: Look | None
) -> Iterator[list[Made]]:
    """The batches of one pass, round by round, as `serve` makes them of requests, after the look."""
    asked, widths, failed = deque[Job](), deque[int](), list[Exception]()

    def requests() -> Iterator[Request | Look]:
        if look is not None:
            yield look
        try:
            for jobs in rounds_of_jobs:
                widths.append(len(jobs))
                for job in jobs:
                    asked.append(job)
                    yield job.request
        except Exception as error:  # raised here, it would replace a batch requested earlier
            failed.append(error)

    def grouped(batches: Iterator[Any]) -> Iterator[list[Made]]:
        # Batches arrive in the order of their requests, which are drawn ahead.
        seen = next(batches) if look is not None else None
        made = ((asked.popleft(), batch) for batch in batches)
        groups = ([first, *islice(made, widths.popleft() - 1)] for first in made)
        yield from groups if seen is None else _with_mark(groups, seen)
        if failed:
            raise failed.pop()

    describe = lambda: f"the samples with indices {few(asked[0].request.indices if asked else [])}"  # noqa: E731
    return grouped(serve(requests=requests(), describe=describe))


_size = lru_cache(Size)  # most batches have the same


def _local(offset: int, shards: int) -> int:
    """Convert an offset in the epoch to one in this rank's own order, if the loader's sampler shards it."""
    if offset % shards:
        raise StateError(
            f"the state's offset {offset} is no multiple of world_size={shards}, and this loader's own sampler cuts "
            "the data by ranks; resume with the world size that it was saved with, or leave the sharding to the loader"
        )
    return offset // shards
