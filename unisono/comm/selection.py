"""Chooses the communicator for a device family: tensors are sent directly, through main memory, or by its runtime."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.operations import HOST
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.reasons import is_of_transport
from unisono.comm.shared_memory import process_group as shared_memory
from unisono.comm.shared_memory.mapping import map_together
from unisono.comm.shared_memory.meeting_point import MeetingPoint
from unisono.comm.threads import ThreadCommunicator
from unisono.comm.through_host import ThroughHostCommunicator
from unisono.protocols import Backend, Communicator


def thread_communicators(
    devices: Sequence[torch.device], backends: Sequence[Backend], timeout: timedelta
) -> list[Communicator]:
    """Make communicators for threads of this process, one on each device, of these families."""
    communicators = ThreadCommunicator.group(len(devices), timeout)
    transports = {
        backend.thread_transport([each for each, its in zip(devices, backends, strict=True) if its is backend])
        for backend in backends
    }
    places = list(zip(backends, devices, strict=True))
    if transports == {"torch"}:
        for communicator, (backend, device) in zip(communicators, places, strict=True):
            communicator.follow_streams(backend, device)
        return list(communicators)
    if transports == {"runtime"}:
        from unisono.comm.xla import XlaCommunicator, join_devices

        join_devices(tuple(devices), len(devices))
        waits = [partial(backend.synchronize, device) for backend, device in places]
        return [XlaCommunicator(communicator, wait) for communicator, wait in zip(communicators, waits, strict=True)]
    # Also for families with different transports, which have main memory in common.
    settles = [partial(backend.mark_step, device) for backend, device in places]
    return [ThroughHostCommunicator(inner, settle) for inner, settle in zip(communicators, settles, strict=True)]


def group_backend(backend: Backend, asked: str | None = None) -> str:
    """The torch.distributed backend for a group of that family's processes: its own, with shared memory in place of
    gloo, which a shared-memory group becomes if ranks share no memory. `asked` is "gloo", for ranks that share a GPU or
    do not share memory, or None; ValueError otherwise."""
    if asked not in (None, "gloo"):
        raise ValueError(f"process_group={asked!r} does not exist; pass 'gloo', or None for the fastest")
    if asked is not None:
        return asked
    if (usual := backend.process_group_backend) != "gloo":
        return f"{HOST.type}:gloo,{backend.name}:{usual}"
    shared_memory.register()
    return shared_memory.NAME


def bound_device(backend: Backend, device: torch.device, asked: str | None = None) -> torch.device | None:
    """The device that torch's group is bound to at its start (`device_id=`), when NCCL connects, and may fail. None if
    the group only supports main memory, or torch does not know the device as an accelerator."""
    known = torch.accelerator.current_accelerator()
    is_known = known is not None and known.type == device.type
    return device if is_known and backend.process_group_backend != "gloo" and asked is None else None


def process_communicator(
    backend: Backend,
    device: torch.device,
    store: dist.distributed_c10d.Store | None = None,
    owns_group: bool = True,
    timeout: timedelta = timedelta(minutes=30),
) -> Communicator:
    """The communicator of a process in torch's default group; arguments as for `ProcessCommunicator`.

    Ranks of one machine, however launched, compare their calls in the group's own memory, or in memory mapped for that
    alone; others by messages.
    """
    transport = backend.process_transport()
    here = None
    if store is not None and not isinstance(dist.group.WORLD, shared_memory.SharedMemoryGroup):
        own = dist.PrefixStore("unisono/notes", store)  # type: ignore[attr-defined] # torch re-exports it silently
        mapping = map_together(own, dist.get_rank(), dist.get_world_size(), 0, timeout)
        here = None if mapping is None else MeetingPoint(mapping, timeout)
    if transport == "torch":
        return ProcessCommunicator(device, store, owns_group, backend, here)
    if transport == "host" or dist.get_world_size() == 1:
        return ThroughHostCommunicator(
            ProcessCommunicator(HOST, store, owns_group, here=here), partial(backend.mark_step, device)
        )
    from unisono.comm.xla import XlaCommunicator, join_devices

    communicator = ProcessCommunicator(HOST, store, owns_group, here=here)
    join_devices((device,), communicator.size)
    return XlaCommunicator(communicator, partial(backend.synchronize, device))


def begin_average(tensor: torch.Tensor, group: Any) -> torch.futures.Future[torch.Tensor] | None:
    """Begin to average a tensor over the ranks in place; None if the group's transport can only add."""
    is_shared = isinstance(group, shared_memory.SharedMemoryGroup)
    if not is_shared and f"{tensor.device.type}:nccl" not in dist.get_backend_config(group).split(","):
        return None
    work: Any = dist.all_reduce(tensor, dist.ReduceOp.AVG, group, async_op=True)
    if not is_shared:
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]
    averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    averaged.set_result(tensor)
    return averaged


def innermost(comm: Communicator) -> Communicator:
    """The communicator in which the ranks meet, without the wrapper that brings their tensors there."""
    return comm.inner if isinstance(comm, ThroughHostCommunicator) else comm


def raise_translated(error: BaseException, comm: Communicator) -> None:
    """Raise what `translate_error` returns, unless it is the error itself."""
    if (translated := translate_error(error, comm)) is not error:
        raise translated from translated.__cause__


def translate_error(error: BaseException, comm: Communicator) -> BaseException:
    """Translate an error of the transport, even in torch's engines, if its reason is known; return any other."""
    inner = innermost(comm)
    return inner.explain(error) if is_of_transport(error) and isinstance(inner, ProcessCommunicator) else error
