"""`unisono run` on one machine: what it runs, what it prints, what it ends with; and what it refuses at the door."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_scripts
from faults import PATIENCE_S, SOON_S, Line, Script

from unisono.cli.main import main
from unisono.cli.run import print_failure
from unisono.comm.sealing import UnsignedError
from unisono.devices.cores import usable_cores
from unisono.errors import ClosedError
from unisono.launch import messages

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        messages._said.clear()  # as in a command's own process
        try:
            code: object = main(["run", *arguments])
        except SystemExit as stop:
            code = stop.code
        assert isinstance(code, int)
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a script into an empty directory, which becomes the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [each for each in os.environ if each.startswith(("SLURM_STEP", "PET_"))]:
        monkeypatch.delenv(name, raising=False)

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.fixture
def run_apart(tmp_path: Path) -> Run:
    """`unisono run` of a script in a process of its own, with a bare environment."""

    def run_apart(text: str, *options: str) -> tuple[int, str, str]:
        (tmp_path / "train.py").write_text(text)
        return warm_scripts.launch(tmp_path, "run", "--backend", "cpu", *options, "train.py")

    return run_apart


# What runs.


def test_a_script_runs_as_main_in_each_worker_with_its_own_arguments(run, script):
    script("value = 5", "there/beside.py")
    name = script(
        "import sys, unisono, beside\n"
        "if __name__ == '__main__':\n"
        "    print(unisono.rank(), unisono.all_gather_object(unisono.rank()), sys.argv, beside.value)",
        "there/train.py",
    )
    code, output, errors = run("-n", "2", "--backend", "cpu", name, "--lr", "1", "-n", "7")
    assert code == 0, errors
    argv = ["there/train.py", "--lr", "1", "-n", "7"]
    # The first line has no mark if the other rank writes 0.2 s later or more.
    lines = {re.sub(r"^\[rank (\d)\] (?=\1)", "", each) for each in output.splitlines()}
    assert lines == {f"{rank} [0, 1] {argv} 5" for rank in range(2)}
    assert "\n[rank " in output, "marked, since another rank has written before"


def test_a_module_runs_as_python_m_runs_it(run, script, tmp_path):
    script("", "package/__init__.py")
    name = script("import sys, unisono\nprint(unisono.rank(), __name__, __spec__.name, sys.argv)", "package/train.py")
    code, output, errors = run("--nproc_per_node=2", "--backend", "cpu", "--no_prefix", "-m", "package.train", "-m")
    assert code == 0, errors
    argv = [str(tmp_path / name), "-m"]
    assert sorted(output.splitlines()) == [f"{rank} __main__ package.train {argv}" for rank in range(2)]


def test_modules_to_preload_are_imported_once_for_all_workers(run_apart, tmp_path):
    (tmp_path / "beside.py").write_text("import os\nopen('imports', 'a').write(f'{os.getpid()}\\n')\n")
    text = "import sys, os, beside, json\nprint(os.getppid())"
    code, output, errors = run_apart(text, "-n", "2", "--no-prefix", "--preload", "beside,json.tool")
    assert code == 0, errors
    [importer] = (tmp_path / "imports").read_text().split()
    assert output.split() == [importer, importer], "the process that the workers are forked from"


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("json,no_such", [], "'no_such': there is no module 'no_such' here or in the import path"),
        ("no_such.part", [], "'no_such.part': there is no module 'no_such' here or in the import path"),
        ("json,", [], "'' is not the name of a module; write names as in torch,transformers"),
        ("json tool", [], "'json tool' is not the name of a module"),
        ("json", ["--start-method", "spawn"], "--preload needs the start method zygote"),
        ("json", ["--start-method", "fork"], "start_method='fork' does not exist"),
    ],
)
def test_what_cannot_be_preloaded_is_refused_before_anything_runs(run, script, names, options, message):
    name = script("print('it runs')")
    code, output, errors = run("-n", "2", "--backend", "cpu", "--preload", names, *options, name)
    assert (code, output) == (2, "")
    assert message in errors


POD = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        (POD, []),
        ({**POD, "RANK": "0", "WORLD_SIZE": "1"}, []),
        ({**POD, "PET_NPROC_PER_NODE": "8"}, ["-n", "2"]),
        ({**POD, "PET_NNODES": "2"}, ["--nnodes", "1", "-n", "2"]),
    ],
    ids=str,
)
def test_a_pod_takes_its_workers_from_the_command_line_else_from_kubeflow(run, script, monkeypatch, environ, options):
    for name, value in {"PET_NPROC_PER_NODE": "2", **environ}.items():
        monkeypatch.setenv(name, value)
    name = script("import unisono\nprint(unisono.world_size())")
    code, output, errors = run("--backend", "cpu", "--no-prefix", *options, name)
    assert (code, output.split()) == (0, ["2", "2"]), errors


@pytest.mark.parametrize(
    ("body", "is_told"),
    [
        ("print(sum(range(3)))", True),
        ("unisono.barrier()", False),
        ("list(unisono.Accelerator().prepare(torch.utils.data.DataLoader(range(4))))", False),
        ("dist.init_process_group('gloo')", False),
        ("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))(torch.ones(1)).backward()", False),
        ("dist.new_group([0, 1])", False),
        ("dist.all_reduce(torch.ones(1)); dist.destroy_process_group()", False),
        ("dist.destroy_process_group()", True),
    ],
)
def test_ranks_that_never_met_are_told_so_at_the_end(run, script, body, is_told):
    name = script(f"import torch, unisono, torch.distributed as dist\n{body}")
    said = "has run on 2 ranks, and rank 0 has called no collective"
    for options, is_due in ([], is_told), (["--help"], False):
        code, _, errors = run("-n", "2", "--backend", "cpu", name, *options)
        assert (code, errors.count(said)) == (0, is_due), errors


def test_words_for_the_number_of_workers_are_those_of_torchrun(run, script):
    name = script("import unisono\nprint(unisono.world_size())")
    for word in ("cpu", "auto"):
        code, output, errors = run("--nproc-per-node", word, "--backend", "cpu", "--standalone", "--no-prefix", name)
        assert code == 0, errors
        assert output.split() == [str(usable_cores())] * usable_cores()


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--tee", "3"], "--log-dir DIR"),
        (["-r", "3"], "--log-dir DIR"),
        (["--redirects=3"], "--log-dir DIR"),
        (["--local-ranks-filter", "0"], "--log-ranks 0,1"),
        (["--no-python"], "-m a module"),
        (["--role", "trainer"], "leave it out"),
        (["--use_env"], "leave it out"),
        (["--signals-to-handle=SIGUSR1"], "always reach the workers"),
    ],
    ids=str,
)
def test_an_option_of_torchruns_alone_is_refused_with_its_counterpart(run, script, options, advice):
    code, _, errors = run("-n", "2", *options, script(""))
    assert code == 2
    assert advice in errors
    assert "is an option of torchrun" in errors


def test_torchruns_single_machine_line_runs_and_each_run_has_its_own_id(run, script):
    name = script("import os\nprint(os.environ['TORCHELASTIC_RUN_ID'])")
    line = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=5", "--shutdown-timeout", "9"]
    options = ["--backend", "cpu", "--no-prefix", "--nproc-per-node=2"]
    found = []
    for more in (["--nnodes=1"], [], ["--rdzv-id=77"]):
        code, output, errors = run(*options, *line, *more, name)
        assert code == 0, errors
        first, second = output.split()
        assert first == second
        found.append(first)
    assert found[2] == "77"
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("", ("gloo", "undefined")),
        ("'gloo'", ("gloo", "gloo")),
        ("'cpu:gloo'", ("cpu:gloo", "cpu:gloo")),
    ],  # shared, and not
)
def test_a_script_that_initialises_a_group_of_gloo_gets_shared_memory(run, script, asked, names, caplog):
    name = script(
        "import torch, torch.distributed as dist\nfrom torch.distributed import get_backend\n"
        f"dist.init_process_group({asked})\n"
        "get_backend() == 'gloo' and dist.monitored_barrier()\n"  # torch refuses others, by their names
        "print(get_backend(), get_backend(dist.new_group([0, 1])), type(dist.group.WORLD).__name__)"
    )
    for options, called, kind in (
        ([], names[0], "SharedMemoryGroup"),
        (["--process-group", "gloo"], names[1], "ProcessGroup"),
    ):
        code, output, errors = run("-n", "2", "--backend", "cpu", "--no-prefix", *options, name)
        assert (code, output.splitlines()) == (0, 2 * [f"{called} {called} {kind}"]), errors
        assert caplog.text.count("keeps gloo") == (not options)
        caplog.clear()


def test_a_rank_calling_a_different_collective_in_a_gloo_script_is_named(run, script):
    name = script(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.broadcast(torch.ones(2), 0) if dist.get_rank() else dist.all_reduce(torch.ones(2))"
    )
    code, _, errors = run("-n", "2", "--backend", "cpu", name)
    assert code != 0
    assert re.search(r"rank 0 .*all_reduce.* while rank 1 .*broadcast", errors), errors


CROSSED = """
import torch, torch.distributed as dist
from datetime import timedelta
from unisono.comm.shared_memory import meeting_point
meeting_point._SAY_S = 0.1
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
message = torch.ones(1)
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    dist.send(message, 1)
    work.wait()
else:
    dist.recv(message, 0)
    dist.all_reduce(torch.ones(1))
print("went on")
"""


GROUPS_IN_TWO_ORDERS = """
import torch, torch.distributed as dist
from datetime import timedelta
from unisono.comm.shared_memory import meeting_point
meeting_point._SAY_S = 0.1
dist.init_process_group("gloo")
groups = [dist.new_group([0, 1], timeout=timedelta(seconds=2)) for _ in range(2)]
begun = [dist.all_reduce(torch.ones(1), group=each, async_op=True) for each in groups[:: 1 - 2 * dist.get_rank()]]
[each.wait() for each in begun]
print("went on")
"""


@pytest.mark.parametrize(
    ("text", "why"), [(CROSSED, "may wait for a message"), (GROUPS_IN_TWO_ORDERS, "in a collective of another group")]
)
def test_waiting_behind_an_unfinished_collective_is_said_to_need_gloo(run, script, text, why):
    name = script(text)
    code, _, errors = run("-n", "2", "--backend", "cpu", name)
    assert code != 0
    assert why in errors
    assert "they may wait for each other" in errors
    code, output, errors = run("-n", "2", "--backend", "cpu", "--process-group", "gloo", "--no-prefix", name)
    assert (code, output.split("\n")[:2]) == (0, ["went on", "went on"]), errors


# Each rank makes worlds of its own, as a sweep or an evaluation does: by forks, and by the environment.
WORLDS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

own = int(os.environ["RANK"])

def total(value):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()

def child(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    assert total((rank + 1) * 100.0**own) == (rank, 2, 3 * 100.0**own)
    dist.destroy_process_group()

def free_port():
    import socket
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

mp.start_processes(child, args=(free_port(),), nprocs=2, start_method="fork")
before = dict(os.environ)
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
dist.init_process_group("gloo")
assert total(1.0) == (0, 1, 1.0)
dist.destroy_process_group()
os.environ.update(before)
dist.init_process_group("gloo")
assert total(1.0) == (own, 2, 2.0)
if type(dist.group.WORLD).__name__ == "SharedMemoryGroup":  # a fork that ends its copy of gloo's waits for ever
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        dist.destroy_process_group()
        os._exit(0)
assert total(2.0) == (own, 2, 4.0)
dist.destroy_process_group()
print("had its own")
"""


@pytest.mark.parametrize("options", [[], ["--process-group", "gloo"]], ids=["shm", "gloo"])
def test_worlds_a_rank_creates_itself_see_nothing_of_the_other_ranks(run_apart, options):
    code, output, errors = run_apart(WORLDS, "-n", "2", "--no-prefix", *options)
    assert (code, output.splitlines()) == (0, ["had its own"] * 2), errors


@pytest.mark.slow
def test_a_model_that_is_compiled_around_ddp_trains(run_apart):
    text = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = torch.compile(DistributedDataParallel(layers), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 4)).square().mean().backward()
    optimizer.step()
print("trained", [each.sum().item() for each in model.parameters()])
"""
    found = []
    for options in ([], ["--process-group", "gloo"]):
        code, output, errors = run_apart(text, "-n", "2", "--no-prefix", *options)
        assert code == 0, errors
        found += output.splitlines()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_preloaded_library_that_has_imported_torchs_functions_gets_ours(run_apart, tmp_path, monkeypatch):
    names = "init_process_group, all_reduce, get_backend, destroy_process_group"
    (tmp_path / "library.py").write_text(f"from torch.distributed import {names}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = (
        "import torch, library\nlibrary.init_process_group('gloo')\ntotal = torch.ones(2)\n"
        "library.all_reduce(total)\nprint(total.tolist(), library.get_backend())\nlibrary.destroy_process_group()"
    )
    code, output, errors = run_apart(text, "-n", "2", "--no-prefix", "--preload", "library")
    assert (code, output.splitlines()) == (0, ["[2.0, 2.0] gloo"] * 2), errors


def test_remote_calls_of_torch_work(run_apart):
    text = """
import os, time, torch, torch.distributed.rpc as rpc
from pathlib import Path
own = int(os.environ["RANK"])
rpc.init_rpc(f"worker{own}", rank=own, world_size=2)
if own == 0:
    print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 2)).tolist())
rpc.shutdown()
Path(f"{own} is done").touch()
while not Path("1 is done").exists():  # rank 0 has the store that the other one leaves by
    time.sleep(0.01)
"""
    code, output, errors = run_apart(text, "-n", "2", "--no-prefix")
    assert (code, output.strip()) == (0, "[3.0]"), errors


# Written for torchrun: nothing of this package in it.
PLAIN = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) and dist.is_torchelastic_launched()
assert {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"} < os.environ.keys()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), float(rank + 1))).sum().backward()
print("gradient", model.module.weight.grad.tolist())
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size)
try:
    dist.init_process_group("gloo")
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_script_for_torchrun_runs_unchanged(run_apart, num_workers):
    code, output, errors = run_apart(PLAIN, "-n", str(num_workers), "--no-prefix")
    assert code == 0, errors
    mean = sum(range(1, num_workers + 1)) / num_workers
    assert output.splitlines().count(f"gradient [[{mean}, {mean}]]") == num_workers
    assert output.count("trying to initialize the default process group twice") == num_workers


NAMES_DEVICES = """
import os, pickle, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = int(os.environ["LOCAL_RANK"])
class Replicated(DistributedDataParallel):
    def __init__(self, module, device_ids):
        super().__init__(module, device_ids)
for devices in ([torch.device("cpu")], ["cpu"], [0], [rank], (rank,)):
    for kind in (DistributedDataParallel, Replicated):
        model = kind(torch.nn.Linear(1, 1, bias=False), device_ids=devices)
        model(torch.full((1, 1), float(rank + 1))).sum().backward()
        assert type(model) is kind and model.module.weight.grad.item() == sum(range(1, dist.get_world_size() + 1)) / 2
model = DistributedDataParallel(torch.nn.Linear(1, 1), [rank], rank)
assert isinstance(pickle.loads(pickle.dumps(model)), DistributedDataParallel)
for options in ({"device_ids": ["cuda:0"]}, {"device_ids": [0, 1]}):
    try:
        DistributedDataParallel(torch.nn.Linear(1, 1), **options)
    except ValueError as error:
        print("refused", options, error)
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_torchrun_scripts_device_for_a_cpu_model_is_left_out(run_apart, num_workers):
    body = NAMES_DEVICES.replace("/ 2", f"/ {num_workers}")
    code, output, errors = run_apart(body, "-n", str(num_workers), "--no-prefix")
    assert (code, errors.count("device_ids and output_device are left out")) == (0, 1), errors
    assert output.count("only work with single-device") == output.count("contain a single element") == num_workers


WATCHED = """
import threading, torch, torch.distributed as dist, unisono
comm, is_over, seen = unisono.current_world().comm, threading.Event(), []
def watch():
    while not is_over.is_set():
        seen.append(comm.progress)
thread = threading.Thread(target=watch)
thread.start()
for number in range(60):
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2, 1)) if number % 2 else None
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
is_over.set()
thread.join()
assert seen == sorted(seen) and comm.progress >= seen[0] + 2 * 60, (seen[0], comm.progress)
"""


@pytest.mark.slow
def test_progress_can_be_watched_while_a_script_makes_and_destroys_groups(run_apart):
    """The worker's pulse thread reads it as this one does, and has crashed in a group that did not exist any more."""
    code, _, errors = run_apart(WATCHED, "-n", "2")
    assert code == 0, errors


LATE = """
import os, time, torch.distributed as dist
make_group = dist.distributed_c10d._new_process_group_helper
def make_group_late(*args, **kwargs):
    made = make_group(*args, **kwargs)
    if os.environ["RANK"] == "1":
        time.sleep(0.3)  # longer than the other rank takes to end its group, if nothing holds it
        open("late", "x").close()
    return made
dist.distributed_c10d._new_process_group_helper = make_group_late
dist.init_process_group("gloo")
assert os.path.exists("late"), "a rank can end its group while another is still joining it"
dist.destroy_process_group()
"""


def test_a_group_begins_on_all_ranks_before_it_can_end_on_any(run_apart):
    code, _, errors = run_apart(LATE, "-n", "2")
    assert code == 0, errors


ON_TERMINAL = """
import os, pty, sys
from unisono.cli.main import main
ours, theirs = pty.openpty()
kept = os.dup(1)
for number in range(3):
    os.dup2(theirs, number)
code = main(sys.argv[1:])
sys.stdout.flush()
os.write(kept, os.read(ours, 1000))
os._exit(code)
"""


def test_the_output_of_a_single_worker_stays_a_terminal(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\nprint([each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)])"
    )
    (tmp_path / "launch.py").write_text(ON_TERMINAL)
    for options, expected in [([], "[True, True, True]"), (["--max-restarts", "1"], "[False, True, False]")]:
        arguments = ["run", "-n", "1", "--backend", "cpu", *options, "train.py"]
        code, output, errors = warm_scripts.complete(tmp_path / "launch.py", *arguments, directory=tmp_path)
        assert (code, output.strip()) == (0, expected), errors


def test_spawn_in_a_script_runs_in_the_workers_that_are_there(run, script):
    name = script(
        "from unisono import current_world, join_world, spawn\n"
        "world = join_world()\n"
        "print(spawn(lambda rank: rank * 2, ()), world.world_size, world is current_world() is join_world())"
    )
    for count, found in ((1, [0]), (2, [0, 2])):
        code, output, errors = run("-n", str(count), "--backend", "cpu", "--no-prefix", name)
        assert (code, output.splitlines()) == (0, [f"{found} {count} True"] * count), errors


RETURNING = """
import time, unisono
def train(rank):
    world = unisono.current_world()
    {body}
for _ in range(2):
    print(unisono.spawn(train))
print("continued", unisono.all_gather_object(unisono.rank()))
"""


def test_a_rank_that_has_returned_waits_for_slow_peers_then_continues(run, script):
    slow = "unisono.barrier(); time.sleep(0.3 * rank); return rank"
    code, output, errors = run("-n", "2", "--backend", "cpu", "--no-prefix", script(RETURNING.format(body=slow)))
    assert code == 0, errors
    assert sorted(output.splitlines()) == ["[0, 1]"] * 4 + ["continued [0, 1]"] * 2


@pytest.mark.parametrize("call", ["barrier()", "all_gather_object({'loss': 1})", "all_gather(torch.tensor([5]))"])
def test_returning_while_a_peer_waits_breaks_the_world_and_gives_no_result(run, script, call):
    body = f"import torch; print('got', world.comm.{call} if rank else 'nothing', flush=True)"
    began = time.monotonic()
    code, output, errors = run("-n", "2", "--backend", "cpu", "--no-prefix", script(RETURNING.format(body=body)))
    assert code == 1
    assert output.splitlines() == ["got nothing"]
    assert re.search(r"rank 0 came to the end of fn by spawn\(\) .* while rank 1 called (barrier|all_gather)", errors)
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "world.comm.broadcast_object(1) if rank == 0 else None",  # whose root waits for nobody
            r"rank 0 called broadcast_object\(0\) in train .* while rank 1 came to the end of fn",
        ),
        ("1 / rank", r"ZeroDivisionError: division by zero\n(.*\n)*rank 0 of 2, cpu:0"),
        ("return (n for n in ())", "the result, a generator, cannot be sent"),
    ],
)
def test_what_went_wrong_on_a_rank_reaches_one_that_has_returned(run, script, body, words):
    code, output, errors = run("-n", "2", "--backend", "cpu", script(RETURNING.format(body=body)))
    assert (code, output) == (1, "")
    assert re.search(words, errors)


STOPPING = """
import os, signal, unisono
def train(rank):
    unisono.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    while not unisono.should_stop():
        pass
    print("saves", rank)
unisono.spawn(train)
print("second stage")
"""


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_comes_after_an_agreed_stop_in_the_script_does_not_run(run_apart, num_workers):
    code, output, errors = run_apart(STOPPING, "-n", str(num_workers), "--no-prefix", "--max-restarts", "1")
    assert code == 143, errors
    assert sorted(output.splitlines()) == [f"saves {rank}" for rank in range(num_workers)]


def test_only_the_chosen_ranks_are_shown_and_all_are_kept(run, script, tmp_path):
    name = script("import unisono\nprint('from', unisono.rank())")
    code, output, _ = run("-n", "2", "--backend", "cpu", "--log-ranks", "1", "--log-dir", "logs", name)
    assert code == 0
    assert output.splitlines() == ["from 1"]
    kept = [path.read_text() for path in sorted((tmp_path / "logs" / "latest").glob("rank-*.stdout"))]
    assert kept == ["from 0\n", "from 1\n"]


CLOSING = """
import os, pathlib, resource, sys, unisono
if unisono.rank() == 0:
    (pathlib.Path("logs") / "link").symlink_to("of another run")
    (pathlib.Path("logs") / "link").replace("logs/latest")
    if "full" in sys.argv:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
if "again" in sys.argv:
    if not unisono.current_world().restart_count:
        raise SystemExit(3)
    unisono.Checkpointer("a").save()
"""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("whole", "0 steps, 0 samples/s in loops; unisono report {log}"),
        ("full", "its record is incomplete; unisono report {log}"),
        (
            "again",
            "0 steps, 0 samples/s in loops in the last attempt; 1 restart(s), 0 steps repeated, 0.0% of the time made "
            "progress; checkpoint {here}/a/checkpoint_0; unisono report {log}",
        ),
    ],
)
def test_the_last_line_describes_this_run_with_numbers_only_if_complete(run, script, tmp_path, case, words):
    options = ["-n", "2", "--backend", "cpu", "--log-dir", "logs", "--max-restarts", "1"]
    code, _, errors = run(*options, script(CLOSING), case)
    assert code == 0, errors
    (own,) = [each for each in (tmp_path / "logs").iterdir() if not each.is_symlink()]
    last = errors.splitlines()[-1]
    assert re.fullmatch(r"unisono run: finished in \d+\.\d s, " + re.escape(words.format(here=tmp_path, log=own)), last)


# What it ends with.


ENDINGS = {
    "pass": 0,
    "sys.exit(7)": 7,
    "sys.exit('bad')": 1,
    "raise ValueError('wrong')": 1,
    "sys.exit(0)": 0,
    "sys.exit(-1)": 255,
    "sys.exit(256)": 1,
    "os._exit(3)": 3,
    "os._exit(0)": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": 137,
}


@pytest.mark.parametrize(
    ("num_workers", "ending"),
    [*((1, each) for each in list(ENDINGS)[1:4]), *((2, each) for each in ENDINGS)],
)
def test_the_exit_code_tells_how_it_ended(run, script, num_workers, ending):
    name = script(f"import os, signal, sys, unisono\nif unisono.rank() == unisono.world_size() - 1:\n    {ending}")
    found, _, errors = run("-n", str(num_workers), "--backend", "cpu", name)
    assert found == ENDINGS[ending]
    assert ("Traceback" in errors) == ("raise" in ending)
    assert re.search(r"unisono: rank 1 \(pid \d+\) .*was killed by SIGKILL", errors) or "kill" not in ending


@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_a_failure_is_told_once_and_without_the_launcher_s_lines(run, script, num_workers):
    name = script(
        "import unisono\n"
        "def step():\n"
        "    try:\n"
        "        {}['first']\n"
        "    finally:\n"
        "        raise ValueError('second')\n"
        "if unisono.rank() == 0:\n"
        "    step()"
    )
    code, _, errors = run("-n", num_workers, "--backend", "cpu", name)
    assert code == 1
    assert errors.count("Traceback (most recent call last)") == 2
    assert errors.count("KeyError: 'first'") == errors.count("ValueError: second") == 1
    assert "During handling of the above exception" in errors
    for line in errors.splitlines():
        assert "unisono/" not in line
        assert "runpy" not in line
    assert f"rank 0 of {num_workers}, cpu:0, pid " in errors


@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_what_python_suggests_for_a_misspelt_name_is_told(run, script, num_workers):
    code, _, errors = run("-n", num_workers, "--backend", "cpu", script("rate = 0.1\nprint(rat)"))
    assert code == 1
    assert errors.count("Did you mean: 'rate'?") == 1


def test_a_breakpoint_of_a_worker_without_a_terminal_names_the_ways_out(run, script, monkeypatch):
    name = script("breakpoint()\nprint('went on')")
    code, output, errors = run("-n", "2", "--backend", "cpu", name)
    assert (code, output) == (1, "")
    assert "a worker has no terminal to read from; run a single worker" in errors
    assert "`unisono run -n 1 script.py`" in errors
    assert "PYTHONBREAKPOINT=0" in errors
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    code, output, errors = run("-n", "2", "--backend", "cpu", "--no-prefix", name)
    assert (code, output) == (0, 2 * "went on\n"), errors


@pytest.mark.parametrize("line", ["import pdb; pdb.set_trace(); print(1)", "input()"])
def test_so_does_whatever_else_reads_from_a_terminal(run, script, line):
    code, _, errors = run("-n", "2", "--backend", "cpu", script(line))
    assert code == 1
    assert errors.count("a worker has no terminal to read from; run a single worker") == 1
    assert "`unisono run -n 1 script.py`" in errors


ON_NEW_TERMINAL = """
import os, pty, sys
pid, ours = pty.fork()
if not pid:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
text = b""
while b"(Pdb) " not in text:  # an OSError if the command ends without a prompt
    text += os.read(ours, 1000)
os.write(ours, b"p 6 * 7\\nc\\n")
while True:
    try:
        text += os.read(ours, 1000)
    except OSError:
        break
print(text.decode())
"""


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("breakpoint()", ["-m", "unisono", "run", "-n", "1", "--backend", "cpu", "train.py"]),
        pytest.param(
            "import unisono\nunisono.spawn(lambda index: breakpoint(), nprocs=1, backend='cpu')",
            ["train.py"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_breakpoint_of_a_single_worker_has_a_prompt_on_a_terminal(tmp_path, body, arguments):
    (tmp_path / "train.py").write_text(body)
    (tmp_path / "launch.py").write_text(ON_NEW_TERMINAL)
    command = [sys.executable, "launch.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "42" in done.stdout, done.stdout + done.stderr


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("bad data")
main()
"""


def test_what_torchs_record_tells_of_an_error_is_in_the_log_directory(run, script, tmp_path):
    code, _, errors = run("-n", "2", "--backend", "cpu", "--log-dir", "logs", script(RECORDED))
    assert code == 1
    assert "ValueError: bad data" in errors
    found = [json.loads(path.read_text()) for path in (tmp_path / "logs" / "latest").glob("rank-*.error.json")]
    assert found
    assert {each["message"]["message"] for each in found} == {"ValueError: bad data"}
    code, output, errors = run(
        *("-n", "2", "--backend", "cpu", "--no-prefix"),
        script("import os\nprint(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))"),
    )
    assert code == 0, errors
    assert len(set(output.split())) == 1
    assert not os.path.exists(output.split()[0])  # the private directory of the run


STANDING = """
import sys, unisono
from pathlib import Path
from faults import Line, stand_still
Line(Path(sys.argv[1])).say("running")
stand_still()
"""


def test_the_exit_code_tells_of_an_interrupt(tmp_path):
    (tmp_path / "standing.py").write_text(STANDING)
    line = Line.at(tmp_path / "line")
    arguments = ["run", "-n", "2", "--backend", "cpu", "--grace", "1", "standing.py", str(line.path)]
    source = f"import sys\nfrom unisono.cli.main import main\nsys.exit(main({arguments!r}))"
    with line.hearing() as ear, Script(source, tmp_path) as script:
        assert ear.hear_all(2) == [["running"], ["running"]]
        script.kill(signal.SIGINT)
        assert script.end()[0] == 130
        assert script.survivors() == []


def test_an_interrupt_that_the_import_of_torch_loses_ends_the_command(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(1000): pass\n"
        "except KeyboardInterrupt:\n    pass  # as its native code does\nraise ImportError('not the real one')\n"
    )
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", __file__]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environ, capture_output=True, timeout=60, preexec_fn=_take_interrupts)
    assert ended.returncode == 130, ended.stderr


def _take_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What is refused.


def test_only_an_error_that_the_page_has_ends_with_a_link_to_it(capsys):
    assert print_failure(UnsignedError("not signed")) == 1
    assert capsys.readouterr().err == "unisono: not signed\n"
    assert print_failure(ClosedError("closed")) == 1
    assert capsys.readouterr().err.endswith("errors/#closederror\n")


def test_of_a_directory_the_script_is_named(run, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    code, output, errors = run(str(tmp_path / "package"))
    assert (code, output) == (2, "")
    assert f"; {tmp_path}/package/__main__.py is one\n" in errors


def test_the_cpu_is_no_accelerator_that_is_missed(run, script, monkeypatch):
    monkeypatch.setattr("unisono.devices.cores.family_names", lambda: ["xla", "cpu"])
    code, _, errors = run("-n", "gpu", script(""))
    assert code == 2
    assert "this machine has no accelerator of xla; pass -n cpu, or a number" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "there is no script 'trian' in .*; -m runs a module"),
        (["-m", "nowhere"], "'nowhere': there is no module 'nowhere'"),
        (["-n", "gpu", "--backend", "cpu", "train.py"], "this machine has no accelerator of cpu"),
        (["--nnodes", "2", "train.py"], "--nnodes 2 needs --rdzv-endpoint host:port"),
        (["--log-dir", "train.py", "-n", "2", "train.py"], "log_dir='train.py' cannot hold the files"),
        (["--start-method", "teleport", "-n", "2", "train.py"], "start_method='teleport'"),
        (["--process-group", "mpi", "-n", "2", "train.py"], "process_group='mpi' does not exist; pass 'gloo'"),
        (["PET_NPROC_PER_NODE=0", "train.py"], "'0' is neither an integer of at least 1, nor auto"),
        (["PET_NNODES=x", "train.py"], "'x' is not a number of machines"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1", "train.py"], "--node-rank 2 does not exist"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(run, script, monkeypatch, arguments, words):
    if "=" in arguments[0]:
        monkeypatch.setenv(*arguments[0].split("="))
        arguments = arguments[1:]
    script("number = 5\ndef main(rank):\n    print('ran')")
    code, output, errors = run(*arguments)
    assert code == 2
    assert output == ""
    assert "Traceback" not in errors
    assert re.search(words, errors)
    assert "unisono run --help" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "t.py"], "'0' is not an integer of at least 1, nor auto, gpu or cpu"),
        (["-np", "2", "t.py"], "there is no option -np; write -n 2"),
        (["--nproc_per_nod", "2", "t.py"], "usage: unisono"),
        (["--nnodes", "2:1", "t.py"], "'2:1' is not a number of machines"),
        (["--timeout", "nan", "t.py"], "'nan' is not a positive number"),
        (["--log-ranks", "0,x", "t.py"], "'x' is not an integer of at least 0"),
        (["--rdzv-conf", "last_call_timeout", "t.py"], "'last_call_timeout' is not a list like"),
        ([], "the following arguments are required: target"),
    ],
)
def test_a_malformed_option_is_refused_by_name(run, arguments, words):
    code, _, errors = run(*arguments)
    assert code == 2
    assert words in errors


# The command itself.


def test_help_and_version_need_no_torch():
    code = "import sys\nfrom unisono.cli.main import main\ntry: main(sys.argv[1:])\n"
    code += "finally: assert 'torch' not in sys.modules"
    for arguments, words in [(["--help"], "doctor"), (["run", "--help"], "examples:"), (["--version"], "unisono ")]:
        found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stderr) == (0, "")
        assert words in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-n", "2", "--logdir", "logs", "train.py"], "there is no option --logdir; is it --log-dir?"),
        (["report", "--tracefile"], "there is no option --tracefile; is it --trace?"),
        (["doctor", "--zzz"], "there is no option --zzz\n"),
    ],
)
def test_an_option_that_does_not_exist_is_named_with_the_one_that_is_meant(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert f"usage: unisono {arguments[0]}" in shown
