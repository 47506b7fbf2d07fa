"""ParallelLoader and DeviceLoader: batches ready on the device when the loop asks for them.

`ParallelLoader` is one pass over a loader for the devices of one process, each with an iterator of its own, as its
DataParallel threads want it. `DeviceLoader` is for one device and can be looped over again and again, as a plain script
or a spawned worker wants it. In a world of several processes both take this rank's share of every round
(`sharding.py`), unless the loader's own sampler has cut it already.

Who owns what: the loader owns a `Pipeline` with its threads. An iterator keeps its loader alive; the threads do not. So
dropping the last reference stops the threads, and leaving a loop early leaks nothing.

*Threads:* each device's iterator is used by one thread at a time; `close` may be called from any.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from unisono.backends import resolve_device
from unisono.errors import ClosedError
from unisono.loaders.channel import EndOfChannel
from unisono.loaders.sharding import IndexedLoader, Piece, Round, Shard, cut, drops_tail, is_indexed, is_sharded, rounds
from unisono.loaders.stages import Lane, Pipeline
from unisono.protocols import Backend
from unisono.timeline import COMPUTE, FETCH, Track
from unisono.tree import batch_size
from unisono.window import window_of
from unisono.world import World, current_world

_JOIN_S = 5.0

_of_thread = threading.local()
_lock = threading.Lock()
_indexed: weakref.WeakKeyDictionary[Any, dict[tuple[Shard, int | None], IndexedLoader]] = weakref.WeakKeyDictionary()
"""The cut twins of the users' loaders. They live as long as the loader, so its epochs go on from one pass to the next,
whichever object makes the pass, and persistent loader workers stay."""


class ParallelLoader:
    """One pass over `loader`, dealt to `devices`: batch i goes to `devices[i % len(devices)]`.

    Plain batches come out, of the loader's own structure. The last round, when it is short of batches, is split along
    `batchdim` so that every device takes the same number of steps and no sample is lost.

    Args:
        loader: a DataLoader or any other iterable of batches. A DataLoader over a map-style dataset is read in an order
            that depends on (seed, epoch) alone, the epoch being the number of passes begun before.
        devices: the devices of this process, as strings, indices or `torch.device`s, without repetition.
        batchdim: the dimension along which the samples of a batch lie.
        fixed_batch_size: deliver batches of the first one's size only, and end before the first round that has others.
        loader_prefetch_size: loaded batches that may wait, per device.
        device_prefetch_size: moved batches that may wait, per device.
        seed: of the order; None takes the seed of the DataLoader's generator, and 0 where it has none.
        world: whose loader this is; None takes the current one.
        loops: the worlds in which the devices' loops run, where that is not `world`: DataParallel's replicas.

    Raises:
        TypeError: `loader` is not iterable, or an argument has the wrong type.
        ValueError: `devices` is empty, repeats a device or names one that does not exist, or a size is below 1.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        devices: Sequence[str | int | torch.device],
        batchdim: int = 0,
        fixed_batch_size: bool = False,
        loader_prefetch_size: int = 8,
        device_prefetch_size: int = 4,
        *,
        seed: int | None = None,
        world: World | None = None,
        loops: Sequence[World] | None = None,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"loader={loader!r} is a {type(loader).__name__}; pass a DataLoader or an iterable")
        check_size(loader_prefetch_size, "loader_prefetch_size")
        check_size(device_prefetch_size, "device_prefetch_size")
        if isinstance(batchdim, bool) or not isinstance(batchdim, int):
            raise TypeError(f"batchdim={batchdim!r} is a {type(batchdim).__name__}; pass a dimension, 0 for the first")
        resolved = resolve_devices(devices)
        self._world = world or current_world()
        if len(resolved) > 1 and self._world.world_size > 1:
            raise ValueError(
                f"devices={[str(device) for _, device in resolved]} in a world of {self._world.world_size} ranks: each "
                "rank has one device there; pass [current_world().device]"
            )
        self._loader = loader
        self._batchdim = batchdim
        self._fixed_batch_size = bool(fixed_batch_size)
        self._seed = seed
        self._pipeline = Pipeline(loader_prefetch_size, device_prefetch_size)
        for place, (backend, device) in enumerate(resolved):
            self._pipeline.add_lane(device, backend, loops[place] if loops else self._world)
        self._lanes = {str(lane.device): lane for lane in self._pipeline.lanes}
        self._starting = threading.Lock()
        self._has_started, self._is_closed = False, False
        weakref.finalize(self, self._pipeline.stop)

    def per_device_loader(self, device: str | int | torch.device) -> DeviceIterator:
        """The iterator of one device; the first call starts the pass. Asked twice, both iterators share the batches.

        Raises:
            ValueError: the device is not one of this loader's.
            ClosedError: the loader is closed.
        """
        name = str(resolve_device(device)[1])
        if name not in self._lanes:
            raise ValueError(f"device {name} is not one of this loader's devices: {', '.join(self._lanes)}")
        if self._is_closed:
            raise ClosedError("this ParallelLoader is closed; it makes one pass, so make a new one for the next")
        with self._starting:
            if not self._has_started:
                source = self._open()
                self._pipeline.start(_by_workers(source) if getattr(self._loader, "num_workers", 0) else source)
                self._has_started = True
        return DeviceIterator(self, self._lanes[name])

    def __len__(self) -> int:
        """The number of batches for each device, which is the number of rounds of the loader's batches.

        Raises:
            TypeError: the loader has no length.
        """
        ranks = 1 if is_sharded(self._loader) else self._world.world_size
        full, tail = divmod(len(self._loader), ranks * len(self._lanes))  # type: ignore[arg-type]
        return full + (tail > 0 and not drops_tail(self._loader))

    def close(self) -> None:
        """End the pass: wake every waiting thread, drop what is prefetched, wait for the threads. Idempotent.

        A source that is in the midst of producing a batch cannot be interrupted; its thread ends when it returns.
        """
        self._is_closed = True
        self._pipeline.stop()
        self._pipeline.join(_JOIN_S)

    def __enter__(self) -> ParallelLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Iterator[list[Piece]]:
        """The pieces of each round for this process's lanes."""
        loader, dim, is_fixed = self._loader, self._batchdim, self._fixed_batch_size
        rank, ranks, lanes = self._world.rank, self._world.world_size, len(self._lanes)

        def size_of(batch: Any) -> int | None:
            return batch_size(batch, dim)

        if ranks > 1 and is_sharded(loader):
            return ([_unclaimed(each)] for each in rounds(iter(loader), 1, size_of, is_fixed))
        if is_indexed(loader) and lanes == 1 and loader.batch_sampler is not None:
            twin = _twin(loader, Shard(rank, ranks), self._seed)
            return ([piece] for piece in twin.pieces(is_fixed))
        batches: Iterator[Any] = iter(loader) if not is_indexed(loader) else _whole(loader, self._seed)
        keep = range(lanes) if ranks == 1 else [rank]
        dealt = rounds(batches, lanes * ranks, size_of, is_fixed, drops_tail(loader))
        return ([cut(each, place, dim) for place in keep] for each in dealt)


class DeviceIterator:
    """The batches of one device, once. What `ParallelLoader.per_device_loader` returns.

    Attributes:
        valid_samples: how many samples of the last delivered batch count: all of them, or 0 for a batch that only
            repeats a sample so that this rank keeps step with the others.
    """

    def __init__(self, parent: ParallelLoader, lane: Lane) -> None:
        self._parent = parent
        self._lane = lane
        self._loop: _Loop | None = None
        self.valid_samples = 0
        lane.iterators.add(id(self))

    def __iter__(self) -> DeviceIterator:
        return self

    def __len__(self) -> int:
        return len(self._parent)

    def __next__(self) -> Any:
        lane = self._lane
        track = lane.world.timeline.loop()
        before = track.switch(FETCH)
        if self._loop is None or self._loop.track is not track:
            self._loop = _Loop(track, before)
        try:
            lane.backend.mark_step(lane.device)
            delivery = lane.receive()
            lane.backend.wait_ready(delivery.token)
        except BaseException as error:
            self._loop.end()
            self._loop = None
            if isinstance(error, EndOfChannel):
                raise StopIteration from None
            if isinstance(error, StopIteration):  # a loop would take it for the end of the data
                raise RuntimeError("a batch could not be moved to its device: it raised StopIteration") from error
            raise
        self.valid_samples = delivery.samples
        if torch.is_grad_enabled():  # evaluation gathers no gradients, so its batches weigh none
            window_of(lane.world).add(delivery.samples, delivery.total)
        track.count("samples", delivery.samples)
        track.count("batches")
        track.switch(COMPUTE)
        return delivery.batch

    def close(self) -> None:
        """Take no more: this device's batches fall away, the other devices go on. Idempotent."""
        self._lane.cancel()
        self._leave()

    def __del__(self) -> None:
        self._leave()
        self._lane.leave(id(self))

    def _leave(self) -> None:
        """A loop that was left early ends here, unless its thread is in another one by now."""
        if self._loop is not None and self._loop.is_innermost():
            self._loop.end()
            self._loop = None


class _Loop:
    """One loop of one thread in its timeline: what comes after it is outside again, or the loop around it."""

    def __init__(self, track: Track, before: str | None) -> None:
        self.track = track
        self._before = before
        self._around: _Loop | None = getattr(_of_thread, "loop", None)
        _of_thread.loop = self

    def is_innermost(self) -> bool:
        return getattr(_of_thread, "loop", None) is self

    def end(self) -> None:
        self.track.switch(self._before)
        _of_thread.loop = self._around


class DeviceLoader:
    """A loader whose batches arrive on one device, looped over as often as one likes.

    In a world of several processes each rank gets its share of every round. The arguments are those of
    `ParallelLoader`; `device=None` takes the world's device.

    Attributes:
        valid_samples: as for `DeviceIterator`, of the iteration begun last.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | int | torch.device | None = None,
        batchdim: int = 0,
        fixed_batch_size: bool = False,
        loader_prefetch_size: int = 8,
        device_prefetch_size: int = 4,
        *,
        seed: int | None = None,
        world: World | None = None,
    ) -> None:
        self._world = world or current_world()
        self._arguments = (
            loader,
            [self._world.device if device is None else device],
            batchdim,
            fixed_batch_size,
            loader_prefetch_size,
            device_prefetch_size,
        )
        self._seed = seed
        self._latest: weakref.ref[DeviceIterator] | None = None
        self._length = self._pass().__len__  # refuses wrong arguments here, before the first loop

    @property
    def valid_samples(self) -> int:
        latest = self._latest() if self._latest is not None else None
        return latest.valid_samples if latest is not None else 0

    def __iter__(self) -> DeviceIterator:
        parallel = self._pass()
        iterator = parallel.per_device_loader(self._arguments[1][0])
        self._latest = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """The number of batches; TypeError where the loader has no length."""
        return self._length()

    def _pass(self) -> ParallelLoader:
        return ParallelLoader(*self._arguments, seed=self._seed, world=self._world)


def resolve_devices(devices: Sequence[str | int | torch.device]) -> list[tuple[Backend, torch.device]]:
    """The families and normalised devices of a list.

    Raises:
        TypeError: it is no list of devices.
        ValueError: it is empty, repeats a device, or names one that does not exist.
    """
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise TypeError(f"devices={devices!r} is a {type(devices).__name__}; pass a list of devices")
    if not devices:
        raise ValueError("devices=[] is empty; pass at least one device")
    resolved = [resolve_device(device) for device in devices]
    names = [str(device) for _, device in resolved]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"devices={names} repeats {', '.join(repeated)}; name each device once")
    return resolved


def check_size(size: int, name: str) -> None:
    """Refuse what is no bound of a queue.

    Raises:
        TypeError, ValueError: it is no whole number, or below 1.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}={size!r} is a {type(size).__name__}; pass a whole number")
    if size < 1:
        raise ValueError(f"{name}={size} lets no batch wait; pass a number from 1 on")


def _twin(loader: Any, shard: Shard, seed: int | None) -> IndexedLoader:
    with _lock:
        twins = _indexed.setdefault(loader, {})
        key = (shard, seed)
        if key not in twins:
            twins[key] = IndexedLoader(loader, shard, seed)
        return twins[key]


def _whole(loader: Any, seed: int | None) -> Iterator[Any]:
    """Every batch of the loader, uncut, in the order of its next epoch."""
    return (piece.batch for piece in _twin(loader, Shard(0, 1), seed).pieces())


def _by_workers(source: Iterator[list[Piece]]) -> Iterator[list[Piece]]:
    """The pieces of a DataLoader with workers, whose errors are told better.

    The frames of an error are torch's own; they hold the workers, and the error in a circle with itself, which the
    garbage collector would resolve by waiting 5 s for each worker. So they are freed at once. And a worker that is
    killed takes the batches with it that it has loaded, of which torch says no more than that a socket was closed.
    """
    try:
        yield from source
    except Exception as error:
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__context__
        if isinstance(error, EOFError | ConnectionError) and "DataLoader worker" not in str(error):
            raise RuntimeError(
                "a DataLoader worker died before its batch was received; the usual reason is a lack of memory"
            ) from error
        raise


def _unclaimed(alone: Round[Any]) -> Piece:
    """A batch of a loader that cuts itself: nobody knows the whole round, so it has no claim on it."""
    return Piece(alone.batches[0], alone.parts[0].samples, None)
