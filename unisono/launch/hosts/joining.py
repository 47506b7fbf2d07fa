"""Joining the world that another launcher has announced: torchrun, our own agent, SLURM, Kubernetes.

`join_world` does what a worker of `spawn` finds done: it binds the device, makes the process group, and sets the
process's world. `run_announced` is `spawn` in such a process. `depart` is the end: the world is left, or broken with
the reason.

The ranks meet in a store, a small server. Where the launcher serves none, rank zero does, in its own process; so rank
zero is the last to go, or the reason of a failure would go with it before its peers have read it.

*Threads:* the main one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from unisono import preemption
from unisono.backends import pick_backend
from unisono.backends.cores import fair_num_threads
from unisono.comm.fitting import group_backend, process_communicator, seat_of
from unisono.comm.processes import ProcessCommunicator
from unisono.errors import StoppedError
from unisono.launch.greetings import without_greetings
from unisono.launch.hosts.addresses import address_towards, interface_of
from unisono.launch.hosts.environment import Place, announced_place, take, within
from unisono.launch.hosts.returning import returning_together
from unisono.launch.hosts.store_server import quieten_store, serve_store
from unisono.launch.worker import exit_error
from unisono.outcome import Outcome, add_note_once
from unisono.protocols import Backend
from unisono.world import World, current_world, process_world, set_process_world

_LAST_RESORT = timedelta(minutes=30)
_LINGER_S = 0.5  # how long the store outlives a failure at most, for peers that still read why
_CLOSE_S = 10.0  # and how long it waits for the last rank to leave

_store: dist.distributed_c10d.Store | None = None  # of the joined world


def join_world(
    timeout: timedelta = _LAST_RESORT,
    backend: str | None = None,
    *,
    checked: bool = False,
    process_group: Literal["gloo"] | None = None,
) -> World:
    """Take this process's place in the world that its launcher has announced: torchrun, SLURM, Kubernetes.

    The process group is made, the device bound, and the rank's world set, as in a worker of `spawn`; at the end of the
    process it is left. Called again, it returns the same world; so it does in a worker of `spawn`, and where the
    process group has been initialised by somebody else. A process that nobody has announced anything to gets the world
    of one: the same script runs by itself.

    Args:
        timeout: how long to wait for the peers, now and in each collective; a last resort.
        backend: the device family, "cpu", "cuda", ...; None picks one, accelerators first.
        checked: compare every collective on all ranks before it runs, at the price of a small one more. A mismatch
            names the ranks and their calls. Workers of `spawn`, on one machine, always do, and for less.
        process_group: how torch.distributed reduces: None takes memory that the ranks of one machine share, and NCCL on
            CUDA; "gloo" sends over the network.

    Raises:
        ValueError: a variable of the launcher is missing or malformed, or the family has no device here.
        NoWorldError: the launcher has started one process per machine, which is to start the ranks there.
        RuntimeError: the peers could not be reached; torch's own words, with what was tried in a note.
    """
    if process_world() is None and not dist.is_initialized():
        place = announced_place()
        if place is not None:
            world = _join(place, pick_backend(backend), timeout, checked, process_group)
            set_process_world(world)
            take(place)
            atexit.register(_depart_at_exit, world)
            return world
    return process_world() or current_world()


def run_announced(
    fn: Callable[..., Any],
    args: Sequence[Any],
    nprocs: int | None,
    family: Backend,
    timeout: timedelta,
    process_group: Literal["gloo"] | None = None,
) -> list[Any]:
    """Be one of the workers that `spawn(fn, args)` would start, where a launcher has started them already.

    Returns:
        The values that `fn` returned, by rank, on every rank.

    Raises:
        ValueError: `nprocs` is not the number of ranks on this machine.
        StoppedError: the ranks came to an agreed early end; it has their results.
        CollectiveMismatchError: a rank has returned, while another waits for it in a collective.
        BrokenWorldError: a peer failed.
        BaseException: what `fn` raised here, with a note that says where; the peers get a BrokenWorldError.
    """
    place = announced_place()
    assert place is not None, "nobody has announced a place"
    if nprocs is not None and nprocs != place.local_world_size:
        raise ValueError(
            f"nprocs={nprocs}, but by {place.launcher} there are {place.local_world_size} worker(s) on this machine, "
            "and this process is one of them; leave nprocs out, or set the number where the script is started"
        )
    world = join_world(timeout, family.name, process_group=process_group)
    try:
        with within(), _returning_together(world, timeout):
            result = fn(world.rank, *args)
        results = _gather(world, result)
    except BaseException as error:
        failure = exit_error(error, world.rank) if isinstance(error, SystemExit) else error
        add_note_once(failure, str(world))
        with contextlib.suppress(RuntimeError):
            world.comm.abort(failure)
        if failure is error:
            raise
        raise failure from error
    if preemption.is_agreed():
        raise StoppedError(results)
    return results


def _returning_together(world: World, timeout: timedelta) -> AbstractContextManager[None]:
    seat = seat_of(world.comm)
    if isinstance(seat, ProcessCommunicator):
        return returning_together(seat, timeout)
    return contextlib.nullcontext()


def _gather(world: World, result: Any) -> list[Any]:
    """Every rank's result, on every rank; one that cannot travel is an error that names it."""
    gathered: list[bytes] = world.comm.all_gather_object(Outcome(value=result).to_bytes())
    return [Outcome.from_bytes(data).unwrap() for data in gathered]


def depart(world: World, error: BaseException | None = None) -> None:
    """Leave the joined world, or break it because of `error`; never raises. Idempotent."""
    global _store
    store, _store = _store, None
    with contextlib.suppress(RuntimeError):  # the store may be gone with its host
        if error is not None:
            world.comm.abort(error)
        else:
            world.comm.leave()
    with contextlib.suppress(RuntimeError):
        if store is not None and world.world_size > 1:
            _go_last(store, world, _CLOSE_S if error is None else _LINGER_S)


def _go_last(store: dist.distributed_c10d.Store, world: World, patience_s: float) -> None:
    """Rank zero waits until every rank has said good-bye; the others only say it."""
    gone = store.add("unisono/gone", 1)
    deadline = time.monotonic() + patience_s
    while world.rank == 0 and gone < world.world_size and time.monotonic() < deadline:
        time.sleep(0.005)  # Store.wait would print warnings when the time is over, as it is after a peer was killed
        gone = store.add("unisono/gone", 0)


def _depart_at_exit(world: World) -> None:
    error = getattr(sys, "last_value", None)  # what has ended the script, if anything has
    depart(world, error)


def _join(
    place: Place, backend: Backend, timeout: timedelta, is_checked: bool, process_group: Literal["gloo"] | None
) -> World:
    global _store
    device = backend.enter_worker(place.local_rank, place.local_world_size)
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it
        torch.set_num_threads(fair_num_threads(place.local_world_size))
    try:
        _name_interface(place)
        quieten_store()
        _store = _store_of(place, timeout)
        with without_greetings():
            dist.init_process_group(
                group_backend(backend, process_group),
                store=_store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
            )
        comm = process_communicator(backend, device, _store, is_checked)
        comm.barrier()  # or a rank that is done soon would leave while a slow one still connects to it
    except (RuntimeError, OSError) as error:
        error.add_note(
            f"rank {place.rank} of {place.world_size}, announced by {place.launcher}, could not meet its peers at "
            f"{place.address}:{place.port}; all of them must be running and reach that address"
        )
        raise
    return World(
        device=device,
        backend=backend,
        comm=comm,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        restart_count=place.restart_count,
    )


def _name_interface(place: Place) -> None:
    """Tell gloo which interface leads to the peers; by itself it takes the one that the host's name resolves to."""
    address = address_towards(place.address, place.port)
    interface = interface_of(address) if address is not None else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _store_of(place: Place, timeout: timedelta) -> dist.distributed_c10d.Store:
    is_on_one_machine = place.local_world_size == place.world_size
    if place.rank == 0 and not place.is_store_there:
        server = serve_store(place.address, place.port, timeout, is_on_one_machine)
    else:
        server = dist.TCPStore(  # type: ignore[attr-defined] # torch re-exports it silently
            place.address, place.port, None, False, timeout, wait_for_workers=False
        )
    # torchrun's store outlives a restart with the addresses of the dead in it. On one machine the restarts are counted
    # alike; on several each agent counts its own, and there it is the agent's to serve a fresh store (ours does).
    prefix = f"unisono/{place.restart_count}" if is_on_one_machine else "unisono"
    return dist.PrefixStore(prefix, server)  # type: ignore[attr-defined]
