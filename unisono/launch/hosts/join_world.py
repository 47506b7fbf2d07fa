"""Joining the world that another launcher has announced: torchrun, SLURM, Kubernetes, mpirun.

`join_world` gives the process its place in the world, and leaves the world when the process ends. `run_announced` is
`spawn` in such a process. *Threads:* the main one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from unisono.comm import preemption
from unisono.comm.outcome import Outcome, add_note_once
from unisono.comm.shutdown import free_reducers_before_groups
from unisono.devices import family_names, pick_backend
from unisono.devices.cores import fair_num_threads
from unisono.errors import StoppedError
from unisono.launch.hosts.environment import announced_place, take, within
from unisono.launch.process_group import depart, join
from unisono.launch.reports import count_of
from unisono.launch.script_group import initialising, replace_functions
from unisono.launch.worker import exit_error
from unisono.protocols import Backend
from unisono.world import World, current_world, given_world, set_process_world

logger = logging.getLogger(__name__)


def join_world(
    timeout: float | timedelta = 1800.0,
    backend: str | None = None,
    *,
    process_group: Literal["gloo"] | None = None,
) -> World:
    """Join the world that this process's launcher (torchrun, SLURM, Kubernetes, mpirun) has announced.

    Creates the process group, binds the device and sets the rank's world, as in a worker of `spawn`; the process leaves
    the group when it exits. Calling it again returns the same world; so does calling it in a worker of `spawn`, or
    after the process group was initialised elsewhere. Without a launcher, the result is a world of one rank: the same
    script also runs by itself.

    Args:
        timeout: how long to wait for the peers, now and in each collective, a last resort: seconds, or a timedelta.
        backend: the device family, "cpu", "cuda", ...; None picks one, accelerators first.
        process_group: how torch.distributed reduces: None uses memory shared between the ranks of one machine, and NCCL
            on CUDA; "gloo" sends over the network.

    Returns:
        The world of this rank.

    Raises:
        ValueError: a variable of the launcher is missing or malformed, or the family has no device on this machine.
        NoWorldError: the launcher started one process per machine, which is meant to start the ranks there.
        RuntimeError: the peers could not be reached; torch's own message, with a note on what was tried.
    """
    if given_world() is None and not dist.is_initialized():
        place = announced_place()
        if place is not None:
            if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it
                torch.set_num_threads(fair_num_threads(place.local_world_size))
            limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
            world = join(place, pick_backend(backend), limit, process_group)
            set_process_world(world)
            take(place)
            free_reducers_before_groups()
            atexit.register(_depart, world)
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
    """Run `fn` as one of the workers that `spawn(fn, args)` would start, in a process that a launcher has already
    started; return what it returned on all ranks. Raises what `fn` raised here, with a note on the rank, or a
    BrokenWorldError if a peer failed; and the errors of `spawn`."""
    place = announced_place()
    assert place is not None, "nobody has announced a place"
    if nprocs is not None and nprocs != place.local_world_size:
        raise ValueError(
            f"nprocs={nprocs}, but by {place.launcher} there are {place.local_world_size} worker(s) on this machine, "
            "and this process is one of them; leave nprocs out, or set the number where the script is started"
        )
    world = join_world(timeout, family.name, process_group=process_group)
    try:
        with within():
            result = preemption.call(fn, world.rank, *args)
        if result is None:  # otherwise the caller may count
            world.state.deliveries.evaluations.settle()
        world.comm.announce("the end of fn")
        # A result that cannot be sent is an error that names it, on every rank.
        gathered: list[bytes] = world.comm.all_gather_object(Outcome(value=result).to_bytes())
        results = [Outcome.from_bytes(data).unwrap() for data in gathered]
    except BaseException as error:
        failure = exit_error(error, world.rank) if isinstance(error, SystemExit) else error
        add_note_once(failure, str(world))
        with contextlib.suppress(RuntimeError):
            world.comm.abort(failure)
        if failure is error:
            raise
        raise failure from error
    if preemption.is_agreed():
        stopped = StoppedError(results, count_of(world, "steps"))
        if world.rank == 0 and place.launcher != "unisono run":  # its supervisor reports it
            logger.warning("%s", stopped)
        raise stopped
    return results


@functools.cache
def let_scripts_name_families() -> None:
    """Make this process's `init_process_group` accept a device family as its backend: it then joins our world, which
    has one rank without a launcher."""
    replace_functions(init_process_group=initialising(_initialise_family))


def _initialise_family(original: Callable[..., None], asked: dict[str, Any]) -> None:
    if asked.get("backend") not in family_names():
        original(**asked)
    elif not dist.is_initialized():
        is_one_of_several = join_world().world_size > 1
        if not dist.is_initialized() and is_one_of_several:
            original(**asked)  # the script has destroyed our group
        elif not dist.is_initialized():
            original("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _depart(world: World) -> None:
    error = getattr(sys, "last_value", None)  # the exception that ended the script, if there was one
    if error is None:
        world.state.deliveries.evaluations.settle()
    depart(world, error)
