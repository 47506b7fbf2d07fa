"""Two runs with virtual ranks are compared: the first step that differs, and what differs in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import by_value
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Output, spawn
from unisono.cli.main import main

RANKS = (1, 2, 3)


def train(seed: int | None = 0, at: int = 0, what: str = "", every: int = 5) -> None:
    """Two epochs of twelve steps with dropout and BatchNorm; before the step `at` something is changed, on all ranks
    alike."""
    accelerator = Accelerator(seed=seed, virtual_ranks=3, digest_every=every)
    if seed is None:
        torch.seed()  # as a command of its own does; workers of one process begin alike
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(72, 4)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)
    )
    taken = 0
    for _ in range(2):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            if taken + 1 == at and what == "loss":  # its gradient reaches the last layer's bias alone
                loss = loss + 1e-6 * layers[3].bias.sum()
            if taken + 1 == at and what == "rate":
                optimizer.param_groups[0]["lr"] = 0.1001
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            taken += accelerator.sync_gradients
            if taken == at and what == "end":
                return
    accelerator.end_training()


def record(directory: Path, ranks: int, *given: Any) -> Path:
    with by_value(train):
        spawn(lambda _: train(*given), nprocs=ranks, backend="cpu", output=Output(directory))
    return directory / "latest"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same, by the number of ranks."""
    return {ranks: record(tmp_path_factory.mktemp("run"), ranks) for ranks in RANKS}


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Any:
    def found(*paths: Path) -> tuple[int, str]:
        code = main(["compare", *map(str, paths)])
        shown = capsys.readouterr()
        return code, (shown.out + shown.err).strip()

    return found


def test_runs_on_any_number_of_ranks_are_equal_and_end_with_one_hash(runs: dict[int, Path], compared: Any) -> None:
    said = {(runs[ranks] / "rank-0.stdout").read_text().splitlines()[-1] for ranks in RANKS}
    assert len(said) == 1
    for ranks in RANKS[1:]:
        assert compared(runs[1], runs[ranks].parent) == (0, f"equal up to step 24, the last; {said.copy().pop()}")
        assert "weights" not in (runs[ranks] / "rank-1.stdout").read_text(), "rank zero alone prints it"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("loss", "equal up to step 10; at step 12 the gradient of 3.bias differs"),
        ("rate", "equal up to step 10; at step 12 no gradient differs, but after the step 0.weight does first, and "),
        ("end", "equal up to step 12; the first run ends with step 24, the second one with 12"),
    ],
)
def test_the_first_difference_is_named(
    what: str, text: str, runs: dict[int, Path], tmp_path: Path, compared: Any
) -> None:
    code, said = compared(runs[1], record(tmp_path, 2, 0, 12, what))
    assert code == 1
    assert said.startswith(text)


def test_configurations_that_differ_are_named(runs: dict[int, Path], tmp_path: Path, compared: Any) -> None:
    code, said = compared(runs[2], record(tmp_path, 1, 1))
    assert code == 1
    first, second = said.splitlines()
    assert first == "configurations differ: seed 0, 1"
    assert second.startswith("steps 1 to 4 have no digests; at step 5 the gradient of 0.weight differs first, and ")


def test_that_runs_have_no_seed_is_said_and_which_steps_have_no_digests(tmp_path: Path, compared: Any) -> None:
    first, second = (record(tmp_path / name, 1, None, 0, "", 1) for name in ("first", "second"))
    code, said = compared(first, second)
    assert code == 1
    why, where = said.splitlines()
    assert why == "neither run has a seed, so each draws its own weights; pass Accelerator(seed=0) to both"
    assert where.startswith("at step 1 the gradient of 0.weight differs first, and ")
    lines = (first / "digests.jsonl").read_text().splitlines()
    (first / "digests.jsonl").write_text("\n".join(line for line in lines if json.loads(line).get("step", 9) > 2))
    assert "\nno earlier step has digests in both; at step 3 the gradient" in compared(first, second)[1]


def test_a_run_is_not_compared_with_itself(runs: dict[int, Path], tmp_path: Path, compared: Any) -> None:
    run = runs[1].resolve()
    assert compared(runs[1], run) == (2, f"unisono compare: both are the run {run}; pass another one")
    first, second = (shutil.copytree(run, tmp_path / name) for name in ("first", "second"))
    (tmp_path / "latest").symlink_to("second")
    words = f"unisono compare: both are the run {second}; name the other one: {first}"
    assert compared(tmp_path, tmp_path) == (2, words)
    assert compared(tmp_path, first)[0] == 0


def test_what_cannot_be_compared_is_said_with_the_way_out(runs: dict[int, Path], tmp_path: Path, compared: Any) -> None:
    code, said = compared(runs[1], tmp_path)
    assert code == 2
    assert "has no digests" in said
    assert "virtual_ranks" in said
    assert "--log-dir" in said
    other = tmp_path / "other"
    other.mkdir()
    lines = (runs[1] / "digests.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("step") in (None, 5)]
    (other / "digests.jsonl").write_text("\n".join(kept).replace('"step": 5', '"step": 7'))
    code, said = compared(runs[1], other)
    assert code == 2
    assert "no step has digests in both: the first run has some of the steps 5 to 24, the second of 7 to 7" in said
    (other / "digests.jsonl").write_text("\n".join(lines).replace("3.bias", "4.bias"))
    code, said = compared(runs[1], other)
    assert (code, said) == (2, "at step 5 they do not train the same parameters: 3.bias, 4.bias")


def test_a_restart_repeats_steps_and_a_kill_cuts_a_line(runs: dict[int, Path], tmp_path: Path, compared: Any) -> None:
    lines = (runs[1] / "digests.jsonl").read_text().splitlines()
    repeated = [*lines[:4], lines[4][:40], "", *lines[:2], *lines[3:]]
    (tmp_path / "digests.jsonl").write_text("\n".join(repeated))
    assert compared(runs[1], tmp_path)[0] == 0
