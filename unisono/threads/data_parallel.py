"""DataParallel: one replica of the model per device, each in its own thread with its part of every global batch.

The semantics are those of PyTorch/XLA's thread-based `DataParallel`, without its faults: a replica's exception is
raised in the caller; no batch is dropped; loops always get plain batches; any list of devices is allowed. Each call
resets the replicas' communicator, so after a failed call the object can be called again, although its replicas may
differ by then: a note of the error says so.

*Threads:* one call at a time; `loop_fn` runs concurrently in the replica threads, under the caller's grad mode,
autocast and context variables.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn

from unisono.arguments import check_type
from unisono.comm.outcome import add_note_once
from unisono.devices import pick_backend, resolve_device, resolve_devices
from unisono.devices.cores import fair_num_threads, kept_num_threads
from unisono.devices.movement import move_module
from unisono.devices.randomness import seed_of
from unisono.errors import BusyError
from unisono.loading.device_iterator import DeviceIterator
from unisono.loading.parallel_loader import ParallelLoader
from unisono.loading.registry import Sources
from unisono.report.timeline import Timeline
from unisono.threads.replica_generators import ReplicaGenerators
from unisono.threads.replicas import ReplicaThreads, modes_of_this_thread
from unisono.training.agreement import first_difference
from unisono.training.optimizer import ByHand
from unisono.world import World, current_world, meet_anew, solo_world, thread_worlds, use_world

T = TypeVar("T")


class ReplicaContext(SimpleNamespace):
    """Keeps any attribute that a loop sets on it from one call to the next; `device` is the replica's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)

    def getattr_or(self, name: str, default: Any) -> Any:
        """Return the attribute `name`; if missing or None, first store `default` (or its result, if callable)."""
        value = getattr(self, name, None)
        if value is None:
            value = default() if callable(default) else default
            setattr(self, name, value)
        return value


_users: WeakValueDictionary[torch.device, DataParallel] = WeakValueDictionary()  # of lazy devices, the last ones
_taking = threading.Lock()

LoopFn = Callable[[nn.Module, DeviceIterator, torch.device, ReplicaContext], T]


class DataParallel:
    """Runs a loop on every device with a replica of the network.

    Args:
        network: a module, which is copied to each device and not changed, or a callable that creates one, called once.
        device_ids: devices as strings, indices or `torch.device`s; None uses every device of the default family. With
            an empty list the loop runs natively: on the module itself, on its own device, in the calling thread.

    Attributes:
        devices: the devices, as strings.
        models: the replicas, in the same order.
        generators: each replica's generator on the CPU, for dropout and `torch.rand`. Seeded by its rank and by the
            current `torch.initial_seed()`; `torch.manual_seed` in a replica seeds its own. Empty for a native run.

    Raises:
        TypeError: `network` is not a module and does not create one, or `device_ids` is not a list of devices.
        ValueError: a device is repeated or does not exist.
        BusyError: an XLA device is used by another DataParallel.
        RuntimeError: for a native run, the module's parameters are on several devices.
    """

    def __init__(
        self,
        network: nn.Module | Callable[[], nn.Module],
        device_ids: Sequence[str | int | torch.device] | None = None,
    ) -> None:
        module = network if isinstance(network, nn.Module) else network() if callable(network) else network
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"network={network!r} gives a {type(module).__name__}; pass a module, or a function that creates one"
            )
        self._is_native = isinstance(device_ids, list | tuple) and not device_ids
        if self._is_native:
            resolved = [resolve_device(_only_device(module))]
        else:
            if device_ids is None:
                family = pick_backend()
                device_ids = [family.device(index) for index in range(family.device_count())]
            resolved = resolve_devices(device_ids)
        self.devices = [str(device) for _, device in resolved]
        self._resolved = resolved
        self._threads, self._num_threads = ReplicaThreads(len(resolved)), fair_num_threads(len(resolved))
        self._calls: dict[object, None] = {}  # the mark of the running call, then of calls that are being refused
        # Enters like a call, with the attributes above.
        self.models = [module] if self._is_native else self._run_alone(lambda: self._copy_to_devices(module))
        self._contexts = [ReplicaContext(device) for _, device in resolved]
        self._timelines = [Timeline() for _ in resolved]
        self._randomness = [
            ReplicaGenerators(seed_of("replica", torch.initial_seed(), rank), backend, device)
            for rank, (backend, device) in enumerate([] if self._is_native else resolved)
        ]
        self.generators = [each.cpu for each in self._randomness]
        self._sources = Sources()  # for the DataLoaders that it was called with: each call is the next epoch

    def __repr__(self) -> str:
        return f"DataParallel({type(self.models[0]).__name__}, {self.devices})"

    def __call__(
        self,
        loop_fn: LoopFn[T],
        loader: Iterable[Any] | ParallelLoader,
        fixed_batch_size: bool = False,
        batch_dim: int = 0,
    ) -> list[T]:
        """Call `loop_fn(model, device_loader, device, context)` once per device, all at the same time.

        Args:
            loop_fn: the loop; its `device_loader` yields plain batches, and the batches of a step form a global batch.
            loader: as for `ParallelLoader`; each call is the next epoch of a DataLoader. Or a `ParallelLoader` over the
                same devices, whose arguments apply and whose state continues from call to call.
            fixed_batch_size, batch_dim: as for `ParallelLoader`.

        Returns:
            The results of the calls, in device order.

        Raises:
            BusyError: a call of this object is running, or was interrupted twice and has not ended yet; on XLA devices,
                also one of another object over one of them.
            RuntimeError: this is a worker, or a replica, of several.
            BaseException: the exception of the first failing replica, in its own type. The object can be used again; if
                the replicas' parameters are no longer equal, a note says so, and how to repair them.
        """
        check_type(loop_fn, "loop_fn", "pass a function", Callable)

        def part(world: World, loaders: Sequence[DeviceIterator]) -> T:
            return loop_fn(self.models[world.rank], loaders[world.rank], world.device, self._contexts[world.rank])

        return self._run_on_ranks(part, partial(self._begin_pass, loader, fixed_batch_size, batch_dim))

    def run_on_replicas(self, fn: Callable[[nn.Module, torch.device, ReplicaContext], T]) -> list[T]:
        """Call `fn(model, device, context)` once per device, all at the same time, in its replica's world.

        Returns and raises as calling the object does, but without a loader.
        """
        check_type(fn, "fn", "pass a function", Callable)

        def part(world: World, _: object) -> T:
            return fn(self.models[world.rank], world.device, self._contexts[world.rank])

        return self._run_on_ranks(part, lambda worlds: nullcontext([]))

    @property
    def is_usable(self) -> bool:
        """Whether a call would run now: none is running, and no replica is still in one that was interrupted twice."""
        return not self._calls and not self._threads.running

    def are_alike(self) -> bool:
        """Whether all replicas have the same parameters, bit by bit. Buffers are not compared."""
        return first_difference(self.models) is None

    def state_dict(self) -> dict[str, Any]:
        """Return the network's state, from the first replica, with the names of the given network."""
        return self.models[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the network's state into every replica; as `nn.Module.load_state_dict`.

        Args:
            state: from `state_dict`, or from the plain network.
            strict: raise an error for names that are missing or unexpected.

        Raises:
            BusyError: a call is running; a loop loads into its own model, on each replica.
        """
        return self._run_alone(lambda: [model.load_state_dict(state, strict) for model in self.models])[0]

    def _copy_to_devices(self, module: nn.Module) -> list[nn.Module]:
        for backend, device in self._resolved:
            backend.start(device)
        return [move_module(copy.deepcopy(module), device) for _, device in self._resolved]

    def _run_alone(self, run: Callable[[], list[T]]) -> list[T]:
        """Run this while no other call of this object runs, nor one of another on a lazy device; else BusyError."""
        mark = object()
        try:
            self._admit_call(mark)
            return run()
        finally:
            self._calls.pop(mark, None)  # one atomic operation, so no interrupt can leave it

    def _admit_call(self, mark: object) -> None:
        """Admit one call at a time."""
        # A dict keeps the order of insertion, and inserts atomically: of concurrent calls one is first, and runs.
        self._calls[mark] = None
        first, *_ = self._calls  # also atomic: other calls begin and end meanwhile
        if first is not mark:
            raise BusyError("this DataParallel is running a loop, and runs one at a time; create another one")
        self._threads.check_idle()
        # After the mark is set. Two threads that record on one lazy device end the process.
        devices = [device for backend, device in self._resolved if backend.is_lazy]
        with _taking:
            for device in devices:
                other = _users.get(device, self)
                if other is not self and not other.is_usable:
                    raise BusyError(f"{device} is used by another DataParallel; wait until that call has returned")
            _users.update(dict.fromkeys(devices, self))

    def _run_on_ranks(
        self,
        part: Callable[[World, Sequence[DeviceIterator]], T],
        passing: Callable[[list[World]], AbstractContextManager[list[DeviceIterator]]],
    ) -> list[T]:
        """Call `part(world, loaders)` for every rank, with the iterators that `passing(worlds)` returns."""

        def run() -> list[T]:
            if (outer := current_world()).world_size > 1:
                raise RuntimeError(
                    f"DataParallel in rank {outer.rank} of {outer.world_size}: its threads would meet only each other, "
                    "not the other ranks; use one or the other"
                )
            meet_anew(self._worlds)
            for world in self._worlds:
                world.state.restart()
            with passing(self._worlds) as loaders:
                return self._play_parts(lambda rank: part(self._worlds[rank], loaders), self._worlds, loaders)

        return self._run_alone(run)

    @cached_property
    def _worlds(self) -> list[World]:
        """The same in each call, so that objects in a context remain valid."""
        if self._is_native:
            return [solo_world(*self._resolved[0], self._timelines[0])]
        return thread_worlds([device for _, device in self._resolved], self._timelines)

    @contextmanager
    def _begin_pass(
        self, loader: Iterable[Any] | ParallelLoader, fixed_batch_size: bool, batch_dim: int, worlds: list[World]
    ) -> Iterator[list[DeviceIterator]]:
        """The iterators of a new pass over the loader, for loops in those worlds."""
        if not isinstance(loader, ParallelLoader):
            loader = ParallelLoader(
                loader, self.devices, batch_dim=batch_dim, fixed_batch_size=fixed_batch_size, sources=self._sources
            )
        elif loader.devices != self.devices:
            raise ValueError(f"the ParallelLoader is over {loader.devices}, this DataParallel over {self.devices}")
        elif fixed_batch_size or batch_dim:
            raise ValueError("fixed_batch_size and batch_dim are arguments of the ParallelLoader that was given")
        with loader.again(worlds) as begun:
            yield [begun.per_device_loader(device) for device in self.devices]

    def _play_parts(self, part: Callable[[int], T], worlds: list[World], loaders: Sequence[DeviceIterator]) -> list[T]:
        """Call `part(rank)` for every rank: in this thread for a native run, otherwise in the replica threads."""
        if self._is_native:
            with use_world(worlds[0]):
                return [part(0)]
        failed: list[int] = []
        families = {world.device.type for world in worlds}
        bodies = [
            # One state for each replica: a copy of the context variables can be entered by one thread at a time.
            _replica_body(part, world, modes_of_this_thread(families), generators, self._num_threads, loaders, failed)
            for world, generators in zip(worlds, self._randomness, strict=True)
        ]

        def interrupt(error: BaseException) -> None:
            # The worlds share one meeting, so this wakes all that wait in a collective; `close` wakes those that wait
            # for data.
            worlds[0].comm.abort(error)
            for each in loaders:
                each.close()

        try:
            with kept_num_threads():
                outcomes = self._threads.run(bodies, interrupt)
            if failed:
                # In their order: an outcome is made after its failure has woken others.
                cause = next((rank for rank in failed if not outcomes[rank].is_secondary), failed[0])
                outcomes[cause].unwrap()
            return [outcome.unwrap() for outcome in outcomes]
        except BaseException as error:
            if self._threads.running:  # interrupted twice, perhaps before the replicas were notified of the first
                interrupt(error)
            else:
                # the broken communicator keeps its cause, and with it the batches in the frames of its traceback
                meet_anew(worlds)
            for world in worlds:
                # The replicas may differ by now: optimizers that step by hand compare them again.
                world.state.part(ByHand).agreed.clear()
            add_note_once(error, self._what_is_left())
            raise

    def _what_is_left(self) -> str:
        """Describe what is wrong with the object after a failed call; empty if its replicas are idle and equal."""
        if running := self._threads.running:
            return f"replicas {running} still run the loop; is_usable says when they have returned"
        try:
            name = first_difference(self.models)
        except Exception as reason:  # a device on which everything fails from now on, a lazy layer without weights
            return f"it is unknown whether the replicas are still alike ({type(reason).__name__}: {reason})"
        if name is None:
            return ""
        return (
            f"the replicas' parameters are no longer alike ({name!r} is the first that differs); "
            "replicas.load_state_dict(replicas.state_dict()) gives every replica the parameters of the first"
        )


def _replica_body(
    part: Callable[[int], T],
    world: World,
    call_as_caller: Callable[[Callable[[], T]], T],
    generators: ReplicaGenerators,
    num_threads: int,
    loaders: Sequence[DeviceIterator],
    failed: list[int],
) -> Callable[[], T]:
    """The body of a replica thread: runs its part in its world, which it leaves, or breaks if it fails."""

    def play() -> T:
        with use_world(world):
            world.backend.activate(world.device)
            # In each replica, since OpenMP keeps its number for each thread.
            torch.set_num_threads(num_threads)
            with generators.in_use():
                return part(world.rank)

    def body() -> T:
        try:
            result = call_as_caller(play)
            if result is None:  # otherwise the caller may count
                world.state.deliveries.evaluations.settle()
            # Replicas that still wait for this one, in a collective that it never reaches, fail instead of hanging.
            world.comm.leave()
            return result
        except BaseException as error:
            failed.append(world.rank)  # before replicas are woken with an error, which come after it
            add_note_once(error, str(world))
            world.comm.abort(error)
            for each in loaders:  # the others may never reach a collective
                each.close()
            raise
        finally:
            if loaders:
                loaders[world.rank].close()  # batches still queued for this replica are dropped; the others continue

    return body


def _only_device(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"device_ids=[] runs the module where it is, but its parameters are on {names}; move it first"
        )
    return next(iter(devices), torch.get_default_device())
