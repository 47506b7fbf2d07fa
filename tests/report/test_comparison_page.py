"""Two runs side by side on a page: what differs between them, and the curves of both over each other."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import HOST, by_value
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Output, spawn
from unisono.cli.main import main
from unisono.report.comparison import comparison_data
from unisono.report.page import charts_of_logged, page_data
from unisono.report.run import Run, read_run

STEPS = 12


def train(directory: Path, lr: float, virtual_ranks: int | None = None) -> None:
    accelerator = Accelerator(seed=0, split_batches=True, project_dir=directory, virtual_ranks=virtual_ranks)
    accelerator.init_trackers("run", {"lr": lr, "width": 4} | ({"momentum": 0.9} if lr > 0.1 else {}))
    model = torch.nn.Linear(4, 1)
    x = torch.randn(4 * STEPS, 4, device=HOST)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr), loader)
    for number, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"train_loss": float(number), "lr": lr}, step=number)
    accelerator.log({"val_loss": 0.5 * lr, "note": "no number"}, step=STEPS)
    accelerator.end_training()


def record(directory: Path, ranks: int, *given: Any) -> Path:
    with by_value(train):
        spawn(lambda _: train(directory / "project", *given), nprocs=ranks, backend="cpu", output=Output(directory))
    return directory / "latest"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two ranks, and one with another learning rate."""
    return record(tmp_path_factory.mktemp("one"), 2, 0.1), record(tmp_path_factory.mktemp("other"), 1, 0.2)


@pytest.fixture
def runs(paths: tuple[Path, Path]) -> tuple[Run, Run]:
    return read_run(paths[0]), read_run(paths[1])


def test_what_differs_comes_first_and_what_is_equal_apart(runs: tuple[Run, Run]) -> None:
    data = comparison_data(runs, ("a", "b"), "")
    rows = {name: both for name, *both in data["differing"]}
    assert rows == {"lr": ["0.1", "0.2"], "momentum": ["–", "0.9"]}
    equal = {name: one for name, one, _ in data["equal"]}
    assert {"width": "4", "torch": torch.__version__}.items() <= equal.items()
    assert not rows.keys() & equal.keys()


def test_the_values_that_were_logged_last_have_their_difference(runs: tuple[Run, Run]) -> None:
    rows = comparison_data(runs, ("a", "b"), "")["logged"]
    assert rows == [
        ["step", "12", "12", "+0"],
        ["train_loss", "11", "11", "+0"],
        ["lr", "0.1", "0.2", "+0.1"],
        ["val_loss", "0.05", "0.1", "+0.05"],
        ["note", "no number", "no number", ""],
    ]
    record, logged = runs[0].ranks[0], [[0.0, None, {"loss": float("nan"), "big": 10**400, "flag": True}]]
    odd = replace(runs[0], ranks=[replace(record, samples=[{**record.samples[-1], "logged": logged}])])
    data = json.loads(json.dumps(comparison_data((odd, runs[1]), ("a", "b"), ""), allow_nan=False))
    assert [row for row in data["logged"] if row[0] in ("loss", "flag")] == [
        ["loss", "nan", "–", ""],
        ["flag", "True", "–", ""],
    ]


def test_curves_lie_over_each_other_by_name_as_on_the_page_of_a_run(runs: tuple[Run, Run]) -> None:
    charts = {each["title"]: each for each in comparison_data(runs, ("a", "b"), "")["charts"]}
    own = [each["title"] for each in page_data(runs[0])["charts"]]
    assert [*charts] == own[:2] == ["loss", "lr"]
    assert charts["loss"]["x"] == [*range(STEPS + 1)]
    train, val = [*map(float, range(STEPS)), None], [None] * STEPS
    assert charts["loss"]["series"] == [
        ["first train_loss", train, 0, 0],
        ["first val_loss", [*val, 0.05], 0, 1],
        ["second train_loss", train, 1, 0],
        ["second val_loss", [*val, 0.1], 1, 1],
    ]


def test_of_many_points_each_run_keeps_its_own_where_steps_alternate(runs: tuple[Run, Run]) -> None:
    def with_steps(run: Run, first: int) -> Run:
        logged = [[0.0, step, {"loss": 1.0}] for step in range(first, first + 60_000, 2)]
        return replace(run, ranks=[replace(run.ranks[0], samples=[{**run.ranks[0].samples[-1], "logged": logged}])])

    (chart,) = charts_of_logged(with_steps(runs[0], 0), with_steps(runs[1], 1), names=("first", "second"))
    assert len(chart["x"]) <= 20_000
    counts = [sum(value is not None for value in values) for _, values, *_ in chart["series"]]
    assert counts == [10_000, 10_000]


def test_time_shares_add_up_and_rates_are_those_of_the_runs(runs: tuple[Run, Run]) -> None:
    data = comparison_data(runs, ("a", "b"), "")
    for place, shares in enumerate(data["bars"]):
        assert sum(shares) == pytest.approx(1)
        assert [row[1 + place] for row in data["shares"]] == [f"{share:.1%}" for share in shares]
    numbers = {name: both for name, *both, _ in data["numbers"]}
    assert numbers["ranks"] == ["2", "1"]
    assert numbers["samples/s"] == [f"{run.report.samples_per_second:,.0f}" for run in runs]
    seconds = [max(each.loop_seconds for each in run.report.ranks) for run in runs]
    assert numbers["steps/s"] == [f"{STEPS / each:,.1f}" for each in seconds]


def test_the_command_writes_a_page_that_needs_no_network(paths: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, paths), "-o", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"page: {page}"
    text = page.read_text()
    assert "{{" not in text
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(", text)
    assert "whether their bits differ is unknown" in text
    assert main(["compare", *map(str, paths)]) == 2, "without a page, they cannot be compared"


def test_the_page_says_which_bits_differ_and_the_exit_code_stays(paths, tmp_path: Path, capsys) -> None:
    own, page = [record(tmp_path / str(ranks), ranks, lr, 2) for ranks, lr in ((1, 0.1), (2, 0.2))], tmp_path / "p.html"
    assert main(["compare", *map(str, own)]) == 1
    said = capsys.readouterr().out
    assert main(["compare", *map(str, own), "-o", str(page)]) == 1
    assert capsys.readouterr().out == f"{said}page: {page}\n"
    assert "the gradient of " in page.read_text() or "no gradient differs" in page.read_text()
    assert main(["compare", str(own[0]), str(paths[1]), "-o", str(page)]) == 2, "one has no digests"
    assert f"{paths[1]} has no digests" in page.read_text()


def test_what_failed_and_what_is_missing_is_on_the_page_by_run(paths: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(paths[0].resolve(), tmp_path / "copy")
    (copy / "rank-1.jsonl").unlink()
    with (copy / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps({"end": "ValueError: bad </script>"}) + "\n")
    runs = read_run(paths[1]), read_run(copy)
    missing = comparison_data(runs, ("a", "b"), "")["missing"]
    assert missing == ["second: rank 0 ended by ValueError: bad </script>", "second: rank 1 has left no record"]
    (copy / "rank-0.jsonl").write_text((copy / "rank-0.jsonl").read_text().splitlines()[0] + "\n")
    data = json.dumps(comparison_data((runs[0], read_run(copy)), ("a", "b"), ""), allow_nan=False)
    assert "nothing is recorded yet" in data


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ONE", "OTHER", "-o", "page.pdf"], "-o page.pdf names no page: its name ends with .html"),
        (["ONE", "OTHER", "-o", "none/page.html"], "there is no directory none; create it, or name another one"),
        (["ONE", "-o", "page.html"], "the following arguments are required: RUN2"),
        (["ONE", "none", "-o", "page.html"], "none is no directory"),
        (["ONE", "ONE", "-o", "page.html"], "both are the run "),
        (["ONE", "OTHER", "-o", "is.html"], "is.html"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_with_the_way_out(
    arguments: list[str], words: str, paths: tuple[Path, Path], tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("is.html").mkdir()
    named = {"ONE": str(paths[0]), "OTHER": str(paths[1])}
    try:
        code = main(["compare", *(named.get(each, each) for each in arguments)])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert words in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["is.html"]
