"""`bench/run.py`: what scripts print becomes a file; two of one machine are compared, those of others refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))
sys.path.insert(0, str(Path(__file__).parents[2]))
import chart
import performance

from bench.run import main
from unisono.cli.main import COMMANDS

SCRIPT = """
import sys
sys.path.insert(0, {blocks!r})
from blocks import options, show
DEVICES = ("cpu", "cuda")
blocks = options(__doc__, DEVICES, blocks=9).blocks
for case, ours in {{f"a step in {{blocks}} blocks": {ours}, "one pair": {ours}[:1]}}.items():
    show(case, {{"ours": ours, "theirs": [2.0] * len(ours)}})
"""
BLOCKS = str(Path(__file__).parents[2] / "bench")


def measure(directory: Path, name: str, ours: list[float]) -> Path:
    (directory / "suite").mkdir(exist_ok=True)
    (directory / "suite" / "steps.py").write_text(SCRIPT.format(blocks=BLOCKS, ours=ours))
    (directory / "suite" / "graphs.py").write_text('DEVICES = ("mps",)')
    assert main(["--suite", str(directory / "suite"), "--blocks", "5", "-o", str(directory / name)]) == 0
    return directory / name


@pytest.mark.usefixtures("fonts")
@pytest.mark.slow
def test_what_scripts_print_is_kept_and_compared_on_like_machines(tmp_path: Path, capsys: Any) -> None:
    old = measure(tmp_path, "old.json", [2.0, 2.0, 2.0, 2.0, 2.2])
    assert "left out on cpu, which they cannot use: graphs" in capsys.readouterr().out
    new = measure(tmp_path, "new.json", [1.0, 1.0, 1.0, 1.0, 1.1])
    kept, _ = json.loads(new.read_text())["figures"]
    assert [kept[name] for name in ("device", "script", "case")] == ["cpu", "steps", "a step in 5 blocks"]
    assert [kept[name] for name in ("name", "ratio", "ours", "theirs", "unit")] == ["ours / theirs", 0.5, 1.0, 2.0, "s"]
    capsys.readouterr()
    picture = tmp_path / "there" / "change.svg"
    assert main(["compare", str(old), str(new), "-o", str(picture)]) == 0
    several, pair = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert several[-4:] == ["1.000", "0.500", "2.000", "*"]
    assert pair[-1] == "2.000", "one pair has no quartiles"
    assert "<svg" in picture.with_stem("change-cpu").read_text()
    for change in ({"cores": 4096}, {"devices": {"cpu": "another"}}):
        found = json.loads(old.read_text())
        found["facts"] |= change
        (tmp_path / "unlike.json").write_text(json.dumps(found))
        assert main(["compare", str(old), str(tmp_path / "unlike.json")]) == 1
        assert re.search(r"of unlike machines \((cores: .* and 4096|cpu: .* and another)\)", capsys.readouterr().err)


@pytest.mark.slow
def test_what_is_measured_is_kept_though_a_later_script_is_interrupted(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "first.py").write_text(SCRIPT.format(blocks=BLOCKS, ours=[1.0]))
    (suite / "second.py").write_text("import os, signal\nDEVICES = ('cpu',)\nos.kill(os.getppid(), signal.SIGINT)")
    output = tmp_path / "bench.json"
    command = [sys.executable, BLOCKS + "/run.py", "--suite", str(suite), "-o", str(output)]
    assert subprocess.run(command, check=False).returncode == 130
    assert [each["script"] for each in json.loads(output.read_text())["figures"]] == ["first"] * 2  # two cases


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "none"], "none/ holds no benchmarks"),
        (["--suite", BLOCKS, "--only", "step"], "--only step: there are"),
        (["--suite", BLOCKS, "--only", "xla"], "--device cpu: none of xla can use it"),
        (["--suite", BLOCKS, "--blocks", "0"], "--blocks 0: pass 1 or more"),
        (["--suite", BLOCKS, "--device", "cdua"], "backend 'cdua' does not exist"),
        (["--suite", BLOCKS, "-o", "/dev/full"], "No space left"),
        (["compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], words: str, capsys: Any) -> None:
    assert main(arguments) == 1
    assert words in capsys.readouterr().err


def test_users_have_no_command_that_needs_a_checkout() -> None:
    assert "bench" not in COMMANDS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_here_is_refused_before_anything_runs(capsys: Any) -> None:
    assert main(["--suite", BLOCKS, "--device", "cpu", "cuda"]) == 1
    found = capsys.readouterr()
    assert "backend 'cuda' has no device on this machine" in found.err
    assert not found.out


# docs/performance.md and the picture of the first page have the figures of the files in bench/results, and no others.


def test_the_page_is_what_is_made_from_the_committed_results() -> None:
    page = performance.PAGE.read_text()
    assert performance.fill(page, performance.read_all()) == page, "run: python docs/generate/performance.py"
    assert chart.PICTURE.read_text() == chart.draw(performance.read_all()), "run: python docs/generate/chart.py"
    assert page.count("<!-- figures: ") > 10


@pytest.mark.parametrize("count", [0, 2])
def test_a_table_without_figures_or_with_those_of_two_files_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} files in bench/results have figures of"):
        performance.fill(performance.PAGE.read_text(), performance.read_all() * count)


def test_a_table_shows_the_figures_that_its_pattern_finds_and_needs_one() -> None:
    page = "<!-- figures: cpu launch {} -->\n<!-- end -->"
    shown = performance.fill(page.format("^2 workers: warm"), performance.read_all())
    assert [line.split("|")[1].strip() for line in shown.splitlines() if "workers" in line and line[0] == "|"] == [
        "2 workers: warm / torch.multiprocessing.spawn",
        "2 workers: warm / torchrun",
    ]
    with pytest.raises(ValueError, match="'nothing' fits no figure of launch on cpu"):
        performance.fill(page.format("nothing"), performance.read_all())
