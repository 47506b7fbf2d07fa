"""World: one rank's place among its peers, with its device and its way to meet them.

Only public functions read the ambient world: they accept `world=None` and call `current_world()` once; everything below
gets the world as an argument, because a `ContextVar` is unset in a new thread.

The current world is the calling thread's (`use_world`; in autograd's threads, that of the thread that has called
`backward`), otherwise the process's (set in a spawned worker, or made from an initialised torch.distributed), otherwise
the world of one.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.batches.deliveries import Deliveries
from unisono.comm.outcome import this_process
from unisono.comm.processes import ProcessCommunicator
from unisono.comm.selection import innermost, process_communicator, thread_communicators
from unisono.comm.threads import ThreadCommunicator
from unisono.devices import backend_of_group, get_backend, pick_backend
from unisono.errors import NoWorldError
from unisono.protocols import Backend, Communicator
from unisono.report.timeline import Timeline
from unisono.torch_private import current_graph_task_id, from_tls, is_in_tls

T = TypeVar("T")


class RankState:
    """What a rank keeps from step to step.

    Attributes:
        deliveries: the batches it has received.
        seeds_batches: whether its generators are seeded with each batch, so that nothing depends on their states.
        command: what `unisono run` has started, as `describe_command` returns it.
        held_memory: the path of the memory that its launcher holds, for snapshots; "" if there is none.
        groups_before: how many groups of the same run were started before this rank's, for any reason.
        done_before: the optimizer steps that the ranks had done when they were started again.
        snapshot_every: the default of `Accelerator(snapshot_every=)`.
        brings_batches: whether each rank loads its own, without a loader of this package, and knows it.
    """

    def __init__(self) -> None:
        self.deliveries = Deliveries()
        self.seeds_batches = self.brings_batches = False
        self.command: dict[str, Any] | None = None
        self.held_memory, self.groups_before, self.done_before = "", 0, 0
        self.snapshot_every: int | None = None
        self._parts: dict[Any, Any] = {}

    def part(self, kind: type[T]) -> T:
        """Return the rank's only object of that class; create it at the first call."""
        if kind not in self._parts:
            # Threads may create it concurrently; the first object is kept.
            self._parts.setdefault(kind, kind())
        found: T = self._parts[kind]
        return found

    def restart(self) -> None:
        """Start over: the rank's loop begins again, and what an earlier loop has left belongs to no step."""
        for each in list(self._parts.values()):
            if hasattr(each, "restart"):
                each.restart()


@dataclass(frozen=True, eq=False)
class World:
    """One rank's view of a run: facts, the objects that serve it, and its state. Compared by identity.

    Attributes:
        rank, world_size: this rank and the number of ranks (processes or threads).
        local_rank, local_world_size: the same on this machine.
        node_rank: the number of the machine.
        device, backend: the rank's device and its family.
        comm: its communicator.
        restart_count: how often the group has been restarted.
        timeline: where this rank's time goes.
        state: what this rank keeps from step to step.
    """

    device: torch.device
    backend: Backend
    comm: Communicator
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    restart_count: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    state: RankState = field(default_factory=RankState)

    def __post_init__(self) -> None:
        clock = self.backend.clock(self.device)
        if clock is not None:
            self.timeline.follow(clock)

    @property
    def is_of_processes(self) -> bool:
        """Whether each rank is a process, joined with the others by torch's process group."""
        return isinstance(innermost(self.comm), ProcessCommunicator)

    @property
    def is_hosted(self) -> bool:
        """Whether a rank's tensors reach the others through main memory, or through the devices' runtime."""
        return innermost(self.comm) is not self.comm

    @property
    def takes_engines(self) -> bool:
        """Whether torch's own engines can reduce among the ranks: several processes, whose tensors a group supports."""
        return self.world_size > 1 and self.is_of_processes and self.backend.unsupported_reason("process_group") is None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, {self.device}, {this_process()}, restart {self.restart_count}"


_thread_world: ContextVar[World | None] = ContextVar("unisono_world", default=None)
_process_world: World | None = None
_adopted: tuple[weakref.ref[object], World] | None = None  # weak: a group that is destroyed releases its sockets
_solo: World | None = None
_used: dict[int, None] = {}  # a key for each block of `use_world` that a thread is in

_CONTEXT = "context"  # torch's key, in torch.autograd.graph

_SLURM_SPECIAL_STEPS = 0xFFFFFFF0  # from here on: the batch script, the interactive shell, ...


def current_world() -> World:
    """Return the world of the calling thread; see the module's docstring for the order.

    Raises:
        NoWorldError: the environment says that this process has peers (WORLD_SIZE > 1, a SLURM step of several tasks),
            and none has been initialised. Continuing would train that many unrelated models side by side. Or this is
            autograd's own thread, and which replica it works for is unknown: before 2.13, torch does not pass it on.
    """
    global _adopted, _solo
    world = given_world()
    if world is not None:
        return world
    if dist.is_initialized():
        group = dist.group.WORLD
        # A group that replaces a destroyed one is adopted, too.
        if _adopted is None or _adopted[0]() is not group:
            _adopted = (weakref.ref(group), _adopted_world())
        return _adopted[1]
    announced = announcement(os.environ)
    if announced is not None:
        raise NoWorldError(
            f"{announced}, but no process group is initialised in this process; either create the Accelerator first, "
            "or call unisono.join_world() (or torch.distributed.init_process_group()) first, or give the training "
            "function to unisono.spawn(fn): each joins that world; for a world of one, unset the variable"
        )
    if _used and current_graph_task_id() >= 0:
        raise NoWorldError(
            "in autograd's own thread it is unknown which replica's backward pass this is: before 2.13, torch does "
            "not pass it on; pass world= what current_world() was in the forward pass, or use a newer torch"
        )
    if _solo is None:
        _solo = solo_world()
    return _solo


# The variables of a rank, a size, a local rank, a local size and perhaps a job. Those of Open MPI, of submitit's local
# tasks and of MVAPICH are theirs alone; those of MPICH and Intel MPI are set by srun, too.
MPI_OWN = (
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE PMIX_NAMESPACE",
    "SUBMITIT_LOCAL_GLOBALID SUBMITIT_LOCAL_NTASKS SUBMITIT_LOCAL_LOCALID SUBMITIT_LOCAL_NTASKS SUBMITIT_LOCAL_JOB_ID",
    "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE",
)
MPI_SHARED = ("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",)
# The rank alone, where a launcher says no more, or only the size.
_RANKS = dict.fromkeys(("RANK", "LOCAL_RANK", "PMIX_RANK", "PALS_RANKID"), "") | {
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",
}


def warning_signals() -> list[signal.Signals]:
    """In a task of submitit, the signal that warns of the job's end; its handler puts the job back into the queue."""
    name = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")  # submitit's default
    return [signal.Signals[f"SIG{name}"]] if "SUBMITIT_EXECUTOR" in os.environ else []


def announcement(environ: Mapping[str, str]) -> str | None:
    """Describe the variable that a launcher uses to announce that this process has peers; None if there is none."""
    size = environ.get("WORLD_SIZE", "1")
    if _is_several(size):
        return f"WORLD_SIZE={size} is set, as torchrun does"
    if is_slurm_step(environ) and _is_several(tasks := environ.get("SLURM_STEP_NUM_TASKS", "1")):
        return f"SLURM_STEP_NUM_TASKS={tasks} is set: srun has started several of these processes"
    for _, size, *_ in (names.split() for names in (*MPI_OWN, *MPI_SHARED)):
        if _is_several(count := environ.get(size, "1")):
            return f"{size}={count} is set: a launcher has started several of these processes"
    if "WORLD_SIZE" not in environ and (rank := lone_rank(environ)):
        return rank
    pods = environ.get("PET_NNODES", "1")
    # Elastic launchers also accept a range, such as "1:4".
    if pods not in ("", "1"):
        return f"PET_NNODES={pods} is set: Kubernetes has started several of these pods"
    return None


def lone_rank(environ: Mapping[str, str]) -> str | None:
    """Describe the variable that gives this process a rank other than 0, or rank 0 of several, from launchers that do
    not say where the ranks meet."""
    for rank, size in _RANKS.items():
        name = size if rank in environ and _is_several(environ.get(size, "1")) else rank
        if environ.get(name, "0") != "0":
            return f"{name}={environ[name]} is set: a launcher has started several of these processes"
    return None


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process: the script of a batch job and an interactive shell are not steps."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < _SLURM_SPECIAL_STEPS


def _is_several(count: str) -> bool:
    return count.isdecimal() and int(count) > 1


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Make `world` the calling thread's world for the block."""
    token = _thread_world.set(world)
    _used[id(token)] = None
    try:
        yield world
    finally:
        del _used[id(token)]
        _thread_world.reset(token)


def set_process_world(world: World | None) -> None:
    """Set the world of all threads of this process that have none of their own; a worker's first action."""
    global _process_world
    _process_world = world


def given_world() -> World | None:
    """Return the world that was set for this thread, or else for this process, or that was made from the current
    process group; None if there is none yet."""
    return _thread_world.get() or _calling_world() or _process_world or _adopted_already()


def _adopted_already() -> World | None:
    group = None if _adopted is None else _adopted[0]()
    return _adopted[1] if _adopted is not None and group is not None and group is dist.group.WORLD else None


def _calling_world() -> World | None:
    """In autograd's own thread, which accelerators have: the world of the thread that called `backward`, whose context
    torch passes on. What a checkpoint recomputes there meets the same peers."""
    return from_tls(_CONTEXT).get(_thread_world) if is_in_tls(_CONTEXT) else None


def solo_world(
    backend: Backend | None = None,
    device: torch.device | None = None,
    timeline: Timeline | None = None,
    state: RankState | None = None,
) -> World:
    """Create a world of one, by default on the first device of the default family."""
    backend = backend or pick_backend()
    device = device or backend.device(0)
    (comm,) = ThreadCommunicator.group(1)
    return World(device=device, backend=backend, comm=comm, timeline=timeline or Timeline(), state=state or RankState())


def thread_worlds(
    devices: list[torch.device], timelines: list[Timeline] | None = None, timeout: timedelta = timedelta(minutes=30)
) -> list[World]:
    """Create one world per device, for threads of this process that meet one another."""
    size = len(devices)
    backends = [get_backend(device.type) for device in devices]
    return [
        World(
            device=device,
            backend=backend,
            comm=comm,
            rank=rank,
            world_size=size,
            local_rank=rank,
            local_world_size=size,
            timeline=timelines[rank] if timelines else Timeline(),
        )
        for rank, (device, backend, comm) in enumerate(
            zip(devices, backends, thread_communicators(devices, backends, timeout), strict=True),
        )
    ]


def meet_anew(worlds: list[World]) -> None:
    """Reset the meeting of these worlds, whose threads have all ended, as if it were new."""
    found = [innermost(world.comm) for world in worlds]
    if members := [member for member in found if isinstance(member, ThreadCommunicator)]:
        ThreadCommunicator.meet_anew(members)


def _adopted_world() -> World:
    """Create the world of a process whose default process group was initialised elsewhere, as in a torchrun script."""
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    backend = backend_of_group(dist.get_backend_config())
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    device = dist.group.WORLD.bound_device_id  # type: ignore[union-attr] # init_process_group(device_id=...)
    if device is not None and device.type == backend.name:
        backend.activate(device)
    else:
        device = backend.enter_worker(local_rank, local_world_size)
    return World(
        device=device,
        backend=backend,
        comm=process_communicator(backend, device, owns_group=False),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0))),
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def answer_as_one_rank() -> None:
    """Make this process, a loader worker, appear to be the only rank from now on.

    Datasets see the loader workers of all ranks as one sequence: one that shards itself by both would do it twice.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    # A forked worker inherits the process group, whose functions do not read the variables.
    for module in (dist, dist.distributed_c10d):
        module.get_rank, module.get_world_size = lambda group=None: 0, lambda group=None: 1  # type: ignore[attr-defined]
