"""`torch_xla.distributed.data_parallel`: a replica of the network per device, each in a separate thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import unisono
from unisono import DeviceIterator, ParallelLoader, ReplicaContext
from unisono.building_blocks import check_type
from unisono.compat.torch_xla.distributed.parallel_loader import PASSES, PerDeviceLoader, tail_of

T = TypeVar("T")

Context = ReplicaContext


class DataParallel(unisono.DataParallel):
    """Runs a loop on every device with a replica of the network. Arguments, attributes: as for `unisono.DataParallel`.

    With `device_ids=[]`, the native run, the loop gets plain batches as in every other case. Any set of devices is
    allowed. An error of a replica is raised in the caller.
    """

    def __call__(
        self, loop_fn: Callable[..., T], loader: Iterable[Any], fixed_batch_size: bool = False, batchdim: int = 0
    ) -> list[T]:
        """Call `loop_fn(model, device_loader, device, context)` once per device; return the results, in device order.
        The batches of an incomplete last round are dropped."""
        check_type(loop_fn, "loop_fn", "pass a function", Callable)

        @wraps(loop_fn)
        def loop(model: Any, batches: DeviceIterator, *place: Any) -> T:
            return loop_fn(model, PerDeviceLoader(batches), *place)

        if isinstance(loader, ParallelLoader):
            return super().__call__(loop, loader, fixed_batch_size, batchdim)
        options: Any = {"batch_dim": batchdim, "fixed_batch_size": fixed_batch_size, "sources": PASSES}
        return super().__call__(loop, ParallelLoader(loader, self.devices, tail=tail_of(self.devices), **options))
