"""Snapshots of a run on two machines: workers and agents are killed, machines are lost, and join.

Each machine is an agent with an address of its own on the loopback. Those of the second come first in the order of
ranks, and the first serves the endpoint: so the machine that is killed has rank zero.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import snapshot_kills
import warm_scripts
from agents import agent, free_port, kill_all, pull_cable
from faults import Ear, Line, Script
from snapshot_kills import Plan, Run, undisturbed

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the memory of snapshots is Linux's"),
    pytest.mark.slow,
]

TRAINING = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from faults import Line, stand_still
from snapshot_kills import BATCH, EPOCHS, VIRTUAL, Rows
from unisono import Accelerator
from unisono.strategies import FSDP

shared, is_virtual, stands = Path(sys.argv[1]), sys.argv[3] == "virtual", eval(sys.argv[4])
strategy = FSDP(replicas=2) if sys.argv[2] == "replicas" else sys.argv[2]
line, host = Line(shared / "line"), os.environ["HOST"]
accelerator = Accelerator(
    seed=3, strategy=strategy, virtual_ranks=VIRTUAL if is_virtual else None, project_dir=shared
)
world = accelerator.world
group = world.state.groups_before
layers = [nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
rows = torch.sin(torch.arange(480.0).view(60, 8))  # without virtual ranks, rows are read at any time: with other noise
data = Rows() if is_virtual else TensorDataset(rows, rows.sum(1, keepdim=True))
loader = DataLoader(data, BATCH, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
loaded = accelerator.load_state(must_exist=False)
count = 0 if loaded is None else loaded.step
line.say("began", world.rank, world.world_size, count, host)
for epoch in range(loader.epoch, EPOCHS):
    for rows, targets in loader:
        if stands.get(group) == (host, count) and world.local_rank == 0:
            line.say("stands", count, os.getpid())
            stand_still()
        if stands.get("rewinds") == count:
            del stands["rewinds"]
            count = accelerator.rewind(1, skip=False).step
            continue
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(rows), targets))
        optimizer.step()
        count += accelerator.sync_gradients
    scheduler.step()
digest = accelerator.digest()
line.say("ended", digest)
"""

KILLED = """
import sys
from pathlib import Path
from faults import Line
from snapshot_kills import Plan, Run, train
from unisono import current_world

digest = train(current_world().rank, {run!r}, sys.argv[1])
Line(Path(sys.argv[1], "line")).say("ended", digest)
"""


class Machines:
    """Two machines of one run.

    Args:
        stands: by the number of groups before, the machine whose first rank stands still, and after how many steps; by
            "rewinds", after how many steps they go back by one.
    """

    def __init__(
        self,
        directory: Path,
        ear: Ear,
        strategy: str,
        stands: dict[Any, Any],
        *options: str,
        kind: str,
        source: str = TRAINING,
        networks: Sequence[str] = (),
    ) -> None:
        self.ear, self._directory, self._number = ear, directory, 0
        (directory / "train.py").write_text(source)
        self._command = ["run", "--backend", "cpu", "--rdzv-insecure", "--snapshot-every", "1", "--max-restarts", "3"]
        self._networks = dict(zip("abc", networks or ("", "", ""), strict=False))
        addresses = ("10.77.0.1", "10.77.0.2") if networks else ("127.0.0.2", "127.0.0.1", "127.0.0.3")
        self._addresses = dict(zip("abc", addresses, strict=False))
        self._command += ["--rdzv-endpoint", f"{'10.77.0.1' if networks else '127.0.0.1'}:{free_port()}", *options]
        self._script = [str(directory / "train.py"), str(directory), strategy, kind, repr(stands)]

    def start(self, host: str) -> Script:
        """Start the agent of machine "a", which serves the endpoint, "b" or "c"."""
        self._number += 1
        place = ["--local-addr", self._addresses[host], "--node-rank", str("abc".index(host)), *self._script]
        directory, network = self._directory / f"{host}{self._number}", self._networks[host]
        return agent(directory, *self._command, *place, network=network, HOST=host)

    def begun(self, ranks: int) -> set[int]:
        """The steps that are behind them, as that many ranks of one group begin."""
        heard = [self.ear.hear() for _ in range(ranks)]
        assert sorted(each[:3] for each in heard) == [["began", str(rank), str(ranks)] for rank in range(ranks)], heard
        return {int(each[3]) for each in heard}

    def standing(self) -> int:
        """The pid of the worker that stands."""
        word, _, pid = self.ear.hear()
        assert word == "stands"
        return int(pid)

    def ended(self, ranks: int) -> str:
        """The hash with which that many ranks have ended."""
        heard = [self.ear.hear() for _ in range(ranks)]
        assert {each[0] for each in heard} == {"ended"}, heard
        [digest] = {each[1] for each in heard}
        return digest


@pytest.fixture(scope="module")
def expected() -> str:
    """The hash of a run on one machine in which nothing is killed."""
    return undisturbed()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    with Line.at(tmp_path / "line").hearing() as ear:
        yield ear


@contextmanager
def running(machines: Machines, *hosts: str) -> Iterator[list[Script]]:
    """The agents of these machines; at the end of the block each has ended well, or was killed, and left nothing."""
    with ExitStack() as stack:
        scripts = [stack.enter_context(machines.start(host)) for host in hosts]
        yield scripts
        for script in scripts:
            code, output, errors = script.end()
            assert code in (0, -signal.SIGKILL), output + errors
            assert script.survivors() == []


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("zero1", 1), ("fsdp", 1)])
def test_a_killed_worker_or_machine_costs_nothing_and_all_can_go_back(
    tmp_path: Path, ear: Ear, strategy: str, workers: int, expected: str
) -> None:
    """A state that is divided among all ranks may be a step older when a machine is lost: its neighbour has a copy."""
    stands = {0: ("b", 3), 1: ("b", 5), "rewinds": 7}
    machines = Machines(tmp_path, ear, strategy, stands, "-n", str(workers), "--nnodes", "2", kind="virtual")
    with running(machines, "a", "b") as (_, second):
        assert machines.begun(2 * workers) == {0}
        os.kill(machines.standing(), signal.SIGKILL)
        assert machines.begun(2 * workers) == {3}
        machines.standing()
        kill_all(second)
        with running(machines, "b"):
            assert machines.begun(2 * workers) <= ({5} if strategy == "ddp" else {4, 5})
            assert machines.ended(2 * workers) == expected


def test_losing_a_machine_costs_nothing_and_a_new_one_is_sent_the_state(
    tmp_path: Path, ear: Ear, expected: str
) -> None:
    stands = {0: ("a", 2), 1: ("b", 4), 2: ("a", 6)}
    machines = Machines(tmp_path, ear, "ddp", stands, "-n", "1", "--nnodes", "1:2", kind="virtual")
    with running(machines, "a"):
        assert machines.begun(1) == {0}
        machines.standing()
        with running(machines, "b") as (second,):
            assert machines.begun(2) == {2}
            machines.standing()
            kill_all(second)
        assert machines.begun(1) == {4}
        machines.standing()
        with running(machines, "b"):
            assert machines.begun(2) == {6}
            assert machines.ended(2) == expected


def test_without_virtual_ranks_random_numbers_are_lost_with_a_machine_only(tmp_path: Path, ear: Ear) -> None:
    """That those of a killed worker go on is in tests/checkpoint/test_snapshots.py."""
    stands = {0: ("b", 5), 1: ("b", 9)}
    machines = Machines(tmp_path, ear, "ddp", stands, "-n", "1", "--nnodes", "2", kind="plain")
    with running(machines, "a", "b") as (first, second):
        assert machines.begun(2) == {0}
        os.kill(machines.standing(), signal.SIGKILL)
        assert machines.begun(2) == {5}
        machines.standing()
        for each in (first, second):
            assert isinstance(each.process, warm_scripts.Forked)
            assert b"random numbers" not in each.process.stderr.data
        kill_all(second)
        with running(machines, "b") as (again,):
            assert machines.begun(2) == {9}
            machines.ended(2)
            errors = first.end()[2] + again.end()[2]
    assert "saved by 2 ranks on cpu (1 of them are left), loaded by 2 on cpu: random numbers" in errors


def test_losing_two_neighbours_of_three_machines_falls_back_to_disk(tmp_path: Path, ear: Ear, expected: str) -> None:
    stands = {0: ("a", 2), 1: ("b", 4)}
    machines = Machines(tmp_path, ear, "zero1", stands, "-n", "1", "--nnodes", "3", kind="virtual")
    with ExitStack() as stack:

        def start(*hosts: str) -> list[Script]:
            return [stack.enter_context(running(machines, host))[0] for host in hosts]

        first, second, third = start("a", "b", "c")
        assert machines.begun(3) == {0}
        machines.standing()
        kill_all(third)
        [third] = start("c")
        assert machines.begun(3) <= {1, 2}
        machines.standing()
        kill_all(second)
        kill_all(third)
        told = [first, *start("b", "c")]
        assert machines.begun(3) == {0}
        assert machines.ended(3) == expected
        assert any("no snapshot is complete: of the newest, of step " in each.end()[2] for each in told)


def test_one_machine_suffices_when_each_divides_the_state_among_its_ranks(tmp_path: Path, ear: Ear) -> None:
    stands = {0: ("b", 3), 1: ("a", 5)}
    machines = Machines(tmp_path, ear, "replicas", stands, "-n", "2", "--nnodes", "2", kind="plain")
    with running(machines, "a", "b") as (_, second):
        assert machines.begun(4) == {0}
        machines.standing()
        kill_all(second)
        with running(machines, "b"):
            assert machines.begun(4) == {3}
            os.kill(machines.standing(), signal.SIGKILL)
            assert machines.begun(4) == {5}
            machines.ended(4)


def continues(directory: Path, ear: Ear, step: int, expected: str) -> None:
    """A run on one machine goes on from the step that was saved."""
    machines = Machines(directory, ear, "ddp", {}, "-n", "1", "--nnodes", "1", kind="virtual")
    with running(machines, "a"):
        assert machines.begun(1) == {step}
        assert machines.ended(1) == expected


@pytest.mark.parametrize("loses", ["worker", "agent"])
def test_one_machine_saves_the_last_snapshot_of_a_failing_run(
    tmp_path: Path, ear: Ear, loses: str, expected: str
) -> None:
    stands = {0: ("b" if loses == "worker" else "a", 3)}
    options = ["-n", "1", "--nnodes", "2", "--max-restarts", "0"]
    machines = Machines(tmp_path, ear, "ddp", stands, *options, kind="virtual")
    with ExitStack() as stack:
        first, second = (stack.enter_context(machines.start(host)) for host in ("a", "b"))
        assert machines.begun(2) == {0}
        pid = machines.standing()
        os.kill(pid, signal.SIGKILL) if loses == "worker" else kill_all(first)
        ends = [each.end() for each in (first, second)]
        assert [code for code, _, _ in ends] == ([137, 137] if loses == "worker" else [-signal.SIGKILL, 1]), ends
        assert first.survivors() == [] == second.survivors()
    assert len([*(tmp_path / "checkpoints").glob("checkpoint_*")]) == 1
    assert sum(errors.count("saved step 3 from memory, as ") for _, _, errors in ends) == 1
    continues(tmp_path, ear, 3, expected)


def test_a_machine_that_is_cut_off_saves_what_it_has(
    tmp_path: Path, ear: Ear, networks: tuple[str, str], expected: str
) -> None:
    options = ["-n", "1", "--nnodes", "2", "--max-restarts", "0", "--lost-after", "4"]
    machines = Machines(tmp_path, ear, "ddp", {0: ("b", 3)}, *options, kind="virtual", networks=networks)
    with ExitStack() as stack:
        first, second = (stack.enter_context(machines.start(host)) for host in ("a", "b"))
        assert machines.begun(2) == {0}
        machines.standing()
        pull_cable(networks[1])
        ends = [each.end() for each in (first, second)]
        assert [code for code, _, _ in ends] == [1, 1], ends
        assert first.survivors() == [] == second.survivors()
    assert any("saved step 3 from memory, as " in errors for _, _, errors in ends), ends
    assert re.search(r"node 1 \(\S+\) has been silent for \d+ s: it or its link is gone\n", ends[0][2])
    continues(tmp_path, ear, 3, expected)


def drawn(seed: int, strategies: Sequence[str], victims: Sequence[str], ranks: int, kills: int) -> Run:
    """A run of whose first ranks one is killed, at a random call, in each attempt but the last."""
    draw = random.Random(seed)
    places = [
        ("snapshot_memory", 200),
        (snapshot_kills.COPIES, 60),
        ("/checkpoint/", 300),
        ("/checkpoint/", 3000),
        ("/unisono/", snapshot_kills.CALLS),
    ]
    plans = []
    for _ in range(kills):
        victim, (where, reach) = draw.choice(victims), draw.choice(places)
        plans.append(Plan(victim, draw.randrange(ranks), where, draw.randrange(1, reach)))
    return Run(draw.choice(strategies), 2, 0, tuple(plans))


def check_repeated(directory: Path, most: int = 1) -> None:
    """At most so many steps were repeated for each kill."""
    done = directory / "done"
    struck = done.read_text().splitlines() if done.exists() else []
    steps = snapshot_kills.EPOCHS * -(-snapshot_kills.ROWS // (snapshot_kills.BATCH * snapshot_kills.VIRTUAL))
    for rank in range(2):
        taken = len((directory / f"steps-{rank}").read_text().splitlines())
        assert steps <= taken <= steps + most * len(struck), struck


@pytest.mark.parametrize("seed", [0, 4])
def test_a_worker_killed_at_any_call_costs_at_most_one_step(tmp_path: Path, ear: Ear, seed: int, expected: str) -> None:
    source = KILLED.format(run=drawn(seed, ["ddp", "zero1", "fsdp"], ["worker", "worker", "zygote"], 2, 2))
    machines = Machines(tmp_path, ear, "", {}, "-n", "1", "--nnodes", "2", kind="", source=source)
    with running(machines, "a", "b"):
        assert machines.ended(2) == expected
    check_repeated(tmp_path)


@pytest.mark.parametrize(("seed", "strategies", "most"), [(1, ["ddp"], 1), (7, ["zero1", "fsdp"], 2)])
def test_an_agent_killed_at_any_call_costs_one_or_two_steps(
    tmp_path: Path, ear: Ear, seed: int, strategies: Sequence[str], most: int, expected: str
) -> None:
    source = KILLED.format(run=drawn(seed, strategies, ["launcher"], 1, 1))
    machines = Machines(tmp_path, ear, "", {}, "-n", "1", "--nnodes", "2", kind="", source=source)
    with running(machines, "a"):
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            with machines.start("b") as script:
                code, _, errors = script.end()
        assert code == 0, errors
        assert machines.ended(2) == expected
    check_repeated(tmp_path, most)
