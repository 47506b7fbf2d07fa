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
from agents import agent, free_port
from faults import SOON_S, Script, until

from unisono.cli.main import main
from unisono.launch.hosts import endpoint
from unisono.report.run import read_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's"),
    pytest.mark.slow,  # all of them together: each starts agents
]

OTHER = "192.0.2.7"  # nobody has it


# The endpoint.


def test_an_agent_serves_its_own_free_endpoint_unless_another_is_first(monkeypatch):
    port = free_port()
    own = [each.address for found in psutil.net_if_addrs().values() for each in found if each.family == socket.AF_INET]
    assert all(endpoint.serves_endpoint(f"{host}:{port}") for host in ("127.0.0.1", "localhost", *own))
    assert not endpoint.serves_endpoint(f"{OTHER}:29400")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not endpoint.serves_endpoint(f"127.0.0.1:{server.getsockname()[1]}")
    assert [endpoint.serves_endpoint(f"localhost:{port}", node_rank=number) for number in range(2)] == [True, False]
    monkeypatch.setattr(endpoint, "addresses_of", lambda host: [])
    assert [endpoint.serves_endpoint("pod-0.not-yet:29400", node_rank=number) for number in range(2)] == [True, False]


def test_an_address_is_the_one_on_the_way_to_the_endpoint():
    assert endpoint.address_towards("127.0.0.1", 29400) == "127.0.0.1"
    assert endpoint.interface_of("127.0.0.1") == "lo"
    assert endpoint.is_this_machine("127.0.0.1")
    assert not endpoint.is_this_machine(OTHER)
    assert endpoint.interface_of(OTHER) is None
    outward = endpoint.address_towards(OTHER, 1)
    assert outward is None or endpoint.interface_of(outward) is not None


def test_a_machine_named_by_a_loopback_address_tells_others_another_one(monkeypatch):
    outward = endpoint.address_towards(OTHER, 1)
    if outward is None:
        pytest.skip("this machine has no way out")
    monkeypatch.setattr(endpoint, "addresses_of", lambda host: ["127.0.1.1"])
    assert endpoint.address_towards("node1", 29400) == outward


@pytest.mark.parametrize("text", ["", "host", "host:", ":29400", "host:port", "host:0", "host:65536"])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match="is not an endpoint; pass host:port"):
        endpoint.split_endpoint(text)


def test_an_endpoint_that_nobody_serves_is_an_error_that_says_so():
    told = r"nothing listens at 127.0.0.1:\d+ after .* refused\); start the agent of that host"
    with pytest.raises(TimeoutError, match=told):
        endpoint.wait_served(f"127.0.0.1:{free_port()}", 0.0)


# One agent in this process.

MEMBER = """
import logging, os, sys, torch, unisono
world = unisono.current_world()
how = sys.argv[1:2]
logging.basicConfig(format="says %(message)s")
logging.error("hello")
print("has", sys.argv[1:], unisono.all_reduce(torch.ones(1)).item(), os.environ["GLOO_SOCKET_IFNAME"], __name__)
unisono.barrier()  # a rank that fails ends the others: they have said it by then
if world.rank == 1 and how == ["exit 0"]:
    os._exit(0)
if world.rank == 1 and how == ["kill"] and world.restart_count < int(sys.argv[2]):
    os.kill(os.getpid(), 9)
unisono.barrier()
print("it continued after", world.restart_count)
sys.exit(0)
"""


@pytest.fixture
def run_member(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    # torch names its callers by inspect.stack(), which asks each module that the tests have imported for its file: with
    # those that import others when they are asked, it takes minutes.
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name", lambda: "")
    script = tmp_path / "member.py"
    script.write_text(MEMBER)

    def run(*argv: str) -> tuple[int, str, str]:
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        code = main([*agent_command("1", 2), str(script), *argv])
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        return code, *capfd.readouterr()

    return run


def agent_command(nodes: str, workers: int = 1) -> list[str]:
    """One command for all machines of a run."""
    place = f"127.0.0.1:{free_port()}"
    return ["run", "-n", str(workers), "--backend", "cpu", "--nnodes", nodes, "--rdzv-endpoint", place]


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
        ("exit 0", 1, "exited with code 0 before fn returned"),
        ("kill", 137, "was killed by SIGKILL"),
    ],
)
def test_the_first_cause_is_told_and_its_code_is_the_run_s(run_member, how, code, words):
    found, _, errors = run_member(how, "9")
    assert found == code
    assert errors.count(words) == 1
    assert errors.count("rank 1 of 2, cpu:0, pid ") + errors.count("rank 1 of 2, cpu:1, pid ") == 1
    assert "Traceback" not in errors


# Agents in processes of their own.

STANDING = """
import os, sys
from pathlib import Path
import torch, unisono
from faults import Line, grandchild, stand_still
loader = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
next(iter(loader))
grandchild()
Line(Path(sys.argv[1])).say("running", unisono.rank(), os.getpid())
if unisono.rank() == 0:
    unisono.all_reduce(torch.ones(1))
stand_still()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_agent(tmp_path, line, ear, signum):
    (tmp_path / "standing.py").write_text(STANDING)
    command = [*agent_command("1", 2), "--grace", "1", str(tmp_path / "standing.py"), str(line.path)]
    with agent(tmp_path / "agent", *command) as script:
        assert [words[:2] for words in ear.hear_all(2)] == [["running", "0"], ["running", "1"]]
        assert len(script.living()) == 2 + 2 * 3  # the agent and its zygote; workers, loader workers, grandchildren
        script.kill(signum)
        began = time.monotonic()
        code, _, errors = script.end() if signum != signal.SIGKILL else (-9, "", "")
        assert script.survivors() == []
        assert time.monotonic() - began < SOON_S
        assert code == {signal.SIGKILL: -9, signal.SIGINT: 130}[signum], errors
        assert script.leftovers() == []


HANDLING = """
import os, sys
from pathlib import Path
import torch, unisono
from faults import Line, stand_still
from unisono.training.stopping import should_stop
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

    def start(how: str, *more: str, name: str = "agent", command: list[str] | None = None) -> Script:
        script = [str(tmp_path / "handling.py"), str(tmp_path / "line"), how]
        return agent(tmp_path / name, *(command or agent_command("1", 2)), *more, *script)

    return start


def test_workers_that_handle_a_stop_save_before_the_agent_ends(handling, line, ear):
    with handling("continue") as script:
        assert [words[0] for words in ear.hear_all(2)] == ["running", "running"]
        script.kill(signal.SIGINT)
        assert ear.hear_all(4) == [["ends", "0"], ["ends", "1"], ["saves", "0"], ["saves", "1"]]
        code, _, errors = script.end()
        assert code == 143
        assert "asked by SIGINT, the workers stop at their next should_stop()" in errors
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


def test_agents_of_all_machines_end_together_when_one_is_asked_to_stop(handling, line, ear):
    command = [*agent_command("1:2"), "--max-restarts", "2", "--rdzv-conf", "last_call_timeout=10"]
    one, two = (handling("continue", "--node-rank", rank, name=rank, command=command) for rank in ("0", "1"))
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


TRAINING = """
import json, os, sys
from pathlib import Path
import torch, unisono
from faults import Line

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
        if step == 2 and unisono.rank() == 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), 9)
    return [unisono.world_size(), model.weight.sum().item()]

results = unisono.spawn(train, ())
Line(Path(sys.argv[1])).say("done", unisono.rank(), unisono.current_world().node_rank, json.dumps(results))
"""


def test_two_agents_train_one_model_though_a_worker_dies_once(tmp_path, line, ear):
    (tmp_path / "training.py").write_text(TRAINING)
    command = [*agent_command("2"), "--max-restarts", "1"]
    script = [str(tmp_path / "training.py"), str(line.path)]
    one = agent(tmp_path / "one", *command, "--rdzv-conf", "is_host=true", *script)
    two = agent(tmp_path / "two", *command, "--rdzv-conf", "is_host=false", *script)
    with one, two:  # stale addresses of the first round would break the second
        ended = [script.end() for script in (one, two)]
        assert [code for code, _, _ in ended] == [0, 0], ended
        told = ear.hear_all(2)
        assert [words[:3] for words in told] == [["done", "0", "0"], ["done", "1", "1"]]
        results = [json.loads(" ".join(words[3:])) for words in told]
        assert results[0] == results[1]
        assert results[0][0] == results[0][1]
        assert results[0][0][0] == 2


def test_an_agent_of_another_run_is_refused_and_both_named_ways_out_work(tmp_path):
    (tmp_path / "meets.py").write_text("import torch, unisono\nprint(unisono.all_reduce(torch.ones(1)).item())\n")
    command, alone = agent_command("2"), agent_command("1")
    place, script = command[-1], str(tmp_path / "meets.py")
    with agent(tmp_path / "one", *command, "--rdzv-id", "one", script) as one:
        until(lambda: endpoint.is_served(*endpoint.split_endpoint(place)))
        with agent(tmp_path / "refused", *command, "--rdzv-id", "two", script) as refused:
            code, output, errors = refused.end()
        assert (code, output) == (1, ""), errors
        words = f"an agent of the run 'one' serves {place}, and this one belongs to the run 'two'; give the agents of "
        assert words + "one run the same --rdzv-id, and each run a port of its own, by --rdzv-endpoint\n" in errors
        with agent(tmp_path / "more", *command, "--nnodes", "3", "--rdzv-id", "one", script) as more:
            code, output, errors = more.end()
        words = f"an agent of the run 'one' at {place} has --nnodes 2, and this one 3; give all agents the same"
        assert (code, output, words in errors) == (1, "", True), errors
        with agent(tmp_path / "apart", *alone, "--rdzv-id", "two", script) as apart:
            assert apart.end() == (0, "[rank 0] 1.0\n", "")
        with agent(tmp_path / "joins", *command, "--rdzv-id", "one", script) as joins:
            ended = sorted((code, output) for code, output, _ in (each.end() for each in (one, joins)))
            assert ended == [(0, f"[rank {rank}] 2.0\n") for rank in (0, 1)]


def test_an_agent_that_the_others_do_not_join_says_who_came_and_ends(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name", lambda: "")
    monkeypatch.setattr("unisono.launch.hosts.rendezvous_state._MISSING_S", 0.2)
    (tmp_path / "meets.py").touch()
    command = agent_command("2")
    assert main([*command, "--rdzv-conf", "join_timeout=3", str(tmp_path / "meets.py")]) == 1
    came = f"1 of 2 machines came to {command[-1]} (127.0.0.1)"
    assert f"{came}, and this agent waits for the others: start the same command on each" in caplog.text
    assert f"unisono: {came} within 3 s; start the same command on each, in that time\n" in capfd.readouterr().err


def test_an_agent_ends_if_another_program_has_its_port(tmp_path):
    (tmp_path / "meets.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:  # it never answers
        place = f"127.0.0.1:{other.getsockname()[1]}"
        command = [*agent_command("2")[:-1], place, "--rdzv-conf", "join_timeout=1", str(tmp_path / "meets.py")]
        with agent(tmp_path / "one", *command) as one:
            code, output, errors = one.end()
            assert one.survivors() == []
    assert (code, output) == (1, "")
    assert f"what listens at {place} has not answered for 5 s; if it is no agent of this run, give the run " in errors


def test_a_run_that_is_started_twice_says_so(tmp_path):
    (tmp_path / "meets.py").write_text(
        "import sys, unisono\nfrom pathlib import Path\nfrom faults import until\nshared = Path(sys.argv[1])\n"
        "(shared / f'began-{unisono.rank()}').touch()\nuntil((shared / 'done').exists)\nprint('ran')\n"
    )
    command, script = agent_command("2"), [str(tmp_path / "meets.py"), str(tmp_path)]
    place = command[-1]
    alone = [*agent_command("1")[:-1], place]
    with agent(tmp_path / "one", *command, *script) as one, agent(tmp_path / "two", *command, *script) as two:
        until(lambda: len([*tmp_path.glob("began-?")]) == 2)
        with agent(tmp_path / "again", *alone, *script) as again:
            code, output, errors = again.end()
        assert (code, output) == (1, ""), errors
        words = f"serves {place} already, and this one has no other machines; give each run a port of its own, by "
        assert words + "--rdzv-endpoint: one that ends with :0 takes a free one" in errors
        (tmp_path / "apart.py").write_text("print('ran')\n")
        with agent(tmp_path / "apart", *alone[:-1], "127.0.0.1:0", str(tmp_path / "apart.py")) as apart:
            assert apart.end()[0] == 0
        with agent(tmp_path / "late", *command, *script) as late:
            until(lambda: late.process.stderr.data.endswith(b"\n"))
            told = late.process.stderr.data.decode()
            (tmp_path / "done").touch()
            code, output, errors = late.end()
            assert [each.end()[0] for each in (one, two)] == [0, 0]
    words = f" at {place} has its 2 machines (127.0.0.1, 127.0.0.1), and this agent is none of them"
    assert words + ": it joins if one of them is lost; if it is to be a run of its own, end it" in told
    assert (code, output) == (1, ""), errors
    assert words + "; that run is over, and nothing has run here" in errors


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
        import time; time.sleep(0.12)  # longer than the limit in all: the subject of the test is time
if how in ("early", "busy"):
    if rank == 1:
        Path(sys.argv[3]).read_text()  # of a pipe: waits until rank 0 ends, or stands
        raise LookupError("not here")
    Line(Path(sys.argv[2])).say(how)
    sys.exit() if how == "early" else stand_still()
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


def test_a_hang_names_the_stuck_rank_ends_both_machines_and_keeps_files(watched, tmp_path):
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
    assert [code for code, _, _ in watched("alone", "--hang-timeout", "3")] == [0, 0]


@pytest.mark.parametrize(("how", "end", "words"), [("raise", 1, "LookupError: not here"), ("exit", 7, "sys.exit(7)")])
def test_the_other_machine_gets_the_first_cause_verbatim_with_its_code(watched, how, end, words):
    for code, _, errors in watched(how):
        assert code == end, errors
        assert words in errors
        assert "BrokenWorldError" not in errors
        assert errors.count("Traceback") == errors.count('watched.py", line 8, in <module>') == (how == "raise")
        assert "runpy" not in errors


@pytest.mark.parametrize("how", ["busy", "early"])
def test_a_machine_whose_ranks_wait_for_nobody_ends_when_another_fails(watched, line, ear, tmp_path, how):
    os.mkfifo(tmp_path / "told")

    told_at: list[float] = []

    def tell() -> None:
        assert ear.hear() == [how]
        (tmp_path / "told").write_text("so it does")
        told_at.append(time.monotonic())

    teller = threading.Thread(target=tell)
    teller.start()
    for code, _, errors in watched(how, argv=(str(line.path), str(tmp_path / "told"))):
        assert code == 1, errors
        assert "LookupError: not here" in errors
    teller.join()
    assert time.monotonic() - told_at[0] < SOON_S


def test_workers_of_several_machines_can_be_fresh_interpreters(watched):
    for rank, (code, output, errors) in enumerate(watched("well", "--start-method", "spawn")):
        assert code == 0, errors
        assert output == f"[rank {rank}] from {rank} {('one', 'two')[rank]}\n"
