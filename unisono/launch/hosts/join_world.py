"""Joining the world that another launcher has announced: torchrun, SLURM, Kubernetes.

`join_world` does what a worker of `spawn` finds done: it takes the process's place in the world (`process_group.py`),
and leaves it at the process's end. `run_announced` is `spawn` in such a process.

*Threads:* the main one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from unisono import preemption
from unisono.backends import NAMES, pick_backend
from unisono.backends.cores import fair_num_threads
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.selection import seat_of
from unisono.comm.shutdown import free_reducers_before_groups
from unisono.errors import StoppedError
from unisono.launch.hosts.environment import announced_place, take, within
from unisono.launch.hosts.joint_return import return_together
from unisono.launch.process_group import depart, join
from unisono.launch.script_group import install
from unisono.launch.worker import exit_error
from unisono.outcome import Outcome, add_note_once
from unisono.protocols import Backend
from unisono.world import World, current_world, given_world, set_process_world

_LAST_RESORT = timedelta(minutes=30)


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
    if given_world() is None and not dist.is_initialized():
        place = announced_place()
        if place is not None:
            if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it
                torch.set_num_threads(fair_num_threads(place.local_world_size))
            world = join(place, pick_backend(backend), timeout, checked, process_group)
            set_process_world(world)
            take(place)
            free_reducers_before_groups()
            atexit.register(_depart_at_exit, world)
            return world
    return given_world() or current_world()


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


@functools.cache
def let_scripts_name_families() -> None:
    """From now on `init_process_group` of this process takes a family of devices as its backend: it joins our world.

    A process that nobody has announced anything to gets a group of its own.
    """
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if signature.bind(*args, **kwargs).arguments.get("backend") not in NAMES:
            original(*args, **kwargs)
        elif not dist.is_initialized():
            if join_world().world_size > 1:
                if not dist.is_initialized():
                    original(*args, **kwargs)  # it has destroyed ours
            elif not dist.is_initialized():
                original("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    install(init_process_group)


def _returning_together(world: World, timeout: timedelta) -> AbstractContextManager[None]:
    seat = seat_of(world.comm)
    if isinstance(seat, ProcessCommunicator):
        return return_together(seat, timeout)
    return contextlib.nullcontext()


def _gather(world: World, result: Any) -> list[Any]:
    """Every rank's result, on every rank; one that cannot travel is an error that names it."""
    gathered: list[bytes] = world.comm.all_gather_object(Outcome(value=result).to_bytes())
    return [Outcome.from_bytes(data).unwrap() for data in gathered]


def _depart_at_exit(world: World) -> None:
    error = getattr(sys, "last_value", None)  # what has ended the script, if anything has
    depart(world, error)
