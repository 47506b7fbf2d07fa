"""`torch_xla.distributed.parallel_loader`: batches on their devices, and the end of a step before each.

As in the original, a loader is not split across ranks: each process gives its loader its own part, for example by a
DistributedSampler. Devices of one process take batches in turn, and an incomplete last round is dropped; with one
device, nothing is dropped. A new loader may be created for each pass: the epoch is the number of passes that loaders of
these modules have begun over the DataLoader; with a DistributedSampler, it is the one that the script has set there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch.utils.data.distributed import DistributedSampler

import unisono
from unisono import DeviceIterator, current_world
from unisono.building_blocks import Sources, check_integer, explain_unknown_names
from unisono.compat.left_out import left_out
from unisono.compat.torch_xla.core.devices import DeviceName
from unisono.compat.torch_xla.core.steps import mark_step

PASSES = Sources()  # over each DataLoader, whichever loaders of these modules make them

__getattr__ = left_out(__name__)


class PerDeviceLoader:
    """The batches of one device, once. Each `next` first ends a step (`mark_step`), as does the one after the last
    batch; or every `batches_per_execution` batches."""

    def __init__(self, iterator: DeviceIterator, batches_per_execution: int = 1) -> None:
        self._iterator, self._per_step = iterator, batches_per_execution
        self._since = batches_per_execution  # batches since the end of the last step
        self.close = iterator.close

    def __iter__(self) -> PerDeviceLoader:
        return self

    def __next__(self) -> Any:
        if self._since == self._per_step:
            mark_step()
            self._since = 0
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._since:
                mark_step()
            raise
        self._since += 1
        return batch

    next = __next__

    def __len__(self) -> int:
        return len(self._iterator)


class ParallelLoader(unisono.ParallelLoader):
    """One pass over a loader for several devices of this process: batch i goes to `devices[i % len(devices)]`.

    Args:
        loader: a DataLoader or another iterable of batches, with or without a length.
        devices: without repetition.
        arguments, options: those of `native_options`.

    Raises:
        TypeError, ValueError: an argument is invalid; nothing was started.
    """

    def __init__(self, loader: Iterable[Any], devices: Sequence[DeviceName], *arguments: Any, **options: Any) -> None:
        self._per_step, found = native_options(*arguments, **options)
        super().__init__(loader, devices, tail=tail_of(devices), **found)
        take_epoch(loader, self)

    def per_device_loader(self, device: DeviceName) -> Any:  # type: ignore[override]
        """The iterator of one device, a `PerDeviceLoader`, which keeps this loader alive. Errors: as for the native
        one."""
        return PerDeviceLoader(super().per_device_loader(device), self._per_step)

    per_device_samples = unisono.ParallelLoader.__len__  # of batches


class MpDeviceLoader(unisono.DeviceLoader):
    """A loader whose batches arrive on one device; it can be looped over repeatedly. Arguments as for
    `ParallelLoader`."""

    def __init__(self, loader: Iterable[Any], device: DeviceName, *arguments: Any, **options: Any) -> None:
        self._source = loader
        self._per_step, found = native_options(*arguments, **options)
        super().__init__(loader, device, tail="split", **found)

    def __iter__(self) -> Any:
        take_epoch(self._source, self)
        return PerDeviceLoader(super().__iter__(), self._per_step)


@explain_unknown_names()
def native_options(
    batchdim: int = 0,
    fixed_batch_size: bool = False,
    loader_prefetch_size: int = 8,
    device_prefetch_size: int = 4,
    batches_per_execution: int = 1,
    host_to_device_transfer_threads: int = 1,
    input_sharding: None = None,
) -> tuple[int, dict[str, Any]]:
    """The number of batches per step, and the native loaders' options.

    Args:
        loader_prefetch_size, device_prefetch_size: how many loaded, and moved, batches may wait per device, at least:
            the moved ones are always half of the loaded ones. 0 for the first: nothing is read ahead.
        host_to_device_transfer_threads: has no effect: each device has its own thread.
        input_sharding: None; as for `runtime.use_spmd`.
    """
    check_integer(batches_per_execution, "batches_per_execution", 1)
    check_integer(loader_prefetch_size, "loader_prefetch_size", 0)
    check_integer(device_prefetch_size, "device_prefetch_size", 1)
    if input_sharding is not None:
        raise ValueError(
            "input_sharding is for one program over all devices, which is unisono.Accelerator(strategy='spmd'); leave "
            "it out, and each device gets its own batches"
        )
    return batches_per_execution, {
        "batch_dim": batchdim,
        "fixed_batch_size": fixed_batch_size,
        "prefetch": max(loader_prefetch_size, 2 * device_prefetch_size) if loader_prefetch_size else 0,
        "already_sharded": current_world().world_size > 1,  # the other ranks have parts of their own
        "sources": PASSES,
    }


def take_epoch(loader: Iterable[Any], reader: unisono.ParallelLoader | unisono.DeviceLoader) -> None:
    """Set the epoch of the reader's next pass to that of the loader's DistributedSampler, if there is one."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        reader.set_epoch(sampler.epoch)


def tail_of(devices: Sequence[DeviceName]) -> Literal["drop", "split"]:
    """How the last round is handled: a single device takes what there is."""
    return "drop" if len(devices) > 1 else "split"
