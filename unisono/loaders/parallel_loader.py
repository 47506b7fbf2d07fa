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
from itertools import repeat
from typing import Any

import torch

from unisono.backends import resolve_device, resolve_devices
from unisono.errors import ClosedError
from unisono.loaders.device_iterator import DeviceIterator
from unisono.loaders.indexed import drops_tail, is_indexed, is_sharded, twin_of, whole_batches, with_plain_errors
from unisono.loaders.sharding import Claim, Piece, Round, Shard, cut, glimpse, mark_of, measure, rounds
from unisono.loaders.stages import Pipeline
from unisono.world import World, current_world

_JOIN_S = 5.0


class ParallelLoader:
    """One pass over `loader`, dealt to `devices`: batch i goes to `devices[i % len(devices)]`.

    Plain batches come out, of the loader's own structure. The last round, when it is short of batches, is split along
    `batchdim` so that every device takes the same number of steps and no sample is lost. A device for which no sample
    is left gets a repeated one: the iterator's `valid_samples` says how many count.

    Args:
        loader: a DataLoader or any other iterable of batches. A DataLoader over a map-style dataset is read in an order
            that depends on (seed, epoch) alone, the epoch being the number of passes begun before. A sampler of one's
            own, and any other iterable, must give the same on every rank.
        devices: the devices of this process, as strings, indices or `torch.device`s, without repetition.
        batchdim: the dimension along which the samples of a batch lie.
        fixed_batch_size: deliver batches of the first one's size only, and end before the first round that has others.
        loader_prefetch_size: loaded batches that may wait, per device.
        device_prefetch_size: moved batches that may wait, per device.
        seed: of the order; None takes the seed of the DataLoader's generator, and 0 where it has none.
        sharded: the loader gives each rank its own part already, as one with a DistributedSampler does, which is
            noticed; it is not cut again. Also the way to the whole data on one rank.
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
        sharded: bool = False,
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
        self._is_cut = self._world.world_size > 1 and (sharded or is_sharded(loader))
        self._drops_tail = drops_tail(loader) and not self._is_cut
        self._pipeline = Pipeline(loader_prefetch_size, device_prefetch_size)
        for place, (backend, device) in enumerate(resolved):
            self._pipeline.add_lane(device, backend, loops[place] if loops else self._world, loops is not None)
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
        ranks = 1 if self._is_cut else self._world.world_size
        full, tail = divmod(len(self._loader), ranks * len(self._lanes))  # type: ignore[arg-type]
        return full + (tail > 0 and not self._drops_tail)

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
        """The pieces of each round for this process's lanes. They do not hold this loader, whose end ends the pass."""
        loader, is_fixed = self._loader, self._fixed_batch_size
        rank, ranks, lanes = self._world.rank, self._world.world_size, len(self._lanes)
        if is_indexed(loader) and not self._is_cut and lanes == 1 and loader.batch_sampler is not None:
            twin = twin_of(loader, Shard(rank, ranks), self._seed)
            return ([piece] for piece in twin.pieces(is_fixed))
        dim = self._batchdim
        loaded: Iterator[tuple[Any, int | None]]
        if is_indexed(loader) and not self._is_cut:
            loaded = whole_batches(loader, self._seed)
        else:
            loaded = zip(iter(loader), repeat(None))
        count = lanes if self._is_cut else lanes * ranks
        dealt = rounds(loaded, count, lambda each: measure(each[0], dim, each[1]), is_fixed, self._drops_tail)
        if self._is_cut:  # nobody knows the whole round, so this rank's batch has no claim on it
            return ([Piece(pairs[0][0], Claim(parts[0].samples, None))] for pairs, _, parts in dealt)
        return _cut_all(dealt, [rank] if ranks > 1 else range(lanes), dim, is_marked=ranks > 1)


class DeviceLoader:
    """A loader whose batches arrive on one device, looped over as often as one likes.

    In a world of several processes each rank gets its share of every round, so every rank must loop over it, as often
    as the others. Each loop is one epoch of `loader`, whose order is the next one: make the DataLoader once, and not
    anew for each epoch. The arguments are those of `ParallelLoader`; `device=None` takes the world's device.

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
        sharded: bool = False,
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
        self._sharded = sharded
        self._latest: weakref.ref[DeviceIterator] | None = None
        self._is_spent = False
        self._length = self._pass().__len__  # refuses wrong arguments here, before the first loop

    @property
    def valid_samples(self) -> int:
        latest = self._latest() if self._latest is not None else None
        return latest.valid_samples if latest is not None else 0

    def __iter__(self) -> DeviceIterator:
        if self._is_spent:
            raise RuntimeError(
                f"this DeviceLoader was looped over before, and its source, a {type(self._arguments[0]).__name__}, "
                "gives its batches only once; pass an iterable that can begin anew, a list or a DataLoader"
            )
        source = self._arguments[0]
        self._is_spent = isinstance(source, Iterator) and iter(source) is source
        parallel = self._pass()
        iterator = parallel.per_device_loader(self._arguments[1][0])
        self._latest = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """The number of batches; TypeError where the loader has no length."""
        return self._length()

    def _pass(self) -> ParallelLoader:
        return ParallelLoader(*self._arguments, seed=self._seed, sharded=self._sharded, world=self._world)


def check_size(size: int, name: str) -> None:
    """Refuse what is no bound of a queue.

    Raises:
        TypeError, ValueError: it is no whole number, or below 1.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}={size!r} is a {type(size).__name__}; pass a whole number")
    if size < 1:
        raise ValueError(f"{name}={size} lets no batch wait; pass a number from 1 on")


def _cut_all(
    dealt: Iterator[Round[tuple[Any, int | None]]], keep: Sequence[int], dim: int, is_marked: bool
) -> Iterator[list[Piece]]:
    """The pieces that this process keeps of each round, marked where other processes read the round too."""
    for number, (pairs, sizes, parts) in enumerate(dealt):
        batches = [batch for batch, _ in pairs]
        mark = mark_of(number, sizes, [glimpse(batch) for batch in batches]) if is_marked else 0
        yield [cut(Round(batches, sizes, parts), place, dim, mark) for place in keep]
