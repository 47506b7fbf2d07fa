"""Who has started this process: what launchers say in its environment, and what becomes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_scripts
from agents import free_port

from unisono.errors import NoWorldError
from unisono.launch.hosts.environment import (
    OUTER_DIRECTORY,
    AgentPlace,
    RankPlace,
    announced_agent,
    announced_place,
    take,
)
from unisono.launch.hosts.join_world import join_world
from unisono.world import announcement, current_world


def variables(text: str) -> dict[str, str]:
    return dict(each.split("=") for each in text.split())


TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=node1 MASTER_PORT=1234 "
    "TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True"
)
SLURM = variables(
    "SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=5 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_STEP_ID=1 SLURM_JOB_ID=777 "
    "SLURM_STEP_NUM_NODES=3 SLURM_STEP_NODELIST=node[07-08,11] SLURM_STEP_TASKS_PER_NODE=2(x2),1"
)
POD = variables("KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456")
TRAINER = variables(
    "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0 PET_MASTER_PORT=29400"
)
MPIRUN = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=1693319169 PMIX_RANK=3"
)
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SUBMITIT = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"}
ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
ONE_WORKER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


# Places.

OF_TORCHRUN = RankPlace("torchrun", 3, 4, 1, 2, 1, "node1", 1234, 2, is_store_there=True)
OF_MPIRUN = RankPlace("mpirun", 3, 4, 1, 2, 1, "node1", 1234)
PLACES = {
    "torchrun": (TORCHRUN, OF_TORCHRUN),
    "torchrun in a pod": ({**POD, **TORCHRUN}, OF_TORCHRUN),
    "torchrun in a step": ({**SLURM, **TORCHRUN}, OF_TORCHRUN),
    "torchrun of one worker, which may grow": (
        {**TORCHRUN, **ONE_WORKER},
        RankPlace("torchrun", 0, 1, 0, 1, 1, "node1", 1234, 2, is_store_there=True),
    ),
    "SLURM": (SLURM, RankPlace("a SLURM step", 4, 5, 0, 1, 2, "node07", 20000 + 777 + 997)),
    "SLURM with an address": ({**SLURM, **ADDRESS}, RankPlace("a SLURM step", 4, 5, 0, 1, 2, "node1", 1234)),
    "a pod": (POD, RankPlace("a Kubernetes pod", 1, 3, 0, 1, 1, "job-master-0", 23456)),
    "a pod of the trainer": (TRAINER, RankPlace("a Kubernetes pod", 1, 2, 0, 1, 1, "job-node-0", 29400)),
    "Open MPI": ({**MPIRUN, **ADDRESS}, OF_MPIRUN),
    "Open MPI in a world of one besides": ({**MPIRUN, **ADDRESS, **ONE_WORKER}, OF_MPIRUN),
    "Open MPI in a step": ({**SLURM, **MPIRUN, **ADDRESS}, OF_MPIRUN),
    "MPICH": ({**HYDRA, **ADDRESS}, RankPlace("mpirun", 1, 2, 1, 2, 0, "node1", 1234)),
    "the batch script of SLURM": ({**SLURM, "SLURM_STEP_ID": "4294967291"}, None),
    "a step of one task": ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, None),
    "one pod": ({**POD, "RANK": "0", "WORLD_SIZE": "1"}, None),
    "one task of submitit": ({**SUBMITIT, "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_NTASKS": "1"}, None),
    "a worker of spawn": ({**TORCHRUN, OUTER_DIRECTORY: "/tmp/x"}, None),
    "nothing": ({}, None),
    "a rank alone": ({"RANK": "0"}, None),
    "a number alone": ({"WORLD_SIZE": "2"}, None),
}


@pytest.mark.parametrize(("environ", "place"), PLACES.values(), ids=PLACES)
def test_the_place_that_a_launcher_announces(environ, place):
    assert announced_place(environ) == place
    if place is None and "SLURM_PROCID" in environ:
        assert announcement(environ) is None


def test_on_one_machine_mpirun_and_submitit_ranks_meet_at_their_jobs_port():
    alone = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    place, other = announced_place(alone), announced_place({**alone, "PMIX_NAMESPACE": "5"})
    assert (place.address, place.rank, place.node_rank) == ("127.0.0.1", 3, 0)
    assert 20000 <= place.port < 30000
    assert place.port != other.port
    task = announced_place({**SUBMITIT, "SUBMITIT_LOCAL_JOB_ID": "7"})
    assert task == RankPlace("submitit", 1, 2, 1, 2, 0, "127.0.0.1", task.port)


LONE = [{"PMIX_RANK": "1"}, {"FLUX_TASK_RANK": "2"}, {"LOCAL_RANK": "1"}, {"RANK": "3"}]
LONE += [{"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"}]


@pytest.mark.parametrize("environ", [MPIRUN, HYDRA, *LONE], ids=str)
def test_a_process_launched_beside_others_does_not_train_alone(environ):
    assert "has started several of these processes" in (announcement(environ) or "")
    if environ in LONE:
        with pytest.raises(NoWorldError, match="but not where they meet"):
            announced_place(environ)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed: apt install openmpi-bin")
def test_a_script_under_mpirun_trains_in_one_world(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, unisono\n"
        "unisono.join_world()\n"
        "total = unisono.all_reduce(torch.tensor(unisono.rank() + 1.0), 'sum')\n"
        "print(f'{unisono.rank()} of {unisono.world_size()}: {total.item()}')\n"
    )
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["0 of 2: 3.0", "1 of 2: 3.0"]), done.stderr


def test_what_a_rank_has_started_itself_is_not_that_rank(monkeypatch, tmp_path):
    (tmp_path / "asking.py").write_text(ASKING)
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    place = announced_place()
    assert place is not None
    monkeypatch.setenv("UNISONO_TAKEN", "")
    take(place)
    assert announced_place() == place  # it is this process that has taken it
    assert warm_scripts.complete(tmp_path / "asking.py")[1] == "None\n"
    monkeypatch.setenv("RANK", "2")  # another launcher, below this process
    assert "rank=2" in warm_scripts.complete(tmp_path / "asking.py")[1]


ASKING = "from unisono.launch.hosts.environment import announced_place; print(announced_place())"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not an integer"),
        ({**TORCHRUN, "RANK": "4"}, "torchrun announces rank 4 of 4; ranks go from 0 to 3"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**POD, "MASTER_PORT": "-1"}, "MASTER_PORT='-1' is not an integer"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"TASKS_PER_NODE='2\(x' does not list the tasks of nodes"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        ({**SLURM, "SLURM_STEP_NODELIST": ","}, "SLURM_STEP_NODELIST=.* names no hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[x-y]"}, "SLURM_STEP_NODELIST=.* names no hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST=.* names no hosts"),
        ({**TRAINER, "PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE=4 ask for an agent in this pod.*unisono run"),
        (MPIRUN, "mpirun -x MASTER_ADDR=host1 -x MASTER_PORT=29500"),
    ],
)
def test_a_malformed_or_missing_variable_is_named(environ, words):
    with pytest.raises((ValueError, NoWorldError), match=words):
        announced_place(environ)


# Agents.


def test_an_agents_place_comes_from_a_one_task_per_node_step_or_kubernetes():
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    assert announced_agent(step) == AgentPlace("the SLURM step", "3", 2, f"node07:{20000 + 777 + 997}", "777.1")
    with pytest.raises(ValueError, match="srun --ntasks-per-node=1 unisono run"):
        announced_agent(SLURM)
    pod = {**TRAINER, "PET_NPROC_PER_NODE": "8", "PET_MAX_RESTARTS": "2", "PET_RDZV_ID": "job"}
    expected = AgentPlace("the PET_ variables", "2", 1, "job-node-0:29400", "job", nproc=8, max_restarts=2)
    assert announced_agent(pod) == expected
    elastic = {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "worker-0:23456", "PET_NPROC_PER_NODE": "auto"}
    assert announced_agent(elastic) == AgentPlace("the PET_ variables", "1:3", None, "worker-0:23456", None, "auto")
    assert announced_agent({}) is None is announced_agent(POD)


# Nothing initialised.


@pytest.mark.parametrize(
    ("environ", "words"),
    [(TORCHRUN, "WORLD_SIZE=4 is set"), (SLURM, "SLURM_STEP_NUM_TASKS=5 is set"), (TRAINER, "PET_NNODES=2 is set")],
)
def test_several_processes_with_nothing_initialised_are_an_error(monkeypatch, environ, words):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoWorldError, match=rf"{words}.*unisono.join_world\(\).*unisono.spawn\(fn\)"):
        current_world()


@pytest.mark.parametrize(
    ("text", "first"),
    [("node[003-005,9],other1", "node003"), ("rack[1-2]n[08-10]x,a", "rack1n08x"), ("a,b", "a"), ("n1", "n1")],
)
def test_the_first_host_of_a_list_is_found(text, first):
    assert announced_place({**SLURM, "SLURM_STEP_NODELIST": text}).address == first


@pytest.mark.parametrize(("text", "sizes"), [("2(x2),1", [2, 2, 1]), ("3", [3, 1, 1]), ("1,2,4", [1, 2, 4])])
def test_the_number_of_ranks_on_each_machine_is_found(text, sizes):
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": text}
    assert [announced_place({**environ, "SLURM_NODEID": str(number)}).local_world_size for number in range(3)] == sizes


# Joining, by real processes.

JOINING = """
import sys
import unisono
from unisono import join_world, spawn

def train(index, factor):
    import torch
    world = unisono.current_world()
    assert world is join_world()
    return index * factor, unisono.all_reduce(torch.ones(1)).item(), world.local_rank, world.node_rank

results = spawn(train, (10,), cores=1, grace_s=3.0)
sys.stdout.write(f"{unisono.rank()}: {results}\\n")
"""


LAUNCHERS = ("SLURM_", "PET_", "TORCHELASTIC")


def start(script: Path, environ: dict[str, str]) -> warm_scripts.Forked:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return warm_scripts.run(script, environ={**plain, "PYTHONUNBUFFERED": "1", **environ})


def run_two(script: Path, environ: Callable[[int], dict[str, str]] | None = None) -> list[tuple[int, str, str]]:
    """As two processes that only have the variables; the exit code, the output and the errors of each."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environ = environ or (lambda rank: {**variables, "RANK": str(rank)})
    ended = []
    for process in [start(script, environ(rank)) for rank in range(2)]:
        with process:
            output, errors = process.communicate(timeout=60)
            ended.append((process.returncode, output, errors))
    return ended


@pytest.fixture
def joining(tmp_path: Path) -> Path:
    script = tmp_path / "join_world.py"
    script.write_text(JOINING)
    return script


def run_by_torchrun(script: Path) -> list[str]:
    """The sorted lines of a script that torchrun runs as two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    process = subprocess.run(
        [*launcher, "--rdzv-endpoint", "localhost:0", script], capture_output=True, text=True, timeout=60, env=environ
    )
    assert process.returncode == 0, process.stderr
    return sorted(process.stdout.splitlines())


@pytest.mark.parametrize("launcher", ["SLURM", "Kubernetes"])
def test_processes_that_slurm_or_kubernetes_has_started_join_one_world(joining, launcher):
    port = str(free_port())

    def environ(rank: int) -> dict[str, str]:
        if launcher == "Kubernetes":
            return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
        return {**step, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost,elsewhere", "MASTER_PORT": port}

    for rank, (code, output, errors) in enumerate(run_two(joining, environ)):
        assert code == 0, errors
        assert output == f"{rank}: {[(0, 2.0, 0, 0), (10, 2.0, 0, 1)]}\n"
        assert "spawn's cores, grace_s: ignored, since a launcher has started" in errors


TRAINING = """
import sys, torch, unisono

accelerator = unisono.Accelerator({arguments})
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
model(torch.full((1, 1), unisono.rank() + 1.0)).sum().backward()
assert accelerator.device.type == "cpu" and unisono.Accelerator().world is accelerator.world
sys.stdout.write(f"{{accelerator.process_index}} of {{accelerator.num_processes}}: {{model.weight.grad.item()}}\\n")
"""


@pytest.mark.parametrize("arguments", ["cpu=True", "'cpu'"])
def test_an_accelerator_joins_the_ranks_that_are_announced(tmp_path, arguments):
    (tmp_path / "training.py").write_text(TRAINING.format(arguments=arguments))
    for rank, (code, output, errors) in enumerate(run_two(tmp_path / "training.py")):
        assert (code, output) == (0, f"{rank} of 2: 1.5\n"), errors


SIGNING = """
import os, torch.distributed as dist, unisono
from unisono.comm.sealing import has_secret

world = unisono.join_world()
store = dist.distributed_c10d._get_default_store()
if world.rank == 0:
    store.set("address", "10.0.0.1")
plain = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, wait_for_workers=False)
unisono.barrier()
values = [plain.get(key) for key in plain.list_keys() if key.endswith("address")]
print(has_secret(), [value.startswith(b"unisono signed ") for value in values])
unisono.barrier()
"""


@pytest.mark.parametrize("secret", [None, "", "s" * 16])
def test_ranks_of_other_launchers_sign_by_the_variable_or_warn_without_it(tmp_path, monkeypatch, secret):
    (tmp_path / "signing.py").write_text(SIGNING)
    monkeypatch.delenv("UNISONO_RDZV_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("UNISONO_RDZV_SECRET", secret)
    for rank, (code, output, errors) in enumerate(run_two(tmp_path / "signing.py")):
        assert (code, output) == (0, f"{bool(secret)} {[bool(secret)]}\n"), errors
        assert ("the ranks have no secret: anyone who reaches" in errors) == (secret is None and rank == 0), errors
        assert ("; set UNISONO_RDZV_SECRET to the same random text for" in errors) == (secret is None and rank == 0)


@pytest.mark.slow
def test_under_torchrun_spawn_and_an_accelerator_use_its_workers(tmp_path):
    (tmp_path / "training.py").write_text(JOINING + TRAINING.format(arguments=""))
    spawned = [(0, 2.0, 0, 0), (10, 2.0, 1, 0)]
    assert run_by_torchrun(tmp_path / "training.py") == [
        *("0 of 2: 1.5", f"0: {spawned}"),
        *("1 of 2: 1.5", f"1: {spawned}"),
    ]


FAILING = """
import unisono
from unisono import spawn

def train(index):
    if index == 0:
        raise LookupError("rank zero's own")
    unisono.barrier()

spawn(train)
"""


def test_rank_zeros_failure_reaches_its_peers_although_it_holds_the_store(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    errors = [each for _, _, each in run_two(tmp_path / "failing.py")]
    assert "LookupError: rank zero's own" in errors[0]
    assert "rank 0 of 2, cpu:0" in errors[0]
    assert "BrokenWorldError: rank 1 cannot complete barrier(): rank 0 failed with LookupError" in errors[1]


STEPPING = """
import torch, unisono
import torch.distributed as dist

world = unisono.join_world(process_group="gloo")
accelerator = unisono.Accelerator(strategy={strategy!r})
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = accelerator.prepare(model, optimizer)
waits, plain = [], dist.all_reduce

def reduce(tensor, *args, async_op=False, **options):
    waits.append(async_op)
    return plain(tensor, *args, async_op=async_op, **options)

for step in range(1, 8):
    if step == 5:  # models are compared after steps 1, 2 and 4, and the first one makes buckets
        dist.all_reduce = reduce
    accelerator.backward(model(torch.ones(3, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
dist.all_reduce = plain
print("synchronous", waits.count(False))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_one_machine_any_launchers_ranks_compare_steps_without_messages(tmp_path, strategy):
    (tmp_path / "stepping.py").write_text(STEPPING.format(strategy=strategy))
    for code, output, errors in run_two(tmp_path / "stepping.py"):
        assert (code, output) == (0, "synchronous 0\n"), errors


def test_a_number_of_workers_that_the_launcher_has_not_started_is_refused(tmp_path):
    (tmp_path / "train.py").write_text(JOINING.replace("(10,),", "(10,), 3,"))
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    with start(tmp_path / "train.py", variables) as process:
        errors = process.communicate(timeout=60)[1]
    assert "nprocs=3, but by the variables RANK and WORLD_SIZE there are 1 worker(s) on this machine" in errors


def test_a_process_with_nothing_announced_joins_the_world_of_one():
    assert join_world() is current_world()
    assert join_world().world_size == 1
