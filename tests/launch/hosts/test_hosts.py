"""Two machines, as two network namespaces with a cable between: one is lost in mid-training, and comes back."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import agent, kill_all, two_networks
from faults import Line, Script

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


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    try:
        with two_networks() as names:
            yield names
    except PermissionError as reason:
        pytest.skip(f"this machine gives no network namespaces: {reason}")


@pytest.mark.slow
def test_training_goes_on_without_a_lost_machine_and_with_it_again_and_each_sample_counts_once(
    tmp_path: Path, networks: tuple[str, str]
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = ["run", "-n", "1", "--backend", "cpu", "--nnodes", "1:2", "--max-restarts", "3"]
    command += ["--rdzv-endpoint", "10.77.0.1:29400", str(tmp_path / "train.py"), str(tmp_path)]
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
            assert time.monotonic() - lost_at < 20  # about 7; with torch's own settings 46
        assert ear.hear() == ["stands", "0", "1", "19"]
        with host(2, "-again") as again:
            assert sorted(ear.hear()[:4] for _ in range(2)) == [["began", "0", "2", "15"], ["began", "1", "2", "15"]]
            assert again.end()[0] == 0
        code, output, errors = first.end()
        assert code == 0, output + errors
        assert first.survivors() == [] == again.survivors()
    counts = Counter(tuple(entry) for entry in json.loads((tmp_path / "ledger").read_text()))
    assert counts == {(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)}
