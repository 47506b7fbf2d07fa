"""Which launcher started this process, and as which rank: read from the environment variables that launchers set.

*One process per rank* is started by torchrun or another launcher that sets the same variables, by mpirun, by a SLURM
step, or by a Kubernetes pod (PyTorchJob, Kubeflow Trainer): a `RankPlace`. *One agent per machine*, which starts the
ranks itself, is started by all of these but mpirun: an `AgentPlace`, which `unisono run` reads. Workers of `spawn` get
their world as an argument, so no place is announced to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from zlib import crc32

from unisono.errors import NoWorldError
from unisono.launch.starting.marks import OUTER_DIRECTORY
from unisono.world import MPI_OWN, MPI_SHARED, is_slurm_step, lone_rank

TAKEN = "UNISONO_TAKEN"
"""The variable that records which process has taken which place."""

_OF_TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
_TORCH_PORT = 29500  # torch's own default for MASTER_PORT


@dataclass(frozen=True)
class RankPlace:
    """The place that a launcher has given to this process."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str  # where the ranks meet; without one, they meet in a file of their machine
    port: int
    restart_count: int = 0
    is_store_there: bool = False  # whether another process serves a store at that address; otherwise rank zero has to
    store: str = ""  # that file; or the prefix of their keys in the store, if the launcher has given them one


@dataclass(frozen=True)
class AgentPlace:
    """What a launcher gives the one agent that it starts on each machine; None for what it does not specify."""

    launcher: str
    num_nodes: str
    node_rank: int | None
    endpoint: str
    run_id: str | None
    nproc: int | str | None = None
    max_restarts: int | None = None


_hosted: RankPlace | None = None
_is_within = False  # inside a function that `spawn` has called in this process, as the announced rank


def announce(place: RankPlace | None) -> None:
    """Declare that this process runs a whole script as one rank, regardless of its environment; None revokes that."""
    global _hosted
    _hosted = place


def announced_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """The rank that a launcher has assigned to this process; None for an ordinary process.

    A single task of SLURM and a single pod are ordinary; so are processes that a rank has started itself. ValueError: a
    variable is missing or invalid; NoWorldError: this is the only process of its machine, and is meant to start several
    ranks there; or a launcher gives it a rank, but says nothing of the others.
    """
    if environ is None:
        if _is_within:
            return None
        if _hosted is not None:
            return _hosted
        environ = os.environ
    if OUTER_DIRECTORY in environ:
        return None
    place = (
        (_torchrun_place(environ) if environ.keys() >= _OF_TORCHRUN else None)
        or _mpi_place(environ, MPI_OWN)
        or _torchrun_place(environ)  # those of a pod
        or _slurm_place(environ)
        or _mpi_place(environ, MPI_SHARED)
    )
    taken = environ.get(TAKEN, "")
    if place is None and not taken and "WORLD_SIZE" not in environ and (rank := lone_rank(environ)):
        raise NoWorldError(
            f"{rank}, but not where they meet; set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT for each, or start one process, and pass spawn(nprocs=) the number of ranks"
        )
    pid, _, mark = taken.partition(" ")
    if place is None or (mark == _mark(place) and pid != str(os.getpid())):
        return None
    return _check_place(place)


@contextmanager
def within() -> Iterator[None]:
    """Run the block as the announced rank: a `spawn` in it starts its own workers, as in any worker."""
    global _is_within
    _is_within = True
    try:
        yield
    finally:
        _is_within = False


def take(place: RankPlace) -> None:
    """Record that this process holds the place: its child processes inherit the variables, but are not that rank."""
    os.environ[TAKEN] = f"{os.getpid()} {_mark(place)}"


def _mark(place: RankPlace) -> str:
    return f"{place.rank} {place.address}:{place.port} {place.restart_count}"


def announced_agent(environ: Mapping[str, str] | None = None) -> AgentPlace | None:
    """The other machines that the environment announces to an agent; None if it names none; ValueError if a variable is
    invalid, or a SLURM step has several tasks on a machine."""
    environ = os.environ if environ is None else environ
    return _pod_agent(environ) or _slurm_agent(environ)


# torchrun, and launchers that set the same variables for each rank; PyTorchJob sets some of them for each pod, as
# Kubeflow Trainer does with torchrun's options.


def _torchrun_place(environ: Mapping[str, str]) -> RankPlace | None:
    pods, ranks_of_pod = environ.get("PET_NNODES", "1"), environ.get("PET_NPROC_PER_NODE", "1")
    is_elastic, is_of_rank = "TORCHELASTIC_RUN_ID" in environ, environ.keys() >= _OF_TORCHRUN
    is_for_agent = not is_of_rank and ranks_of_pod.isdecimal() and int(ranks_of_pod) > 1
    prefix, rank, size = "", "RANK", "WORLD_SIZE"
    if not {rank, size} <= environ.keys() or not (is_of_rank or "MASTER_ADDR" in environ):
        if pods in ("", "1"):
            return None
        prefix, rank, size = "PET_", "PET_NODE_RANK", "PET_NNODES"
        is_for_agent |= not {rank, "PET_MASTER_ADDR"} <= environ.keys() or not pods.isdecimal()
    if (is_for_agent and environ.get(size) != "1") or environ.get(size) == "0":
        raise NoWorldError(
            f"PET_NNODES={pods} and PET_NPROC_PER_NODE={ranks_of_pod} ask for an agent in this pod, which starts its "
            "ranks; let the pod run `unisono run script.py` (or torchrun), which reads these variables"
        )
    own, world_size = _number(environ, rank), _number(environ, size)
    if world_size == 1 and not is_elastic:
        return None  # an ordinary process, which may start its ranks itself
    is_pod = "KUBERNETES_SERVICE_HOST" in environ or any(name.startswith("PET_") for name in environ)
    variables = f"the variables RANK{', WORLD_SIZE and LOCAL_RANK' if is_of_rank else ' and WORLD_SIZE'}"
    return RankPlace(
        launcher="torchrun" if is_elastic else "a Kubernetes pod" if is_pod and not is_of_rank else variables,
        rank=own,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size if is_of_rank else 1),
        node_rank=_number(environ, "GROUP_RANK", _number(environ, "NODE_RANK", 0 if is_of_rank else own)),
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        address=_text(environ, f"{prefix}MASTER_ADDR"),
        port=_number(environ, f"{prefix}MASTER_PORT", _TORCH_PORT),
        is_store_there=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


# MPI.


def _mpi_place(environ: Mapping[str, str], implementations: Sequence[str]) -> RankPlace | None:
    for rank, size, local_rank, local_size, *job in (names.split() for names in implementations):
        if rank not in environ or (world_size := _number(environ, size)) == 1:
            continue
        own, local_count = _number(environ, rank), _number(environ, local_size)
        address, port = environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT", _TORCH_PORT)
        if not address and local_count == world_size and job and job[0] in environ:
            address, port = "127.0.0.1", 20000 + crc32(environ[job[0]].encode()) % 10000  # differs between local jobs
        elif not address:
            raise NoWorldError(
                f"{rank}={own} of {size}={world_size} says that mpirun has started this process, and not where the "
                "ranks meet; name the first machine and a free port: mpirun -x MASTER_ADDR=host1 -x MASTER_PORT=29500 "
                "(with MPICH and Intel MPI: -genv MASTER_ADDR host1 -genv MASTER_PORT 29500)"
            )
        node_rank = own // local_count  # where machines have equally many ranks, one after the other
        launcher = "submitit" if rank.startswith("SUBMITIT") else "mpirun"
        return RankPlace(launcher, own, world_size, _number(environ, local_rank), local_count, node_rank, address, port)
    return None


def _pod_agent(environ: Mapping[str, str]) -> AgentPlace | None:
    if not ({"PET_NNODES", "PET_NPROC_PER_NODE", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"} & environ.keys()):
        return None
    address = environ.get("PET_MASTER_ADDR", "")
    port = _number(environ, "PET_MASTER_PORT", _TORCH_PORT)
    nproc = environ.get("PET_NPROC_PER_NODE", "")
    return AgentPlace(
        launcher="the PET_ variables",
        num_nodes=environ.get("PET_NNODES", "1"),
        node_rank=_number(environ, "PET_NODE_RANK") if "PET_NODE_RANK" in environ else None,
        endpoint=environ.get("PET_RDZV_ENDPOINT") or (f"{address}:{port}" if address else ""),
        run_id=environ.get("PET_RDZV_ID"),
        nproc=int(nproc) if nproc.isdecimal() and int(nproc) else nproc or None,
        max_restarts=_number(environ, "PET_MAX_RESTARTS") if "PET_MAX_RESTARTS" in environ else None,
    )


# SLURM.


def _slurm_place(environ: Mapping[str, str]) -> RankPlace | None:
    if not is_slurm_step(environ):
        return None
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    if world_size == 1:
        return None
    node_rank = _number(environ, "SLURM_NODEID")
    return RankPlace(
        launcher="a SLURM step",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=_tasks_on(environ, node_rank),
        node_rank=node_rank,
        restart_count=_number(environ, "SLURM_RESTART_COUNT", 0),
        address=environ.get("MASTER_ADDR") or _first_host(environ),
        port=_number(environ, "MASTER_PORT", _slurm_port(environ)),
    )


def _slurm_agent(environ: Mapping[str, str]) -> AgentPlace | None:
    if not is_slurm_step(environ):
        return None
    num_nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    num_tasks = _number(environ, "SLURM_STEP_NUM_TASKS", num_nodes)
    if num_nodes == 1 and num_tasks == 1:
        return None
    if num_tasks != num_nodes:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS={num_tasks} on {num_nodes} node(s): the step starts several agents on a node, and "
            "each would start all workers; use srun --ntasks-per-node=1 unisono run ..."
        )
    return AgentPlace(
        launcher="the SLURM step",
        num_nodes=str(num_nodes),
        node_rank=_number(environ, "SLURM_NODEID"),
        endpoint=f"{_first_host(environ)}:{_slurm_port(environ)}",
        run_id=f"{_number(environ, 'SLURM_JOB_ID', 0)}.{_number(environ, 'SLURM_STEP_ID', 0)}",
    )


def _tasks_on(environ: Mapping[str, str], node_rank: int) -> int:
    """The number of tasks on a node: `2(x3),1` are 2 on each of three nodes, and 1 on the next."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts: list[int] = []
    for piece in environ[name].split(",") if name in environ else ():
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if found is None:
            raise ValueError(f"{name}={environ[name]!r} does not list the tasks of nodes; a list looks like 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node_rank] if node_rank < len(counts) else _number(environ, "SLURM_NTASKS_PER_NODE", 1)


def node_of_step() -> tuple[int, int, str]:
    """The number of this node of a SLURM step, the number of nodes, and where their agents meet, host:port."""
    environ = os.environ
    count = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    return _number(environ, "SLURM_NODEID"), count, f"{_first_host(environ)}:{_slurm_port(environ)}"


def _first_host(environ: Mapping[str, str]) -> str:
    """The first in a compressed list of hosts: `node[003-005,9],other1` begins with node003."""
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    found = re.match(r"((?:[^,\[\]\s]|\[\d[^\[\]\s]*\])+)(?:,|$)", _text(environ, name))
    if found is None:
        raise ValueError(f"{name}={environ[name]!r} names no hosts; a list looks like node[01-04,9],other1")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port that differs between jobs and steps sharing a machine, and is the same for all tasks of this step."""
    return 20000 + (_number(environ, "SLURM_JOB_ID", 0) + 997 * _number(environ, "SLURM_STEP_ID", 0)) % 10000


# Reading variables.


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(f"{name} is not set, though the other variables of a launcher are; set it, or unset them all")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    text = _text(environ, name)
    if not text.isdecimal():
        raise ValueError(
            f"{name}={text!r} is not an integer of at least 0; a launcher sets it, so unset it if none did"
        )
    return int(text)


def _check_place(place: RankPlace) -> RankPlace:
    for what, index, count in [
        ("rank", place.rank, place.world_size),
        ("local rank", place.local_rank, place.local_world_size),
    ]:
        if not 0 <= index < count:
            raise ValueError(
                f"{place.launcher} announces {what} {index} of {count}; ranks go from 0 to {count - 1}. The variables "
                "of two launchers may be mixed up: `unisono doctor` lists them"
            )
    return place
