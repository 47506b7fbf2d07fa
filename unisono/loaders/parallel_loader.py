"""ParallelLoader and DeviceLoader: batches ready on the device when the loop asks for them.

`ParallelLoader` is one pass over a loader for the devices of one process, each with an iterator of its own, as its
DataParallel threads want it. `DeviceLoader` is for one device and can be looped over again and again, as a plain script
or a spawned worker wants it. In a world of several processes both take this rank's share of every round
(`sharding.py`), unless the loader's own sampler has cut it already. A DataLoader over a map-style dataset is cut at its
indices, so each rank loads its own samples only; any other iterable is read by every rank, which keeps its part.

Who owns what: the loader owns a `Pipeline` with its threads. An iterator keeps its loader alive; the threads do not. So
dropping the last reference stops the threads, and leaving a loop early leaks nothing.

*Threads:* each device's iterator is used by one thread at a time; `close` may be called from any.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from unisono.backends import resolve_device, resolve_devices
from unisono.errors import ClosedError
from unisono.loaders.device_iterator import DeviceIterator
from unisono.loaders.indexed import drops_tail, is_indexed, is_sharded, twin_of, whole_batches, with_plain_errors
from unisono.loaders.sharding import Piece, Round, Shard, Size, cut, measure, rounds
from unisono.loaders.stages import Pipeline
from unisono.world import World, current_world

_JOIN_S = 5.0


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
        self._finalizer = weakref.finalize(self, self._pipeline.stop)

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
                self._pipeline.start(with_plain_errors(source) if getattr(self._loader, "num_workers", 0) else source)
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
        self._finalizer.detach()  # it holds the lanes' worlds, and so the error that broke one and all that it saw
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

        def size_of(batch: Any) -> Size:
            return measure(batch, dim)

        if ranks > 1 and is_sharded(loader):
            return ([_unclaimed(each)] for each in rounds(iter(loader), 1, size_of, is_fixed))
        if is_indexed(loader) and lanes == 1 and loader.batch_sampler is not None:
            twin = twin_of(loader, Shard(rank, ranks), self._seed)
            return ([piece] for piece in twin.pieces(is_fixed))
        batches: Iterator[Any] = iter(loader) if not is_indexed(loader) else whole_batches(loader, self._seed)
        keep = range(lanes) if ranks == 1 else [rank]
        dealt = rounds(batches, lanes * ranks, size_of, is_fixed, drops_tail(loader))
        return ([cut(each, place, dim) for place in keep] for each in dealt)


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


def check_size(size: int, name: str) -> None:
    """Refuse what is no bound of a queue.

    Raises:
        TypeError, ValueError: it is no whole number, or below 1.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}={size!r} is a {type(size).__name__}; pass a whole number")
    if size < 1:
        raise ValueError(f"{name}={size} lets no batch wait; pass a number from 1 on")


def _unclaimed(alone: Round[Any]) -> Piece:
    """A batch of a loader that cuts itself: nobody knows the whole round, so it has no claim on it."""
    return Piece(alone.batches[0], alone.parts[0].samples, None)
