"""Torch's agent with a group of ours: what its settings mend, how failures are told, that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from agents import agent, free_port, kill_all
from faults import SOON_S, Script

from unisono.cli.main import main
from unisono.errors import BrokenWorldError
from unisono.launch.hosts import endpoint as endpoints
from unisono.launch.hosts.agent import MachineOptions, rendezvous_settings
from unisono.launch.hosts.endpoint import (
    address_towards,
    interface_of,
    is_this_machine,
    local_address,
    serves_endpoint,
    split_endpoint,
    wait_served,
)
from unisono.launch.hosts.other_machines import MachineReport, OtherMachines, _AgentRound
from unisono.outcome import Outcome
from unisono.report.run import read_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's"),
    pytest.mark.slow,  # all of them together: each starts agents
]

OTHER = "192.0.2.7"  # nobody has it


# The endpoint.


def test_the_agent_whose_machine_the_endpoint_names_serves_it_unless_it_is_served_or_another_is_the_first(monkeypatch):
    port = free_port()
    own = [each.address for found in psutil.net_if_addrs().values() for each in found if each.family == socket.AF_INET]
    assert all(serves_endpoint(f"{host}:{port}") for host in ("127.0.0.1", "localhost", *own))
    assert not serves_endpoint(f"{OTHER}:29400")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not serves_endpoint(f"127.0.0.1:{server.getsockname()[1]}")
    assert [serves_endpoint(f"localhost:{port}", node_rank=number) for number in range(2)] == [True, False]
    monkeypatch.setattr(endpoints, "addresses_of", lambda host: [])
    assert [serves_endpoint("pod-0.not-yet-known:29400", node_rank=number) for number in range(2)] == [True, False]


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
    monkeypatch.setattr("unisono.launch.hosts.endpoint.addresses_of", lambda host: ["127.0.1.1"])
    assert local_address("node1:29400") == outward


@pytest.mark.parametrize("text", ["", "host", "host:", ":29400", "host:port", "host:0", "host:65536"])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match="is not an endpoint; pass host:port"):
        split_endpoint(text)


def test_an_endpoint_that_nobody_serves_is_an_error_that_says_so():
    with pytest.raises(TimeoutError, match=r"nothing listens at 127.0.0.1:\d+ after .*start the agent of that host"):
        wait_served(f"127.0.0.1:{free_port()}", 0.0)


# Settings.


def test_a_lost_machine_is_given_up_after_seconds_unless_told_otherwise():
    options = MachineOptions(1, 1, "127.0.0.1:29400", "test")
    assert rendezvous_settings(options) == {
        "is_host": "false",  # since it is served by this package
        "last_call_timeout": "2",
        "keep_alive_interval": "1",
        "keep_alive_max_attempt": "3",
        "read_timeout": "60",
    }
    told = MachineOptions(1, 1, "127.0.0.1:29400", "test", rdzv_conf={"last_call_timeout": "60", "is_host": "1"})
    changed = rendezvous_settings(told)
    assert (changed["last_call_timeout"], changed["is_host"]) == ("60", "false")


# One agent in this process.

MEMBER = """
import logging, os, sys, torch, unisono
world = unisono.current_world()
how = sys.argv[1:2]
logging.basicConfig(format="says %(message)s")
logging.error("hello")
print("has", sys.argv[1:], unisono.all_reduce(torch.ones(1)).item(), os.environ["GLOO_SOCKET_IFNAME"], __name__)
unisono.barrier()  # a rank that fails ends the others: they have said it by then
if world.rank == 1 and how == ["raise"]:
    raise LookupError("not here")
if world.rank == 1 and how == ["exit 7"]:
    sys.exit(7)
if world.rank == 1 and how == ["exit 0"]:
    os._exit(0)
if world.rank == 1 and how == ["kill"] and world.restart_count < int(sys.argv[2]):
    os.kill(os.getpid(), 9)
unisono.barrier()
print("it continued after", world.restart_count)
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

    def run(*argv: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        code = main([*agent_command("1", 2), *options, str(script), *argv])
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        return code, *capfd.readouterr()

    return run


def agent_command(nodes: str, workers: int = 1) -> list[str]:
    """One command for all machines of a run."""
    endpoint = f"127.0.0.1:{free_port()}"
    return ["run", "-n", str(workers), "--backend", "cpu", "--nnodes", nodes, "--rdzv-endpoint", endpoint]


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
    expected = [f"[rank {rank}] {words}" for rank in range(2) for words in (told, "it continued after 0")]
    assert sorted(output.splitlines()) == expected
    assert sorted(errors.splitlines()) == ["[rank 0] says hello", "[rank 1] says hello"]
    assert list(temporary_files.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "LookupError: not here"),
        ("exit 7", 7, "unisono: rank 1 ended by sys.exit(7)"),
        ("exit 0", 1, "exited with code 0 before fn returned"),
        ("kill", 137, "was killed by SIGKILL"),
    ],
)
def test_the_first_cause_is_told_and_its_code_is_the_run_s(run_member, how, code, words):
    found, _, errors = run_member(how, "9")
    assert found == code
    assert errors.count(words) == 1
    assert errors.count("rank 1 of 2, cpu:0, pid ") + errors.count("rank 1 of 2, cpu:1, pid ") == 1
    assert errors.count("Traceback") == (how == "raise")
    if how == "raise":
        assert 'member.py", line 10, in <module>' in errors
        assert "runpy" not in errors


def test_output_is_kept_and_shown_for_the_chosen_ranks(run_member, tmp_path):
    options = ("--log-dir", str(tmp_path / "logs"), "--log-ranks", "0", "--no-prefix")
    code, output, errors = run_member("raise", options=options)
    assert code == 1
    assert output.splitlines() == ["has ['raise'] 2.0 lo __main__"]
    assert "Traceback (most recent call last)" in errors  # of the hidden rank that failed
    kept = (tmp_path / "logs" / "latest" / "rank-1.stderr").read_text()
    assert "says hello" in kept
    assert "LookupError: not here" in kept


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
        command = [*agent_command("1", 2), "--grace", "1", str(tmp_path / "standing.py"), str(tmp_path / "line"), how]
        return agent(tmp_path / "agent", *command)

    return start


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_agent(tmp_path, standing, line, ear, signum):
    with standing() as script:
        assert [words[:2] for words in ear.hear_all(2)] == [["running", "0"], ["running", "1"]]
        assert len(script.living()) == 2 + 2 * 3  # the agent and its zygote; workers, loader workers, grandchildren
        script.kill(signum)
        began = time.monotonic()
        code, _, errors = script.end() if signum != signal.SIGKILL else (-9, "", "")
        assert script.survivors() == []
        assert time.monotonic() - began < 10
        assert code == {signal.SIGKILL: -9, signal.SIGINT: 130}[signum], errors
        assert script.leftovers() == []


HANDLING = """
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
def handling(tmp_path: Path) -> Callable[..., Script]:
    (tmp_path / "handling.py").write_text(HANDLING)

    def start(how: str, *more: str) -> Script:
        script = [str(tmp_path / "handling.py"), str(tmp_path / "line"), how]
        return agent(tmp_path / "agent", *agent_command("1", 2), *more, *script)

    return start


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_handle_a_stop_save_before_the_agent_ends(handling, line, ear, signum):
    with handling("continue") as script:
        assert [words[0] for words in ear.hear_all(2)] == ["running", "running"]
        script.kill(signum)
        assert ear.hear_all(4) == [["ends", "0"], ["ends", "1"], ["saves", "0"], ["saves", "1"]]
        code, _, errors = script.end()
        assert code == 143
        assert f"asked by {signum.name}, the workers stop at their next should_stop()" in errors
        assert script.survivors() == []


@pytest.mark.parametrize("how", ["stand", "fail"])
def test_an_agent_that_was_asked_ends_though_its_workers_do_not_end_well(handling, line, ear, how):
    with handling(how, "--max-restarts", "2", "--grace", "1") as script:
        assert {words[0] for words in ear.hear_all(2)} == {"running"}
        began = time.monotonic()
        script.kill(signal.SIGTERM)
        ended = script.end()
        assert ended[0] == 143, ended
        assert "asked by SIGTERM, the workers stop at their next should_stop()" in ended[2]
        assert time.monotonic() - began < 30
        assert script.survivors() == []


def test_agents_of_all_machines_end_together_when_one_is_asked_to_stop(tmp_path, line, ear):
    (tmp_path / "handling.py").write_text(HANDLING)
    command = [*agent_command("1:2"), "--max-restarts", "2", "--rdzv-conf", "last_call_timeout=10"]
    script = [str(tmp_path / "handling.py"), str(tmp_path / "line"), "continue"]
    one = agent(tmp_path / "one", *command, "--node-rank", "0", *script)
    two = agent(tmp_path / "two", *command, "--node-rank", "1", *script)
    with one, two:
        assert [words[:2] for words in ear.hear_all(2)] == [["running", "0"], ["running", "1"]]
        began = time.monotonic()
        two.kill(signal.SIGTERM)
        assert [words[0] for words in ear.hear_all(4)] == ["ends", "ends", "saves", "saves"]
        ended = [script.end() for script in (one, two)]
        assert [code for code, _, _ in ended] == [143, 143], ended
        assert time.monotonic() - began < 30
        with pytest.raises(AssertionError, match="nothing was said"):
            ear.hear(0.0)
        assert one.survivors() == [] == two.survivors()


def test_a_worker_that_handles_stops_is_ended_all_the_same_when_another_has_failed(handling, line, ear):
    with handling("stand") as script:
        told = ear.hear_all(2)
        began = time.monotonic()
        os.kill(int(told[1][2]), signal.SIGKILL)
        code, _, errors = script.end()
        assert time.monotonic() - began < 10  # the agent's own patience is 30 s
        assert code == 137
        assert "unisono: rank 1 (pid " in errors


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
    command = agent_command(nodes)
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


# What a run on several machines has as one on one machine has it: rank 0 on the first machine, rank 1 on the second.

WATCHED = """
import os, sys, torch, unisono
from pathlib import Path
from faults import Line, stand_still
rank, how = unisono.rank(), sys.argv[1]
print("from", rank, os.environ["HOST"])
if how == "raise" and rank == 1:
    raise LookupError("not here")
if how == "exit" and rank == 1:
    sys.exit(7)
if how == "stand" and rank == 1:
    stand_still()
if how == "alone" and rank == 1:
    for _ in unisono.DeviceLoader(torch.utils.data.DataLoader(range(40), batch_size=1), already_sharded=True):
        import time; time.sleep(0.2)  # longer than the limit in all: the subject of the test is time
if how == "early" and rank == 0:
    Line(Path(sys.argv[2])).say("ends")
    sys.exit()
if how == "early":
    Path(sys.argv[3]).read_text()  # of a pipe: waits until rank 0 ends
    raise LookupError("not here")
if how == "busy" and rank == 0:
    Line(Path(sys.argv[2])).say("stands")
    stand_still()
if how == "busy" and rank == 1:
    Path(sys.argv[3]).read_text()  # of a pipe: waits until rank 0 stands
    raise LookupError("not here")
unisono.all_reduce(torch.ones(10))
"""


@pytest.fixture
def watched(tmp_path: Path) -> Callable[..., list[tuple[int, str, str]]]:
    """Run the script on two machines; what each ended with."""
    (tmp_path / "watched.py").write_text(WATCHED)

    def run(how: str, *options: str, argv: tuple[str, ...] = ()) -> list[tuple[int, str, str]]:
        command = [*agent_command("2"), *options, "--node-rank"]
        script = [str(tmp_path / "watched.py"), how, *argv]
        one = agent(tmp_path / "one", *command, "0", *script, HOST="one")
        two = agent(tmp_path / "two", *command, "1", *script, HOST="two")
        with one, two:
            ended = [each.end() for each in (one, two)]
            assert one.survivors() == [] == two.survivors()
            assert one.leftovers() == [] == two.leftovers()
        return ended

    return run


def test_a_hang_names_the_stuck_rank_and_ends_both_machines_which_keep_the_files_of_the_run_together(watched, tmp_path):
    began = time.monotonic()
    ended = watched("stand", "--log-dir", str(tmp_path / "logs"), "--hang-timeout", "3")
    for rank, (code, output, errors) in enumerate(ended):
        assert code == 1, errors
        assert output.startswith(f"[rank {rank}] from {rank}")
        assert "unisono: no rank has made progress for 3 s, and rank 1 is late: rank 1 is in" in errors
        assert 'watched.py", line 12' in errors
        assert "rank 0 waits in all_reduce(float32[10], 'sum')" in errors
        stacks = errors[errors.index("rank 0:\n") :]
        assert stacks.index("in all_reduce") < stacks.index("rank 1:\n") < stacks.index("in stand_still")
    assert time.monotonic() - began < SOON_S  # the collective waits for half an hour
    (directory,) = [path for path in (tmp_path / "logs").iterdir() if not path.is_symlink()]
    for rank, name in enumerate(("one", "two")):
        assert (directory / f"rank-{rank}.stdout").read_text() == f"from {rank} {name}\n"
        errors = (directory / f"rank-{rank}.stderr").read_text()  # killed, or woken by the end of the other
        assert "WorkerDiedError" in errors or "BrokenWorldError" in errors
    assert [each.rank for each in read_run(tmp_path / "logs").ranks] == [0, 1]


def test_a_rank_that_makes_progress_alone_on_another_machine_is_no_hang(watched):
    assert [code for code, _, _ in watched("alone", "--hang-timeout", "4")] == [0, 0]


def test_the_first_cause_comes_to_the_other_machine_in_its_own_words(watched):
    for code, _, errors in watched("raise"):
        assert code == 1, errors
        assert "LookupError: not here" in errors
        assert "BrokenWorldError" not in errors
        assert errors.count("Traceback") == 1


@pytest.mark.parametrize(("how", "word"), [("busy", "stands"), ("early", "ends")])
def test_a_machine_whose_ranks_wait_for_nobody_ends_when_another_fails_for_good(
    watched, line, ear, tmp_path, how, word
):
    os.mkfifo(tmp_path / "told")

    def tell() -> None:
        assert ear.hear() == [word]
        (tmp_path / "told").write_text("so it does")

    teller = threading.Thread(target=tell)
    teller.start()
    began = time.monotonic()
    for code, _, errors in watched(how, argv=(str(line.path), str(tmp_path / "told"))):
        assert code == 1, errors
        assert "LookupError: not here" in errors
    teller.join()
    assert time.monotonic() - began < SOON_S


def test_a_machine_says_why_others_have_failed_those_first_that_are_no_victims():
    others = OtherMachines("127.0.0.1:1", 60.0, lambda word: None, lambda text: None, lambda text: None)
    cause, victim = Outcome.failure(ValueError("bad")), Outcome.failure(BrokenWorldError("rank 0 failed"))
    words = [
        MachineReport(1, "b", is_leaving=True),
        MachineReport(2, "c", verdict=victim.to_bytes()),
        MachineReport(3, verdict=cause.to_bytes()),
    ]
    others._round = _AgentRound("name", 5, MachineReport(0), {word.machine: (word, 0.0) for word in words})
    assert [str(each.error) for each in others.failures()] == ["bad", "node 1 (b) has left the run", "rank 0 failed"]
    assert not others.are_done()
    others._round.heard = {
        number: (MachineReport(number, is_done=True, is_leaving=True), 0.0) for number in range(1, 5)
    }
    assert others.failures() == []
    assert others.are_done()


def test_the_first_exit_code_is_that_of_each_machine(watched):
    for rank, (code, output, errors) in enumerate(watched("exit")):
        assert code == 7
        assert output == f"[rank {rank}] from {rank} {('one', 'two')[rank]}\n"
        assert "sys.exit(7)" in errors
        assert "BrokenWorldError" not in errors


def test_workers_of_several_machines_can_be_fresh_interpreters(watched):
    for rank, (code, output, errors) in enumerate(watched("well", "--start-method", "spawn")):
        assert code == 0, errors
        assert output == f"[rank {rank}] from {rank} {('one', 'two')[rank]}\n"
