"""Torch's agent as it is started here: what its settings mend, how failures are told, that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from agents import agent, free_port, kill_all
from faults import Ear, Script
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from unisono.launch.hosts import endpoint as endpoints
from unisono.launch.hosts.addresses import address_towards, interface_of, is_this_machine
from unisono.launch.hosts.elastic import ElasticOptions, rendezvous_settings, root_cause, run_elastic
from unisono.launch.hosts.endpoint import local_address, serves_endpoint, split_endpoint, wait_served
from unisono.launch.hosts.failure_file import Failure, write_failure
from unisono.launch.target import Target

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's"),
    pytest.mark.slow,  # all of them together: each starts agents
]

OTHER = "192.0.2.7"  # nobody has it


# The endpoint.


def test_the_agent_whose_machine_the_endpoint_names_serves_it():
    assert serves_endpoint(f"127.0.0.1:{free_port()}")
    assert serves_endpoint(f"localhost:{free_port()}")
    for found in psutil.net_if_addrs().values():
        for each in found:
            if each.family == socket.AF_INET:
                assert serves_endpoint(f"{each.address}:{free_port()}")
    assert not serves_endpoint(f"{OTHER}:29400")


def test_a_second_agent_of_a_machine_does_not_serve_what_is_served():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not serves_endpoint(f"127.0.0.1:{server.getsockname()[1]}")


def test_where_machines_are_numbered_only_the_first_serves(monkeypatch):
    port = free_port()
    assert serves_endpoint(f"localhost:{port}", node_rank=0)
    assert not serves_endpoint(f"localhost:{port}", node_rank=1)
    monkeypatch.setattr(endpoints, "addresses_of", lambda host: [])
    assert serves_endpoint("pod-0.not-yet-known:29400", node_rank=0)
    assert not serves_endpoint("pod-0.not-yet-known:29400", node_rank=1)


def test_an_address_is_the_one_on_the_way_to_the_endpoint():
    assert local_address("127.0.0.1:29400") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine(OTHER)
    assert interface_of(OTHER) is None
    outward = address_towards(OTHER, 1)
    assert outward is None or interface_of(outward) is not None


def test_a_machine_that_knows_its_name_as_a_loopback_address_tells_others_another(monkeypatch):
    outward = address_towards(OTHER, 1)
    if outward is None:
        pytest.skip("this machine has no way out")
    monkeypatch.setattr("unisono.launch.hosts.addresses.addresses_of", lambda host: ["127.0.1.1"])
    assert local_address("node1:29400") == outward


@pytest.mark.parametrize("text", ["", "host", "host:", ":29400", "host:port", "host:0", "host:65536"])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match="is no endpoint; pass host:port"):
        split_endpoint(text)


def test_endpoints_are_taken_apart():
    assert split_endpoint("node1:29400") == ("node1", 29400)
    assert split_endpoint("[fe80::1]:1") == ("fe80::1", 1)


def test_an_endpoint_that_nobody_serves_is_an_error_that_says_so():
    with pytest.raises(TimeoutError, match=r"nothing listens at 127.0.0.1:\d+ after .*start the agent of that host"):
        wait_served(f"127.0.0.1:{free_port()}", 0.0)


# Settings.


def options(**changes: object) -> ElasticOptions:
    given = {"nproc": 2, "min_nodes": 1, "max_nodes": 1, "endpoint": f"127.0.0.1:{free_port()}", "run_id": "test"}
    return ElasticOptions(**{**given, "backend": "cpu", **changes})  # type: ignore[arg-type]


def test_a_lost_machine_is_given_up_after_seconds_unless_told_otherwise():
    assert rendezvous_settings(options()) == {
        "is_host": "false",  # since it is served by this package
        "last_call_timeout": "2",
        "keep_alive_interval": "1",
        "keep_alive_max_attempt": "3",
        "read_timeout": "60",
    }
    changed = rendezvous_settings(options(rdzv_conf={"last_call_timeout": "60", "is_host": "1"}))
    assert (changed["last_call_timeout"], changed["is_host"]) == ("60", "false")


# The first cause.


def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure) -> ProcessFailure:
    path = tmp_path / f"error-{failure.rank}.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_failure(failure)
    return ProcessFailure(local_rank=0, pid=1, exitcode=failure.exit_code, error_file=str(path))


def test_the_first_failure_that_follows_from_no_other_is_the_cause(tmp_path, monkeypatch):
    follows = Failure(0, 0, 0, 10, "BrokenWorldError", is_secondary=True, at=1.0)
    late, early = Failure(1, 0, 0, 11, "late", at=3.0), Failure(2, 0, 0, 12, "early", at=2.0)
    failures = {each.rank: left(tmp_path, monkeypatch, each) for each in (follows, late, early)}
    assert root_cause(failures) == early
    assert root_cause({0: failures[0]}) == follows
    silent = ProcessFailure(local_rank=0, pid=4, exitcode=-9, error_file="")
    assert root_cause({3: silent, 0: failures[0]}).message == "was killed by SIGKILL"


def test_a_failure_that_was_left_first_stays_and_torch_reads_it(tmp_path, monkeypatch):
    found = left(tmp_path, monkeypatch, Failure(1, 0, 0, 5, "ValueError: bad", "Traceback of it"))
    write_failure(Failure(1, 0, 0, 5, "was killed by SIGTERM"))
    assert found.message["extraInfo"]["py_callstack"] == "Traceback of it"  # type: ignore[index]
    assert "bad" in Path(found.error_file).read_text()


# One agent in this process.

MEMBER = """
import logging, os, sys, torch, unisono
world = unisono.current_world()
how = sys.argv[1:2]
logging.basicConfig(format="%(rank)s says %(message)s")
logging.error("hello")
print("has", sys.argv[1:], unisono.all_reduce(torch.ones(1)).item(), os.environ["GLOO_SOCKET_IFNAME"], __name__)
if world.rank == 1 and how == ["raise"]:
    raise LookupError("not here")
if world.rank == 1 and how == ["exit 7"]:
    sys.exit(7)
if world.rank == 1 and how == ["exit 0"]:
    os._exit(0)
if world.rank == 1 and how == ["kill"] and world.restart_count < int(sys.argv[2]):
    os.kill(os.getpid(), 9)
unisono.barrier()
print("went on after", world.restart_count)
sys.exit(0)
"""


@pytest.fixture(scope="module", autouse=True)
def warm_store() -> None:
    """The first store of a process opens a pipe that its library keeps for signals."""
    dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def run_member(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)

    def run(*argv: str, **changes: object) -> tuple[int, str, str]:
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        code = run_elastic(options(**changes), Target(str(script), argv))
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        return code, *capfd.readouterr()

    return run


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def test_a_script_runs_as_each_rank_and_leaves_nothing_behind(run_member, temporary_files):
    code, output, errors = run_member("$HOME", "$$", "${local_rank}")
    assert code == 0
    told = "has ['$HOME', '$$', '${local_rank}'] 2.0 lo __main__"
    expected = [f"[rank {rank}] {words}" for rank in range(2) for words in (told, "went on after 0")]
    assert sorted(output.splitlines()) == expected
    assert sorted(errors.splitlines()) == ["[rank 0] 0 says hello", "[rank 1] 1 says hello"]
    assert list(temporary_files.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "LookupError: not here"),
        ("exit 7", 7, "sys.exit(7)"),
        ("exit 0", 1, "exited with code 0 before the end of the script"),
        ("kill", 137, "was killed by SIGKILL"),
    ],
)
def test_the_first_cause_is_told_and_its_code_is_the_run_s(run_member, how, code, words):
    found, _, errors = run_member(how, "9")
    assert found == code
    assert errors.count("unisono: failed: rank 1, node 0, pid ") == 1
    assert f"restart 0: {words}\n" in errors
    assert "ranks [0] of this machine were stopped because of it, or followed" in errors
    if how == "raise":
        assert errors.count("[rank 1] Traceback") == 1
        assert 'member.py", line 9, in <module>' in errors
        assert "runpy" not in errors


def test_workers_that_die_again_and_again_are_started_anew_each_time(run_member):
    code, output, errors = run_member("kill", "2", max_restarts=2)  # a stale address would break any of them
    assert code == 0
    assert sorted(output.splitlines())[-1] == "[rank 1] went on after 2"
    assert errors.count("was killed by SIGKILL") == 2


def test_output_is_kept_and_shown_for_the_chosen_ranks(run_member, tmp_path):
    code, output, errors = run_member("raise", log_dir=str(tmp_path / "logs"), log_ranks=(0,), prefix=False)
    assert code == 1
    assert output.splitlines() == ["has ['raise'] 2.0 lo __main__"]
    assert "1 says hello" not in errors
    assert "Traceback (most recent call last)" in errors  # of the hidden rank that failed: in the report
    [kept] = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert f"its output is in {kept.parent}" in errors
    assert "LookupError: not here" in kept.read_text()
    assert "1 says hello" in kept.read_text()


# Agents in processes of their own.

STANDING = """
import os, signal, sys
from pathlib import Path
import torch, unisono
from faults import Line, grandchild, stand_still
loader = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
next(iter(loader))
grandchild()
if sys.argv[2] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Line(Path(sys.argv[1])).say("running", unisono.rank(), os.getpid())
if unisono.rank() == 0:
    unisono.all_reduce(torch.ones(1))
stand_still()
"""


@pytest.fixture
def standing(tmp_path: Path) -> Callable[..., Script]:
    (tmp_path / "standing.py").write_text(STANDING)

    def start(how: str = "die") -> Script:
        command = ["run", "-n", "2", "--backend", "cpu", "--nnodes", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        command += ["--grace", "1", str(tmp_path / "standing.py"), str(tmp_path / "line"), how]
        return agent(tmp_path / "agent", *command)

    return start


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_the_agent(tmp_path, standing, line, ear, signum):
    with standing() as script:
        assert [words[:2] for words in ear.hear_all(2)] == [["running", "0"], ["running", "1"]]
        assert len(script.living()) == 1 + 2 * 4  # the agent; guards, workers, loader workers, grandchildren
        script.kill(signum)
        began = time.monotonic()
        code, _, errors = script.end() if signum != signal.SIGKILL else (-9, "", "")
        assert script.survivors() == []
        assert time.monotonic() - began < 10
        assert code == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[signum], errors
        assert script.leftovers() == []


def test_a_worker_that_ignores_its_end_is_killed_after_the_grace_with_all_it_has_started(standing, line, ear):
    with standing("ignore") as script:
        assert len(ear.hear_all(2)) == 2
        script.kill(signal.SIGTERM)
        code, _, errors = script.end()
        assert code == 143, errors
        assert script.survivors(0.5) == []


def test_nothing_of_a_killed_worker_survives_it(standing, line, ear):
    with standing() as script:
        told = ear.hear_all(2)
        os.kill(int(told[1][2]), signal.SIGKILL)
        code, _, errors = script.end()
        assert code == 137
        assert "unisono: failed: rank 1, node 0" in errors
        assert script.survivors(0.0) == []


HEEDING = """
import os, sys
from pathlib import Path
import torch, unisono
from faults import Line, stand_still
from unisono.parallel.stopping import should_stop
should_stop()
loader = torch.utils.data.DataLoader(range(10**9), num_workers=1)
line = Line(Path(sys.argv[1]))
line.say("running", unisono.rank(), os.getpid(), unisono.current_world().restart_count)
for step, batch in enumerate(loader):
    if should_stop():
        line.say("saves", unisono.rank())
        break
    if sys.argv[2] == "stand" and unisono.rank() == 0:
        stand_still()
if sys.argv[2] == "fail" and unisono.rank() == 1:
    raise OSError("no space to save")
line.say("ends", unisono.rank())
"""


@pytest.fixture
def heeding(tmp_path: Path) -> Callable[..., Script]:
    (tmp_path / "heeding.py").write_text(HEEDING)

    def start(how: str, *more: str) -> Script:
        command = ["run", "-n", "2", "--backend", "cpu", "--nnodes", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        return agent(tmp_path / "agent", *command, *more, str(tmp_path / "heeding.py"), str(tmp_path / "line"), how)

    return start


def test_workers_that_heed_a_stop_save_before_the_agent_ends(heeding, line, ear):
    with heeding("go on") as script:
        assert [words[0] for words in ear.hear_all(2)] == ["running", "running"]
        script.kill(signal.SIGTERM)
        assert ear.hear_all(4) == [["ends", "0"], ["ends", "1"], ["saves", "0"], ["saves", "1"]]
        assert script.end()[0] == 143
        assert script.survivors() == []


def is_silent(ear: Ear) -> bool:
    try:
        ear.hear(0.0)
    except AssertionError:
        return True
    return False


def test_an_agreed_stop_is_not_taken_for_a_failure(heeding, line, ear):
    with heeding("go on", "--max-restarts", "2") as script:
        told = ear.hear_all(2)
        os.kill(int(told[1][2]), signal.SIGTERM)  # to one worker
        assert [words[0] for words in ear.hear_all(4)] == ["ends", "ends", "saves", "saves"]
        code, _, errors = script.end()
        assert code == 143
        assert "unisono: the ranks stopped early, as they were asked to" in errors
        assert is_silent(ear)


@pytest.mark.parametrize("how", ["stand", "fail"])
def test_an_agent_that_was_asked_ends_though_its_workers_do_not_end_well(heeding, line, ear, how):
    with heeding(how, "--max-restarts", "2", "--grace", "1") as script:
        assert {words[0] for words in ear.hear_all(2)} == {"running"}
        began = time.monotonic()
        script.kill(signal.SIGTERM)
        ended = script.end()
        assert ended[0] == 143, ended
        assert time.monotonic() - began < 15
        assert script.survivors() == []


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_agents_of_all_machines_end_together_when_one_is_asked_to_stop(tmp_path, line, ear, nodes):
    (tmp_path / "heeding.py").write_text(HEEDING)
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", nodes, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--max-restarts", "2", "--rdzv-conf", "last_call_timeout=10"]
    script = [str(tmp_path / "heeding.py"), str(tmp_path / "line"), "go on"]
    one = agent(tmp_path / "one", *command, "--node-rank", "0", *script)
    two = agent(tmp_path / "two", *command, "--node-rank", "1", *script)
    with one, two:
        assert [words[:2] for words in ear.hear_all(2)] == [["running", "0"], ["running", "1"]]
        began = time.monotonic()
        two.kill(signal.SIGTERM)
        assert [words[0] for words in ear.hear_all(4)] == ["ends", "ends", "saves", "saves"]
        ended = [script.end() for script in (one, two)]
        assert [code for code, _, _ in ended] == [143, 143], ended
        assert time.monotonic() - began < 15
        assert is_silent(ear)
        assert one.survivors() == [] == two.survivors()


def test_a_worker_that_heeds_stops_is_ended_all_the_same_when_another_has_failed(heeding, line, ear):
    with heeding("stand") as script:
        told = ear.hear_all(2)
        began = time.monotonic()
        os.kill(int(told[1][2]), signal.SIGKILL)
        code, _, errors = script.end()
        assert time.monotonic() - began < 10  # the agent's own patience is 30 s
        assert code == 137
        assert "failed: rank 1, node 0" in errors


TRAINING = """
import json, os, sys
from pathlib import Path
import torch, unisono
from faults import Line, stand_still

def train(index):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, 3))
    loader = unisono.DeviceLoader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True), split="global")
    for step, (x,) in enumerate(loader):
        model(x).square().mean().backward()
        unisono.optimizer_step(optimizer)
        optimizer.zero_grad()
        if step == 2 and unisono.world_size() == 2 and os.environ["HOST"] == sys.argv[2]:
            Line(Path(sys.argv[1])).say("stands", index)
            stand_still()  # and the other waits in its next step
        if step == 2 and sys.argv[2] == "die" and os.environ["HOST"] == "two" and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), 9)
    return [unisono.world_size(), model.weight.sum().item()]

from unisono.backends import pick_backend
from unisono import spawn
from datetime import timedelta
results = spawn(train, ())
Line(Path(sys.argv[1])).say("done", unisono.rank(), unisono.current_world().node_rank, json.dumps(results))
"""


def two_agents(tmp_path: Path, nodes: str, standing: str) -> tuple[Script, Script]:
    """The first serves the endpoint."""
    (tmp_path / "training.py").write_text(TRAINING)
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", nodes, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    script = [str(tmp_path / "training.py"), str(tmp_path / "line"), standing]
    command += ["--max-restarts", "1"]
    one = agent(tmp_path / "one", *command, "--rdzv-conf", "is_host=true", *script, HOST="one")
    return one, agent(tmp_path / "two", *command, "--rdzv-conf", "is_host=false", *script, HOST="two")


def test_two_agents_train_one_model_though_a_worker_dies_once(tmp_path, line, ear):
    one, two = two_agents(tmp_path, "2", "die")  # stale addresses of the first round would break the second
    with one, two:
        ended = [script.end() for script in (one, two)]
        assert [code for code, _, _ in ended] == [0, 0], ended
        told = ear.hear_all(2)
        assert [words[:3] for words in told] == [["done", "0", "0"], ["done", "1", "1"]]
        results = [json.loads(" ".join(words[3:])) for words in told]
        assert results[0] == results[1]
        assert results[0][0] == results[0][1]
        assert results[0][0][0] == 2


def test_training_goes_on_with_one_agent_when_the_other_is_killed(tmp_path, line, ear):
    one, two = two_agents(tmp_path, "1:2", "two")
    with one, two:
        assert ear.hear()[0] == "stands"
        kill_all(two)
        words = ear.hear()
        assert words[:3] == ["done", "0", "0"]
        assert json.loads(" ".join(words[3:]))[0][0] == 1
        assert one.end()[0] == 0
        assert one.survivors() == [] == two.survivors()
