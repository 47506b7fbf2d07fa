"""ParallelLoader: batches ready on each device when its loop requests them.

In a world of several processes it takes this rank's share of every round (`sharding.py`), unless the loader's own
sampler already shards it: by indices (`indexed.py`), by parts of a stream (`streams.py`), or, of any other iterable, by
reading all and keeping a part.

Ownership: the loader owns a `Pipeline` with its threads. An iterator keeps its loader alive; the threads do not. So
dropping the last reference stops the threads, and leaving a loop early leaks nothing.

*Threads:* each device's iterator is used by one thread at a time; `close` may be called from any.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

import torch

from unisono.arguments import check_integer, explain_unknown_names
from unisono.comm.thread_start import check_threads
from unisono.devices import resolve_device
from unisono.devices.switches import is_as_in_a_new_thread
from unisono.errors import BusyError, ClosedError
from unisono.loading.bookmark import Bookmark, state_after
from unisono.loading.channel import EndOfChannel
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.indexed import IndexedSource
from unisono.loading.loader_options import NO_COPY, Dealt, LoaderOptions
from unisono.loading.loader_plan import LoaderPlan
from unisono.loading.lockstep import Lockstep
from unisono.loading.pipeline import Delivery, Lane, Pace, Pipeline
from unisono.loading.registry import warn_of_repetition
from unisono.loading.sources import Begun, Progress, State, one_by_one
from unisono.loading.unthreaded import Unthreaded
from unisono.report.timeline import LoopPlace
from unisono.world import World, current_world

_JOIN_S = 5.0


@explain_unknown_names(more=LoaderOptions.__annotations__)
class ParallelLoader(Dealt):
    """One pass over `loader`, distributed to `devices`: batch i goes to `devices[i % len(devices)]`.

    Every device takes the same number of steps, and no sample is lost: `sharding.py` defines which samples go where.

    Args:
        loader: a DataLoader or any other iterable of batches; a user-defined sampler, and any other iterable, must
            yield the same on every rank.
        devices: the devices of this process, as strings, indices or `torch.device`s, without repetition.
        batch_dim: the sample dimension of a batch (0), along which loaded batches are cut.
        fixed_batch_size: deliver batches of the first one's size only, and end before the first round that has others.
            A batch of unknown size is a ValueError.
        prefetch: loaded batches (8) that may wait, per device, and half as many (at least one) that are moved already.
            0, for one device: nothing is read ahead, and no thread is started; the loop itself reads, as it does
            anyway, without loader workers, while a batch costs less than a change of thread. With several devices,
            more may wait for one while none waits for another, so that one thread may loop over them in turn.
        split: the meaning of a batch of `loader`. "rank" (if not given): one rank's batch; a global batch consists of
            one per rank. "global": the global batch, of which each rank gets its part.
        tail: what happens to the last round if it is incomplete. "split": it is split along the samples; a device for
            which none is left gets a repeated one that does not count. "drop": it is dropped. "pad": each batch is
            padded with repeated samples, which come last and do not count. None: "drop" for a DataLoader with
            drop_last=True, otherwise "split".
        seed: seeds the order; None uses the seed of the DataLoader's generator, or 0 if it has none.
        already_sharded: True: the loader gives each rank its own part, and is not sharded again. A loader with a
            DistributedSampler is recognised anyway. This is also the way to get all data on one rank, except for an
            iterable dataset. None: the ranks compare what they read first, and a difference is an error. False: it is
            the same on every rank, though it may look different, since it is augmented at random.
        virtual_ranks: as for `Accelerator`: the batches of this number of ranks, of which each rank gets several, one
            after another, and for one device. None: each rank is one.
        num_workers: "auto": the loader workers of a DataLoader over a map-style dataset are as many as its loop needs,
            found while it runs, from the number of the DataLoader on; for one device. The batches are those that a
            loader worker makes, bit for bit. Other loaders keep theirs. None: as the DataLoader says.
        world: the world of this loader; None uses the current one.
        loops: the worlds in which the devices' loops run, if not in `world`: DataParallel's replicas.
        sources: counts the epochs of `loader`, if several loaders iterate over it. None: this one's pass is epoch 0,
            and those of `again` are the next ones.

    Raises:
        TypeError: `loader` is not iterable, or an argument has the wrong type or does not exist.
        ValueError: `devices` is empty, repeats a device or names one that does not exist, or another argument is out of
            its range.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        devices: Sequence[str | int | torch.device],
        *,
        world: World | None = None,
        loops: Sequence[World] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        self._plan = LoaderPlan(loader, devices, world or current_world(), options)
        self._loops = loops
        self._bookmark, self._pace = Bookmark(self._plan.source, self._plan.rule), Pace()
        self._prepare_pass()

    def _prepare_pass(self) -> None:
        # Replicas have a thread each; other loops over several devices may be one after another.
        may_overflow = self._loops is None and len(self._plan.devices) > 1
        self._pipeline = Pipeline(self._plan.prefetch, may_overflow)
        for place, (backend, device) in enumerate(self._plan.devices):
            lane = Lane(self._pipeline, device, backend, self._loop_world(place).timeline)
            self._pipeline.lanes.append(lane)
        self._pipeline.lanes[0].pace = self._pace
        self._starting = threading.Lock()
        self._begun: Begun | None = None
        self._receivers: list[Callable[[], Delivery]] = []  # of a pass that has begun
        self._has_first = False  # whether a loop has received, or failed to receive, its first batch
        self._words = ""  # to be announced with the first round
        self._is_closed = False
        self._finalizer = weakref.finalize(self, self._pipeline.stop)

    def per_device_loader(self, device: str | int | torch.device) -> DeviceIterator:
        """The iterator of one device; the first call starts the pass. Two iterators of a device share its batches.
        ValueError if the device is not one of this loader's, ClosedError if the loader is closed."""
        iterator = self.iterator(device)
        self._begin_pass()
        return iterator

    def iterator(self, device: str | int | torch.device) -> DeviceIterator:
        """As `per_device_loader`, but the pass starts when the first batch is drawn."""
        name, names = str(resolve_device(device)[1]), self.devices
        if name not in names:
            raise ValueError(f"device {name} is not one of this loader's devices: {', '.join(names)}")
        place = names.index(name)
        lane, world = self._pipeline.lanes[place], self._loop_world(place)
        receive, state = partial(self._receive_for, place), partial(self._state_of, lane)
        return DeviceIterator(self, lane, world, receive, state, self._plan.balance, self._plan.tuner)

    def _receive_for(self, place: int) -> Delivery:
        # Without the lock, which each batch would pay for; `_begin_pass` checks again.
        return self._receivers[place]() if self._has_first else self._receive_first(place)

    def _receive_first(self, place: int) -> Delivery:
        """Receive the first batch, after beginning the pass. Announce the loop with its round before it is delivered:
        ranks that read other batches would lose samples, and repeat others."""
        if not self._receivers:
            self._begin_pass()
        self._has_first = True
        if not self._words:
            return self._receivers[place]()
        delivery = None
        with suppress(EndOfChannel):
            delivery = self._receivers[place]()
        self._plan.world.comm.announce(f"{self._words}, round {delivery.claim.mark if delivery else 0:08x}")
        if delivery is None:
            raise EndOfChannel
        return delivery

    def _state_of(self, lane: Lane) -> State:
        begun, source = self._begun, self._plan.source
        return self.state_dict() if begun is None else state_after(source, begun, [lane.progress])

    def _begin_pass(self) -> None:
        """Start the pass, if it has not begun."""
        if self._is_closed:
            raise ClosedError("this ParallelLoader is closed, after its one pass; again() returns the next one")
        with self._starting:
            if self._receivers:
                return
            if self._plan.world.rank == 0:
                warn_of_repetition(self._plan.loader, self._plan.source)
            try:
                self._start_pass()
            except BaseException:
                if self._begun is not None:
                    # No batch was delivered, so the epoch that was to begin is still the next one.
                    self._plan.source.seek(self._begun.epoch, self._begun.position, self._plan.rule)
                    self._is_closed = True
                raise

    def _start_pass(self) -> None:
        plan, source = self._plan, self._plan.source
        if plan.prefetch:  # threads may start later; or never, if no batch takes long
            check_threads("a loop over a loader")
        # A rank that loops alone would get its part of the data only. A helper thread's loop begins at any time.
        own = threading.main_thread() if plan.world.is_of_processes else plan.maker
        if plan.rule.count > 1 and self._loops is None and threading.current_thread() is own:
            self._words = plan.meet_others()
        rule = plan.rule_of_next_pass()
        # `_receivers` is assigned last and whole: `_receive_for` reads it without the lock.
        pipeline, lane = self._pipeline, self._pipeline.lanes[0]
        may_stay = len(plan.devices) == 1 and lane.is_direct and not source.is_uneven and is_as_in_a_new_thread()
        has_workers = None
        if plan.tuner is not None:
            # In another thread than the loop's, the dataset would meet the generators while the loop draws from them.
            source.begin_tuned(may_stay and rule.virtual is None)  # type: ignore[attr-defined]
            has_workers = plan.tuner.has_workers
        begun = source.begin(rule)
        reads_here = not (has_workers() if has_workers else getattr(plan.read, "num_workers", 0))
        if rule.virtual is not None:
            # What other loaders draw, with workers or without, is drawn in the thread that reads.
            reads_here = reads_here or not isinstance(source, IndexedSource)
            begun = begun._replace(pieces=one_by_one(begun, rule, rule.virtual, self.seed, reads_here))
        # Without the pieces, whose generator holds the dataset and the loader workers.
        self._begun = begun._replace(pieces=iter(()))
        self._bookmark.open(self._begun, [each.progress for each in pipeline.lanes])
        # With virtual ranks, another thread would draw the loop's random numbers.
        must_stay = not plan.prefetch or (rule.virtual is not None and reads_here)
        if must_stay or (may_stay and reads_here):
            read_ahead = None if must_stay else pipeline.start
            self._receivers = [Unthreaded(lane, begun.pieces, read_ahead, has_workers).receive]
            return
        pipeline.start(begun.pieces)
        if source.is_uneven:
            ahead = max(plan.prefetch // 2, 1)
            self._receivers = [Lockstep(lane, plan.world, plan.rule, plan.batch_dim, ahead, begun.stream).receive]
        else:
            self._receivers = [each.receive for each in pipeline.lanes]

    def __iter__(self) -> Any:
        raise TypeError(
            "a ParallelLoader is looped over device by device, each in its thread: pass it to a DataParallel, or use "
            "loader.per_device_loader(device); for one device there is DeviceLoader(loader)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY.format(type(self).__name__))

    def _loop_world(self, place: int) -> World:
        return self._loops[place] if self._loops else self._plan.world

    def again(self, loops: Sequence[World] | None = None) -> ParallelLoader:
        """Return a loader for the next pass over the same source; this one's `state_dict` covers it, too."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._loops = loops or self._loops
        twin._prepare_pass()
        return twin

    def dealt_anew(self) -> ParallelLoader:
        """A loader for the rest of the pass of its one device, after a round, as the ranks have agreed to carry the
        virtual ranks. This one is closed."""
        assert self._begun is not None
        self._bookmark.seek(self._begun.epoch, self._pipeline.lanes[0].progress.position)
        return self.begun_anew()

    def begun_anew(self) -> ParallelLoader:
        """A loader for the rest of the pass of its one device, from the position of the source. This one is closed."""
        self.close()
        twin, progress = self.again(), self._pipeline.lanes[0].progress
        twin._pipeline.lanes[0].progress = progress
        progress.position = None  # where the twin begins
        return twin

    def state_dict(self) -> State:
        """Return the position of the loops: after the last round of which every device has received its batch. When all
        loops have reached the end, it is the beginning of the next epoch. The state is the same on every rank, and can
        be loaded by a loader with other numbers of ranks or devices, another batch size, and other loader workers."""
        return self._bookmark.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the pass continue from a state; StateError, whose `reason` says why, if it is not the state of such a
        loader; BusyError if the pass has begun."""
        self._refuse_begun("load_state_dict")
        self._bookmark.load(state)

    @property
    def epoch(self) -> int:
        """The epoch of the state: that of this pass until its end, then the next one."""
        return int(self.state_dict()["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the pass; BusyError if it has begun. Epochs advance automatically: this is for jumps."""
        self._refuse_begun("set_epoch")
        check_integer(epoch, "epoch", 0)
        self._bookmark.seek(epoch, {"offset": 0})

    @property
    def seed(self) -> int:
        """What seeds the order."""
        return self._plan.source.seed

    @property
    def num_virtual(self) -> int | None:
        """The number of virtual ranks; None without."""
        virtual = self._plan.rule.virtual
        return None if virtual is None else virtual.count

    @property
    def devices(self) -> list[str]:
        return [str(device) for _, device in self._plan.devices]

    def _refuse_begun(self, what: str) -> None:
        if self._receivers:
            raise BusyError(
                f"{what} comes before the pass, which this ParallelLoader has begun; get the next one by again()"
            )

    def __len__(self) -> int:
        """The number of batches of a whole epoch for each device; TypeError if the loader has no length."""
        return self._plan.source.num_rounds(self._plan.rule) * self._plan.in_turn

    def uneven_tail(self) -> tuple[int, int] | None:
        """The samples of a rank whose part of the pass's last round is uneven, and those of the round; None if there is
        none, or it is not known before."""
        parts = [] if self._begun is None else self._plan.source.last_parts(self._plan.rule, self._begun.position)
        return next(((each.samples, each.total) for each in parts if each.samples * len(parts) != each.total), None)

    def place_of(self, progress: Progress) -> LoopPlace:
        """Where a loop of the pass, which has begun, is in its epoch."""
        assert self._begun is not None
        lengths, before = self._plan.lengths(), self._plan.batches_before(self._begun.position)
        return LoopPlace(self._begun.epoch, before, None if lengths is None else lengths[1], progress)

    def close(self) -> None:
        """End the pass: wake every waiting thread, drop what is prefetched, wait for the threads. Idempotent. A source
        that is producing a batch cannot be interrupted; its thread ends when the source returns."""
        self._is_closed = True
        self._pipeline.stop()
        self._finalizer.detach()  # it keeps the lanes alive, with all that they reference
        self._pipeline.join(_JOIN_S)

    def __enter__(self) -> ParallelLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
