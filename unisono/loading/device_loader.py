"""DeviceLoader: the batches of one device, in any number of loops, each of which is an epoch.

*Threads:* one loops at a time; `close` of an iterator may be called from any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Unpack

import torch

from unisono.arguments import explain_unknown_names
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.loader_options import NO_COPY, Dealt, LoaderOptions
from unisono.loading.parallel_loader import ParallelLoader
from unisono.loading.sources import Progress, State
from unisono.loading.tuning import Tuner
from unisono.world import World, current_world


@explain_unknown_names(more=LoaderOptions.__annotations__)
class DeviceLoader(Dealt):
    """A loader that delivers its batches on one device, and can be looped over any number of times.

    In a world of several processes each rank gets its share of every round, so every rank must loop over it equally
    often, and begin each loop between the same collectives: CollectiveMismatchError otherwise. Each loop is the next
    epoch, counted by this object: one made for each epoch begins at 0 each time.

    Args:
        device: the device on which batches are delivered; None uses the world's device.
        others: as for `ParallelLoader`, by name.

    Attributes:
        valid_samples, weight: as for `DeviceIterator`, of the innermost open loop, or of the last one.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | int | torch.device | None = None,
        *,
        world: World | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        world = world or current_world()
        self._device = world.device if device is None else device
        # Each loop is an `again()` of it, so its source and its bookmark last for all of them.
        self._never_begun = ParallelLoader(loader, [self._device], world=world, **options)
        self._loops = [Progress()]  # the innermost last; not the iterators, which keep threads alive

    @property
    def valid_samples(self) -> int | Any:  # or None, rarely
        return self._loop.claim.valid_samples

    @property
    def weight(self) -> float | None:
        return self._loop.claim.weight

    @property
    def _loop(self) -> Progress:
        """The innermost open loop; the last one if none is open."""
        return next((each for each in reversed(self._loops) if each.is_open), self._loops[0])

    @property
    def epoch(self) -> int:
        """The epoch of the state: that of the loop begun last until its end, then the next one."""
        return self._never_begun.epoch

    def __iter__(self) -> DeviceIterator:
        """Return the next loop. It counts as an epoch once it draws a batch: some progress bars call `iter` twice."""
        source = self._given
        # A SampleGenerator is an iterator, too, but can be looped over again: its `iter` returns another one.
        if isinstance(source, Iterator) and iter(source) is source and any(each.rounds for each in self._loops):
            raise RuntimeError(
                f"this DeviceLoader was looped over before, and its source, a {type(source).__name__}, yields its "
                "batches only once; pass an iterable that can be iterated again, such as a list or a DataLoader"
            )
        parallel = self._never_begun.again()
        self._loops = [*(each for each in self._loops if each.is_open), parallel._pipeline.lanes[0].progress]
        iterator = parallel.iterator(self._device)
        iterator.loader = self  # whose position a checkpoint holds while it is known, if it is only in this loop
        return iterator

    def __len__(self) -> int:
        """The number of batches of a whole epoch; TypeError if the loader has no length."""
        return len(self._never_begun)

    @property
    def _given(self) -> Any:
        return self._never_begun._plan.loader

    @property
    def tuner(self) -> Tuner | None:
        """What finds the number of its loader workers; None without `num_workers="auto"`."""
        return self._never_begun._plan.tuner

    @property
    def num_virtual(self) -> int | None:
        """The number of virtual ranks whose batches it delivers; None without."""
        return self._never_begun.num_virtual

    def num_skipped(self) -> int:
        """The number of batches before the position at which the next loop begins; 0 if it is unknown."""
        return self._never_begun._plan.num_skipped()

    def __getattr__(self, name: str) -> Any:
        """The attributes of the user's loader (`dataset`, `batch_size`, ...), unchanged: they are for all ranks."""
        # If `__init__` has failed, `_never_begun` is missing, and reading it here would recurse.
        if not name.startswith("_") and "_never_begun" in self.__dict__:
            return getattr(self._given, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        """ValueError for an attribute of the user's loader, which is read when this one is made."""
        if not name.startswith("_") and "_never_begun" in self.__dict__ and hasattr(self._given, name):
            kind = type(self._given).__name__
            raise ValueError(
                f"{name} was set on a prepared loader (a DeviceLoader), which reads its {kind} when it is made; make a "
                f"{kind} with the {name} that you want, and prepare that"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY.format(type(self).__name__))

    def __repr__(self) -> str:
        return f"DeviceLoader({self._given!r}, {str(self._device)!r})"

    def state_dict(self) -> State:
        """Return the position of the loop, after the last batch that it received; as for `ParallelLoader`."""
        return self._never_begun.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop continue from a state; StateError if it is not that of such a loader."""
        self._never_begun.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop. Epochs advance automatically: this is for jumps."""
        self._never_begun.set_epoch(epoch)
