"""Two machines, as two network namespaces with a cable between: one is lost in mid-training, and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from agents import agent, close_ports, free_port, kill_all, pull_cable, two_ranks
from faults import SOON_S, Line, Script

from unisono.errors import UnisonoError
from unisono.launch import process_group
from unisono.launch.hosts.endpoint import address_towards, listening_address, serve_store
from unisono.launch.hosts.environment import RankPlace
from unisono.launch.process_group import _LOOPBACK as LOOPBACK

EPOCHS, SAMPLES = 2, 61

TRAINING = f"""
import json, os, sys
from pathlib import Path
import torch
import unisono
from faults import Line, stand_still

shared, host = Path(sys.argv[1]), os.environ["HOST"]
line, saved = Line(shared / "line"), shared / "checkpoint"
rank, size = unisono.rank(), unisono.world_size()

torch.manual_seed(0)
x = torch.randn({SAMPLES}, 3)
data = torch.utils.data.TensorDataset(torch.arange({SAMPLES}), x, x.sum(1, keepdim=True))
loader = unisono.DeviceLoader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True), split="global")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
ledger, num_steps = [], 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    ledger, num_steps = state["ledger"], state["num_steps"]
line.say("began", rank, size, num_steps, host, os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"])

def save():
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), loader=loader.state_dict(),
                 ledger=ledger, num_steps=num_steps)
    torch.save(state, shared / "part")
    os.replace(shared / "part", saved)

for epoch in range(loader.epoch, {EPOCHS}):
    for ids, inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        unisono.optimizer_step(optimizer)
        seen = unisono.all_gather_samples(ids, loader.valid_samples)
        ledger += [(epoch, index) for index in seen.tolist()]
        num_steps += 1
        if num_steps % 5 == 0 and rank == 0:
            save()
        first_time = num_steps == 12 and size == 2 and not (shared / "lost").exists()
        alone = num_steps == 19 and size == 1
        if (first_time and host == "2") or alone:
            line.say("stands", rank, size, num_steps)
            stand_still()
if rank == 0:
    (shared / "ledger").write_text(json.dumps(ledger))
"""


@pytest.mark.slow
def test_losing_and_regaining_a_machine_still_counts_each_sample_once(
    tmp_path: Path, networks: tuple[str, str]
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", "1:2"]
    command += ["--rdzv-insecure", "--rdzv-endpoint", "10.77.0.1:29400", str(tmp_path / "train.py"), str(tmp_path)]
    line = Line.at(tmp_path / "line")

    def host(number: int, attempt: str = "") -> Script:
        return agent(tmp_path / f"host{number}{attempt}", *command, network=networks[number - 1], HOST=str(number))

    with line.hearing() as ear, host(1) as first:
        with host(2) as second:
            began = [ear.hear()]
            while began[-1][2] == "1":  # until the second has joined, the first may train alone
                began.append(ear.hear())
            began.append(ear.hear())
            assert {(words[2], words[4], words[5], words[6]) for words in began[-2:]} == {
                ("2", "1", "eth0", "10.77.0.1"),
                ("2", "2", "eth0", "10.77.0.1"),
            }
            assert ear.hear()[0] == "stands"
            (tmp_path / "lost").touch()
            lost_at = time.monotonic()
            kill_all(second)
            assert ear.hear()[:4] == ["began", "0", "1", "10"]
            assert time.monotonic() - lost_at < SOON_S  # about 7; with torch's own settings 46
        assert ear.hear() == ["stands", "0", "1", "19"]
        with host(2, "-again") as again:
            assert sorted(ear.hear()[:4] for _ in range(2)) == [["began", "0", "2", "15"], ["began", "1", "2", "15"]]
            assert again.end()[0] == 0
        code, output, errors = first.end()
        assert code == 0, output + errors
        assert first.survivors() == [] == again.survivors()
    counts = Counter(tuple(entry) for entry in json.loads((tmp_path / "ledger").read_text()))
    assert counts == {(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)}


WAITING = """
import os, sys
from pathlib import Path
import torch, unisono
from faults import Line, stand_still
line, host = Line(Path(sys.argv[1])), os.environ["HOST"]
line.say("began", host, unisono.world_size(), unisono.current_world().restart_count)
unisono.barrier()
if unisono.world_size() == 2 and unisono.current_world().restart_count == 0:
    if host == "2":
        stand_still()
    line.say("waits")
    unisono.all_reduce(torch.ones(1))
line.say("done", host)
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_a_cut_off_machine_is_given_up_after_the_set_time_and_taken_back(
    tmp_path: Path, networks: tuple[str, str], nodes: str
) -> None:
    (tmp_path / "wait.py").write_text(WAITING)
    line = Line.at(tmp_path / "line")
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", nodes, "--rdzv-endpoint", "10.77.0.1:29400"]
    command += ["--rdzv-insecure", "--lost-after", "4", "--max-restarts", "1"]
    command += ["--rdzv-conf", "last_call_timeout=8", str(tmp_path / "wait.py"), str(line.path)]

    def host(number: int, attempt: str = "") -> Script:
        return agent(tmp_path / f"host{number}{attempt}", *command, network=networks[number - 1], HOST=str(number))

    with line.hearing() as ear, host(1) as first, host(2) as second:
        assert ear.hear_all(2) == [["began", "1", "2", "0"], ["began", "2", "2", "0"]]
        assert ear.hear() == ["waits"]
        pull_cable(networks[1])
        lost_at = time.monotonic()
        if nodes == "1:2":
            assert ear.hear() == ["began", "1", "1", "1"]
            assert ear.hear() == ["done", "1"]
        cut_off, _, its_errors = second.end()
        assert cut_off == 1, its_errors
        assert re.search(r"the machine that serves 10.77.0.1:29400 has been silent for ([4-9]|[12]\d) s", its_errors)
        assert "start it again when the link is back, and the whole run if the others have ended" in its_errors
        if nodes == "2":
            pull_cable(networks[1], "up")
            with host(2, "-again") as again:
                assert ear.hear_all(4)[:2] == [["began", "1", "2", "1"], ["began", "2", "2", "1"]]
                assert again.end()[0] == 0
        code, _, errors = first.end()
        assert time.monotonic() - lost_at < SOON_S  # the collective waits for half an hour
        assert code == 0, errors
        told = r"node 1 \(\S+\) has been silent for ([3-9]|[12]\d) s: it or its link is gone\n"
        if nodes == "2":
            told += r"waiting for the agent of that machine to be started again, for 600 s\n"
        assert re.search(told + r"\Z", errors)
        assert errors.startswith("without a secret, anyone who reaches 10.77.0.1:29400")
        assert errors.count("\n") == 1 + told.count("\\n")  # a restart with its cause, and no tracebacks
        assert first.survivors() == [] == second.survivors()


MESSAGES = """
import os, torch, torch.distributed as dist, unisono
from unisono.comm.shared_memory.process_group import SharedMemoryGroup
got = torch.zeros(1)
dist.send(torch.ones(1), 1) if unisono.rank() == 0 else dist.recv(got, 0)
total = unisono.all_reduce(torch.ones(1)).item()
print(os.uname().nodename, isinstance(dist.group.WORLD, SharedMemoryGroup), got.item(), total)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, True])  # whether the processes of one see those of the other
def test_two_networks_of_one_name_share_no_memory(tmp_path: Path, networks: tuple[str, str], is_apart: bool) -> None:
    (tmp_path / "train.py").write_text(MESSAGES)
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29400"]
    command += ["--rdzv-insecure", "--no-prefix", "--node-rank"]
    with (
        agent(tmp_path / "1", *command, "0", str(tmp_path / "train.py"), network=networks[0], is_apart=is_apart) as one,
        agent(tmp_path / "2", *command, "1", str(tmp_path / "train.py"), network=networks[1], is_apart=is_apart) as two,
    ):
        ends = [each.end() for each in (one, two)]
    name = os.uname().nodename
    assert [output for _, output, _ in ends] == [f"{name} False 0.0 2.0\n", f"{name} False 1.0 2.0\n"], ends


@pytest.mark.slow
def test_a_firewall_that_lets_only_the_rendezvous_pass_is_named_at_once(
    tmp_path: Path, networks: tuple[str, str]
) -> None:
    (tmp_path / "train.py").write_text(MESSAGES)
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29400"]
    command += ["--rdzv-insecure", str(tmp_path / "train.py")]
    for network in networks:
        close_ports(network, but=29400)
    with (
        agent(tmp_path / "1", *command, network=networks[0]) as one,
        agent(tmp_path / "2", *command, network=networks[1]) as two,
    ):
        for code, output, errors in (each.end() for each in (one, two)):  # the transport waits for minutes
            assert (code, output) == (1, ""), errors
            assert re.search(r"rank \d cannot reach rank \d at 10\.77\.0\.[12]:\d+ \(timed out\): besides", errors), (
                errors
            )
            assert (
                "besides the port of 10.77.0.1:29400, all ports from 1024 must be open between the machines\n" in errors
            )
        assert one.survivors() == [] == two.survivors()


def place_of(rank: int, size: int, port: int) -> RankPlace:
    """Each rank is a machine; here, all are on the loopback."""
    return RankPlace("a test", rank, size, 0, 1, rank, "127.0.0.1", port, store="start")


@pytest.mark.parametrize("closed", range(1, 4))
def test_a_rank_tries_its_place_on_each_other_machine(closed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    store = dist.HashStore()
    with contextlib.ExitStack() as stack:
        for rank in range(1, 4):
            open_port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            store.set(f"unisono/reach/{rank}", f"127.0.0.1 {free_port() if rank == closed else open_port}")
        with pytest.raises(UnisonoError, match=rf"rank 0 cannot reach rank {closed} at 127\.0\.0\.1:\d+ \(.*refused"):
            stack.enter_context(process_group._reached(place_of(0, 4, free_port()), store))


def test_no_rank_waits_for_one_whose_transport_has_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    store, port = dist.HashStore(), free_port()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "another")
    with process_group._reached(place_of(1, 2, port), store):
        pass
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    with process_group._reached(place_of(0, 2, port), store):
        assert store.get("unisono/reach/0").startswith(b"127.0.0.1 ")


ALONE = """
import unisono
from unisono.launch import process_group
process_group._SILENT_S = 0.1
unisono.join_world(timeout=1, backend="cpu")
"""


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["", "secret" * 10], ids=["no secret", "a secret"])
def test_a_rank_that_waits_for_others_to_come_says_for_which(secret: str, tmp_path: Path) -> None:
    shared = {"UNISONO_RDZV_SECRET": secret}
    shared |= {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with Script(ALONE, tmp_path, RANK="0", MASTER_PORT=(port := str(free_port())), **shared) as script:
        code, _, errors = script.end()
    assert code == 1
    assert errors.count("does it run") == 1
    line = f"rank 0 waits at 127.0.0.1:{port} for ranks [1, 2], after 0.1 s still: does it run, and reach that address?"
    assert line in errors
    assert "rank 0 of 3, announced by the variables RANK, WORLD_SIZE and LOCAL_RANK, could not meet its peers" in errors


# The store: where it listens, and what is not printed when its server is gone.


OTHER = "192.0.2.7"  # nobody has it
LONG = timedelta(seconds=60)


@pytest.mark.parametrize(
    ("host", "addresses", "is_alone", "expected"),
    [
        ("node1", ["127.0.0.1"], True, "127.0.0.1"),
        ("node1", ["::1", "127.0.0.1"], True, "::1"),
        ("node1", ["127.0.0.1"], False, ""),  # a machine's own idea of its name
        ("node1", [OTHER], False, ""),  # of a service before this machine, say
        ("node1", [], True, ""),
        ("::1", ["::1"], False, "::1"),  # a literal address, if it is here
        (OTHER, [OTHER], False, ""),
    ],
)
def test_a_store_listens_where_the_others_come_as_far_as_that_is_known(host, addresses, is_alone, expected):
    assert listening_address(host, addresses, is_alone) == expected


def reaches(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), 1):
            return True
    except OSError:
        return False


def test_a_store_is_not_reached_from_other_networks_of_its_machine():
    outward = address_towards(OTHER, 1)
    if outward is None:
        pytest.skip("this machine has one network only")
    port = free_port()
    local = serve_store("127.0.0.1", port, LONG, is_alone=True)
    local.set("key", "value")
    assert reaches("127.0.0.1", port)
    assert not reaches(outward, port)
    for host, other in [(outward, "127.0.0.1"), ("127.0.0.1", outward)]:
        port = free_port()
        store = serve_store(host, port, LONG)
        assert not store.check(["key"])
        assert reaches(host, port)
        assert not reaches(other, port)


LISTENING = """
import psutil, unisono
unisono.join_world(backend="cpu", process_group="gloo")
unisono.barrier()
print({each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"})
unisono.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("endpoint", "named"), [("outward", ""), ("outward", LOOPBACK), ("loopback", "")])
def test_gloo_listens_at_the_named_interface_or_the_one_to_the_endpoint(
    endpoint: str, named: str, tmp_path: Path
) -> None:
    outward = address_towards(OTHER, 1)
    if outward is None:
        pytest.skip("this machine has one network only")
    address = outward if endpoint == "outward" else "127.0.0.1"
    at = "127.0.0.1" if named else address
    with two_ranks(
        LISTENING, tmp_path, MASTER_ADDR=address, **({"GLOO_SOCKET_IFNAME": named} if named else {})
    ) as scripts:
        ends = [each.end() for each in scripts]
    assert [eval(output) for _, output, _ in ends] == [{address, at}, {at}], ends  # and the store, at rank 0


JOINING = """
import os, unisono
world = unisono.join_world(backend="cpu")
unisono.barrier()
if world.rank == 0:
    os.kill(os.getpid(), 9)
unisono.barrier()
"""


@pytest.mark.slow
def test_the_first_cause_is_not_drowned_in_stacks_of_native_code(tmp_path):
    with two_ranks(JOINING, tmp_path) as (first, second):
        assert first.end()[0] == -9
        code, _, errors = second.end()
        assert code == 1
        assert "BrokenWorldError: rank 1 cannot complete barrier(): rank 0 did not arrive: rank 0 has ended" in errors
        assert "Exception raised from" not in errors
        assert "frame #" not in errors
