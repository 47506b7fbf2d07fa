"""How a worker joins and leaves its world: the same on one machine, on several, and under other launchers.

The ranks meet in a store: a file in the private directory of a group if all are on one machine, otherwise a small
server at the address that their place names. Agents serve it throughout their lifetime. If a launcher serves none, rank
zero does; so it exits last, since otherwise the reason of a failure would be lost before its peers have read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from unisono.comm.operations import name_ranks
from unisono.comm.sealing import agree, check_peers, has_secret, seal_objects, sealed_store, use_secret
from unisono.comm.selection import bound_device, group_backend, innermost, process_communicator
from unisono.errors import UnisonoError
from unisono.launch.hosts.endpoint import address_towards, interface_of, quieten_store, serve_store
from unisono.launch.hosts.environment import RankPlace
from unisono.launch.starting.marks import SECRET
from unisono.protocols import Backend, Communicator
from unisono.world import World

_LINGER_S = 5.0  # how long rank zero's store outlives a failure at most, for peers that have not read the reason yet
_CLOSE_S = 10.0  # how long it waits for the last rank to leave
_REACH_S = 10.0  # for a connection to another machine
_SILENT_S = 10.0  # how long a rank waits for others without a word
_NEXT = 128  # machines: this many connections fit into a socket that nobody accepts them from
_ADDRESS = "unisono/reach/{}"
_HERE = "unisono/here/{}"
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

logger = logging.getLogger(__name__)

_kept: dist.distributed_c10d.Store | None = None  # the store that ends with rank zero, as seen from this rank
_signed: Any = None  # the store, as long as this process lives


def join(
    place: RankPlace,
    backend: Backend,
    timeout: timedelta,
    process_group: Literal["gloo"] | None = None,
) -> World:
    """Join the ranks: bind the device, create the process group, meet the peers. RuntimeError, OSError: they could not
    be reached; torch's own message, with a note on what was tried."""
    device = backend.enter_worker(place.local_rank, place.local_world_size)
    if place.address:  # otherwise their group has its own secret
        use_secret(os.environ.get(SECRET, ""))
        if place.rank == 0 and SECRET not in os.environ:
            logger.warning(
                "the ranks have no secret: anyone who reaches %s:%d, or a port of a rank, can run code in them; set %s "
                "to the same random text for all of them, or to nothing if nobody else can reach their network",
                *(place.address, place.port, SECRET),
            )
    try:
        # Before the process group exists: gloo reads the variable when it creates its device.
        _name_interface(place)
        store = _store_of(place, timeout)
        with _reached(place, store), suppress_greetings():
            dist.init_process_group(
                group_backend(backend, process_group),
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=bound_device(backend, device, process_group),
            )
        comm = process_communicator(backend, device, store, timeout=timeout)
        if has_secret():
            _check_peers(comm)
        comm.barrier()  # otherwise a rank that ends soon would leave while a slow one is still connecting to it
        if not place.address:  # with a server, this would cost another collective
            comm.announce("the beginning of fn")
    except (RuntimeError, OSError) as error:
        if not isinstance(error, UnisonoError):
            error.add_note(_explanation(place))
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


def _check_peers(comm: Communicator) -> None:
    """Check that all ranks know the secret, and name the world after what they have made up."""
    inner: Any = innermost(comm)
    inner.name = hashlib.sha256(check_peers(inner.gather_bytes, comm.rank)).hexdigest()
    seal_objects(inner.name)


def depart(world: World, error: BaseException | None = None) -> None:
    """Leave the joined world, or break it because of `error`; never raises. Idempotent."""
    global _kept
    # Cleared first, so a second call does not sign off twice.
    store, _kept = _kept, None
    with contextlib.suppress(RuntimeError):  # the store may be gone with its host
        if error is not None:
            world.comm.abort(error)
        else:
            world.comm.leave()
    with contextlib.suppress(RuntimeError):
        if store is not None and world.world_size > 1:
            _go_last(store, world, _CLOSE_S if error is None else _LINGER_S)


def _go_last(store: dist.distributed_c10d.Store, world: World, patience_s: float) -> None:
    """Rank zero waits until every rank has signed off; the others only sign off."""
    gone = store.add("unisono/gone", 1)
    deadline = time.monotonic() + patience_s
    while world.rank == 0 and gone < world.world_size and time.monotonic() < deadline:
        time.sleep(0.005)  # Store.wait would print warnings on a timeout, which follows if a peer was killed
        gone = store.add("unisono/gone", 0)  # reads the counter


def _name_interface(place: RankPlace) -> None:
    """Select the interface that leads to the peers for gloo, whose default is the one that the host name resolves
    to."""
    interface: str | None = _LOOPBACK  # needs no name service, and offers no address of another network
    if place.address:
        address = address_towards(place.address, place.port)
        interface = interface_of(address) if address is not None else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


@contextlib.contextmanager
def _reached(place: RankPlace, store: dist.distributed_c10d.Store) -> Iterator[None]:
    """Check that ports are open between the machines, as the transport needs: it would wait for minutes, and not say
    for what. Each rank connects to the rank in its place on every other machine, or on the next ones if there are many,
    and can itself be reached in the block."""
    if place.world_size == place.local_world_size or (place.is_store_there and not place.store):
        yield  # what such a store has may be from before a restart
        return
    own = address_towards(place.address, place.port)
    if own is None or os.environ.get("GLOO_SOCKET_IFNAME") != interface_of(own):
        store.set(_ADDRESS.format(place.rank), "")  # nobody may wait for it
        yield
        return
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family, backlog=_NEXT) as here:
        store.set(_ADDRESS.format(place.rank), f"{own} {here.getsockname()[1]}")
        step = place.local_world_size
        others = [(place.rank + each) % place.world_size for each in range(step, place.world_size, step)[:_NEXT]]
        _warn_of_absent(place, others, store, _ADDRESS)
        for other in others:
            host, _, port = store.get(_ADDRESS.format(other)).decode().partition(" ")
            try:
                if port:
                    socket.create_connection((host, int(port)), _REACH_S).close()
            except OSError as error:
                raise UnisonoError(
                    f"rank {place.rank} cannot reach rank {other} at {host}:{port} ({error}): besides the port of "
                    f"{place.address}:{place.port}, all ports from 1024 must be open between the machines"
                ) from None
        yield


def _warn_of_absent(place: RankPlace, others: Sequence[int], store: dist.distributed_c10d.Store, key: str) -> None:
    """Wait for a while for these ranks to write their keys; then name those that have not."""
    try:
        store.wait([key.format(other) for other in others], timedelta(seconds=_SILENT_S))
    except dist.DistStoreError:
        if absent := [other for other in others if not store.check([key.format(other)])]:
            logger.warning(
                "rank %d waits at %s:%d for %s, after %g s still: does it run, and reach that address? What its "
                "machine has printed says more",
                *(place.rank, place.address, place.port, name_ranks(absent), _SILENT_S),
            )


def _store_of(place: RankPlace, timeout: timedelta) -> dist.distributed_c10d.Store:
    global _kept, _signed
    if not place.address:
        return dist.FileStore(place.store, place.world_size)  # type: ignore[attr-defined] # torch re-exports it silently
    quieten_store()
    is_on_one_machine = place.local_world_size == place.world_size
    if place.rank == 0 and not place.is_store_there:
        server = serve_store(place.address, place.port, timeout, is_on_one_machine)
    else:
        server = dist.TCPStore(  # type: ignore[attr-defined]
            place.address, place.port, None, False, timeout, wait_for_workers=False
        )
    # torchrun's store outlives a restart, and still contains the addresses of dead ranks. On one machine all ranks
    # count restarts alike; on several each agent has its own count, so our agents give each start of the ranks a name.
    prefix = place.store or (f"unisono/{place.restart_count}" if is_on_one_machine else "unisono")
    # Signed with the prefix in the keys: the addresses of an earlier start are not trusted in a later one.
    _signed = sealed_store(server)
    store: dist.distributed_c10d.Store = dist.PrefixStore(prefix, _signed)  # type: ignore[attr-defined]
    if has_secret() and not place.store and (is_on_one_machine or not place.is_store_there):
        store.set(_HERE.format(place.rank), "")
        _warn_of_absent(place, range(place.world_size), store, _HERE)
        store = dist.PrefixStore(agree(store, place.rank, place.world_size)[1], store)  # type: ignore[attr-defined]
    if not place.store:
        _kept = store
    return store


def _explanation(place: RankPlace) -> str:
    if not place.address:
        return f"rank {place.rank} could not join the process group of its peers"
    return (
        f"rank {place.rank} of {place.world_size}, announced by {place.launcher}, could not meet its peers at "
        f"{place.address}:{place.port}; all of them must be running and reach that address"
    )


@contextlib.contextmanager
def suppress_greetings() -> Iterator[None]:
    """Keep out of standard output what gloo, before torch 2.13, writes there from C++ when ranks have connected, and
    what other threads print at that moment."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        yield
        return
    with contextlib.ExitStack() as stack, open(os.devnull, "wb") as nowhere:
        with contextlib.suppress(OSError):  # standard output may be closed
            stdout = os.dup(1)
            stack.callback(os.close, stdout)
            stack.callback(os.dup2, stdout, 1)
            os.dup2(nowhere.fileno(), 1)
        yield
