"""DataParallel: one replica of the model per device, each in a thread of its own with its part of every global batch.

Semantics of PyTorch/XLA's thread-based `DataParallel`, but for its faults: a replica that raises, raises in the caller;
no batch is dropped; plain batches come out in every case; any list of devices will do.

Who owns what: the object owns the replicas, a context and a timeline for each, and the threads. Each call makes a new
meeting for them, so a call that failed leaves a usable object.

*Threads:* one call at a time; `loop_fn` runs in the replica threads, at once.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from unisono.backends import pick_backend, resolve_device, resolve_devices
from unisono.backends.cores import fair_num_threads, kept_num_threads
from unisono.errors import BusyError
from unisono.loaders.device_iterator import DeviceIterator
from unisono.loaders.parallel_loader import ParallelLoader
from unisono.outcome import add_note_once
from unisono.parallel.replicas import ReplicaThreads
from unisono.timeline import Timeline
from unisono.world import World, current_world, solo_world, thread_worlds, use_world

T = TypeVar("T")

LoopFn = Callable[[nn.Module, DeviceIterator, torch.device, "Context"], T]


class Context(SimpleNamespace):
    """What a replica keeps from one call to the next: any attribute that a loop sets on it.

    Attributes:
        device: the replica's device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)

    def getattr_or(self, name: str, default: Any) -> Any:
        """The attribute `name`; where it is missing or None, `default` (called, if it is callable), which is kept."""
        value = getattr(self, name, None)
        if value is None:
            value = default() if callable(default) else default
            setattr(self, name, value)
        return value


class DataParallel:
    """Runs a loop on every device with a replica of the network.

    Args:
        network: a module, which is copied to each device and not touched, or a callable that makes one, called once.
        device_ids: devices as strings, indices or `torch.device`s; None takes every device of the picked family. An
            empty list is the native run: the module itself, on its own device, in the calling thread.

    Attributes:
        devices: the devices, as strings.
        models: the replicas, in the same order.

    Raises:
        TypeError: `network` is no module and makes none, or `device_ids` is no list of devices.
        ValueError: a device is repeated or does not exist.
        RuntimeError: for a native run, the module's parameters lie on several devices.
    """

    def __init__(
        self,
        network: nn.Module | Callable[[], nn.Module],
        device_ids: Sequence[str | int | torch.device] | None = None,
    ) -> None:
        module = network if isinstance(network, nn.Module) else network() if callable(network) else network
        if not isinstance(module, nn.Module):
            raise TypeError(f"network={network!r} gives a {type(module).__name__}; pass a module, or what makes one")
        self._is_native = (
            isinstance(device_ids, Sequence) and not device_ids and not isinstance(device_ids, str | bytes)
        )
        if self._is_native:
            resolved = [resolve_device(_only_device(module))]
            self.models = [module]
        else:
            if device_ids is None:
                family = pick_backend()
                device_ids = [family.device(index) for index in range(family.device_count())]
            resolved = resolve_devices(device_ids)
            self.models = [copy.deepcopy(module).to(device) for _, device in resolved]
        self.devices = [str(device) for _, device in resolved]
        self._resolved = resolved
        self._contexts = [Context(device) for _, device in resolved]
        self._timelines = [Timeline() for _ in resolved]
        self._threads = ReplicaThreads(len(resolved))
        self._busy = threading.Lock()

    def __call__(
        self,
        loop_fn: LoopFn[T],
        loader: Iterable[Any] | ParallelLoader,
        fixed_batch_size: bool = False,
        batchdim: int = 0,
    ) -> list[T]:
        """Call `loop_fn(model, device_loader, device, context)` once per device, all at the same time.

        Args:
            loop_fn: the loop; its `device_loader` yields plain batches, each step's batches forming a global batch.
            loader: as for `ParallelLoader`, or one of these over the same devices: its arguments hold, and its state
                goes on from call to call.
            fixed_batch_size, batchdim: as for `ParallelLoader`.

        Returns:
            What the calls returned, in device order.

        Raises:
            BusyError: a call of this object is running.
            RuntimeError: this is a worker, or a replica, of several.
            BaseException: what the first failing replica raised, in its own type; the object can be used again.
        """
        if not callable(loop_fn):
            raise TypeError(f"loop_fn={loop_fn!r} is a {type(loop_fn).__name__}; pass a function")
        if not self._busy.acquire(blocking=False):
            raise BusyError("this DataParallel is running a loop, and runs one at a time; make another one")
        try:
            _refuse_ranks(current_world())
            if self._is_native:
                return [self._run_native(loop_fn, loader, fixed_batch_size, batchdim)]
            return self._run_replicas(loop_fn, loader, fixed_batch_size, batchdim)
        finally:
            self._busy.release()

    def _run_native(
        self, loop_fn: LoopFn[T], loader: Iterable[Any] | ParallelLoader, fixed_batch_size: bool, batchdim: int
    ) -> T:
        backend, device = self._resolved[0]
        world = solo_world(backend, device, self._timelines[0])
        with use_world(world), self._pass(loader, fixed_batch_size, batchdim, [world]) as parallel:
            return loop_fn(self.models[0], parallel.per_device_loader(device), device, self._contexts[0])

    def _run_replicas(
        self, loop_fn: LoopFn[T], loader: Iterable[Any] | ParallelLoader, fixed_batch_size: bool, batchdim: int
    ) -> list[T]:
        devices = [device for _, device in self._resolved]
        worlds = thread_worlds(devices, self._timelines)
        num_threads = fair_num_threads(len(devices))
        with self._pass(loader, fixed_batch_size, batchdim, worlds) as parallel, kept_num_threads():
            loaders = [parallel.per_device_loader(device) for device in devices]
            failed: list[int] = []
            bodies = [
                _body(loop_fn, world, model, loaders, context, num_threads, failed)
                for world, model, context in zip(worlds, self.models, self._contexts, strict=True)
            ]

            def interrupt(error: BaseException) -> None:
                worlds[0].comm.abort(error)
                parallel.close()

            outcomes = self._threads.run(bodies, interrupt)
        if failed:
            cause = next((rank for rank in failed if not outcomes[rank].is_secondary), failed[0])
            outcomes[cause].unwrap()
        return [outcome.unwrap() for outcome in outcomes]

    def _pass(
        self, loader: Iterable[Any] | ParallelLoader, fixed_batch_size: bool, batchdim: int, loops: list[World]
    ) -> ParallelLoader:
        """A new pass over the loader, for loops that run in those worlds."""
        if not isinstance(loader, ParallelLoader):
            return ParallelLoader(loader, self.devices, batchdim, fixed_batch_size, loops=loops)
        if loader.devices != self.devices:
            raise ValueError(f"the ParallelLoader is over {loader.devices}, this DataParallel over {self.devices}")
        if fixed_batch_size or batchdim:
            raise ValueError("fixed_batch_size and batchdim are arguments of the ParallelLoader that was given")
        return loader.again(loops)


def _body(
    loop_fn: LoopFn[T],
    world: World,
    model: nn.Module,
    loaders: Sequence[DeviceIterator],
    context: Context,
    num_threads: int,
    failed: list[int],
) -> Callable[[], T]:
    """What one replica thread runs: the loop in its world, which it leaves, or breaks when it fails.

    A failure closes the loaders of all, since the others may never come to a collective. Before that it notes its rank
    in `failed`, so that whom it woke with an error stands behind it.
    """
    device_loader = loaders[world.rank]

    def body() -> T:
        try:
            with use_world(world):
                world.backend.activate(world.device)
                torch.set_num_threads(num_threads)
                result = loop_fn(model, device_loader, world.device, context)
            world.comm.leave()
            return result
        except BaseException as error:
            failed.append(world.rank)
            add_note_once(error, str(world))
            world.comm.abort(error)
            for each in loaders:
                each.close()
            raise
        finally:
            device_loader.close()  # what is still dealt to this replica falls away; the others go on

    return body


def _refuse_ranks(world: World) -> None:
    if world.world_size > 1:
        raise RuntimeError(
            f"DataParallel in rank {world.rank} of {world.world_size}: its threads would meet one another only, and "
            "not the other ranks; use one or the other"
        )


def _only_device(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"device_ids=[] runs the module where it is, but its parameters lie on {names}; move it first"
        )
    return next(iter(devices), torch.get_default_device())
