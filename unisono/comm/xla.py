"""The XLA runtime's own all_reduce: among all devices of a process, one thread each, or among processes with one each.

Each rank first cuts what it has recorded, and waits until its device has run it. When all have arrived, the last thread
records the reduction for every device and cuts it, one device after the other. So a graph with a collective contains
nothing else, and is the same on each device. The runtime aborts the process if a device does not join a collective
within 15 s, so it is called only when all ranks are present and their devices idle.

What the runtime does not reduce, and what is only moved, goes through main memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from unisono.comm.operations import Call, check_reduction
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.threads import ThreadCommunicator
from unisono.comm.through_host import ThroughHostCommunicator
from unisono.errors import BrokenWorldError
from unisono.protocols import ReduceOp

_OPS = {"sum": "sum", "mean": "sum", "min": "min", "max": "max", "product": "mul"}


def reduction_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The type in which the runtime reduces tensors of a type; None if it does not. The CPU's has no reduction of
    bfloat16, and float16 would overflow in a sum."""
    import torch_xla.runtime

    if dtype is torch.bfloat16:
        return dtype if torch_xla.runtime.device_type() == "TPU" else torch.float32
    return {torch.float16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}.get(dtype)


class XlaCommunicator(ThroughHostCommunicator[ThreadCommunicator | ProcessCommunicator]):
    """Reduces floating-point tensors by the runtime, where the ranks have met in `inner`: threads, whose devices are
    all that the runtime has in this process, or processes, which it joins, with one TPU chip each. `settle` cuts the
    graph of this rank's device, and returns when the device has run it."""

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        check_reduction(tensor, op)
        dtype = reduction_dtype(tensor.dtype)
        if dtype is None or tensor.is_cpu:
            return super().all_reduce(tensor, op)
        # Recorded before the cut, so that the graph with the collective contains no conversion.
        own = tensor.detach().to(dtype)
        self._settle()
        # A peer that failed, or makes another call, breaks this meeting rather than the runtime.
        all_ = self.inner.meet(Call.on("all_reduce", tensor, op), own, lambda all_: _reduce_all(all_, op))
        reduced = all_[self.rank % len(all_)]  # of this process's ranks: all threads, or this one
        return tensor.copy_(reduced / self.size if op == "mean" else reduced)


@cache
def join_devices(devices: tuple[torch.device, ...], size: int) -> None:
    """Declare all devices of this process to the runtime, once, as replicas of one another and of those of its peers;
    `size` is their number. BrokenWorldError: they do not reduce among themselves: runtimes that are not connected
    reduce nothing, silently."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.set_replication(devices[0], list(devices))
    ones = [torch.ones(1, device=device) for device in devices]
    # What was recorded before is cut and run first: on only one of the devices, it would make that graph different, or
    # keep the others waiting in the reduction.
    for device in devices:
        _cut_graph(device)
    torch_xla._XLAC._xla_wait_device_ops(torch_xla._XLAC._xla_real_devices(list(map(str, devices))))
    found = [each.item() for each in _reduce_all(ones, "sum")]
    if any(each != size for each in found):
        raise BrokenWorldError(
            f"an all_reduce of ones over {size} XLA devices gave {found[0]:g}: the runtime does not join them; do not "
            "use an XLA device before spawn or DataParallel"
        )


def _reduce_all(tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
    """Reduce among the tensors' devices, which are idle, and their peers; each reduction in a separate graph."""
    import torch_xla

    reduced = []
    for tensor in tensors:
        reduced.append(torch_xla._XLAC._xla_all_reduce(_OPS[op], tensor, 1.0, [], True))
        _cut_graph(tensor.device)
        torch_xla._XLAC._set_all_reduce_token(str(tensor.device), None)
    return reduced


def _cut_graph(device: torch.device) -> None:
    """Start running what was recorded on the device."""
    import torch_xla

    torch_xla._XLAC._xla_step_marker(str(device), [], wait=False, reset_scope=True)
