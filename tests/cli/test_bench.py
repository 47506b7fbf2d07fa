"""`unisono bench`: what scripts print becomes a file; two of one machine are compared, those of others refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.cli.main import main

SCRIPT = """
import sys
sys.path.insert(0, {blocks!r})
from blocks import conditions, ratio_line
if __name__ == "__main__":
    print(f"steps; {{conditions()}}")
    print("median ms: ours 1.0, theirs 2.0")
    print(ratio_line("ours / theirs", {ours}, [2.0, 2.0, 2.0, 2.0]))
"""
BLOCKS = str(Path(__file__).parent.parent.parent / "bench")


def measure(directory: Path, name: str, ours: list[float]) -> Path:
    (directory / "suite").mkdir(exist_ok=True)
    (directory / "suite" / "steps.py").write_text(SCRIPT.format(blocks=BLOCKS, ours=ours))
    assert main(["bench", "--suite", str(directory / "suite"), "-o", str(directory / name)]) == 0
    return directory / name


@pytest.mark.usefixtures("fonts")
def test_what_the_scripts_print_is_kept_and_compared(tmp_path: Path, capsys: Any) -> None:
    old = measure(tmp_path, "old.json", [2.0, 2.0, 2.0, 2.2])
    new = measure(tmp_path, "new.json", [1.0, 1.0, 1.0, 1.1])
    (kept,) = json.loads(new.read_text())["ratios"]
    assert (kept["script"], kept["heading"], kept["name"], kept["ratio"]) == ("steps", "steps", "ours / theirs", 0.5)
    capsys.readouterr()
    picture = tmp_path / "there" / "change.png"
    assert main(["bench", "compare", str(old), str(new), "-o", str(picture)]) == 0
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line[-4:] == ["1.000", "0.500", "2.000", "*"]
    assert picture.stat().st_size > 1000


def test_results_of_unlike_machines_are_refused(tmp_path: Path, capsys: Any) -> None:
    old = measure(tmp_path, "old.json", [2.0] * 4)
    found = json.loads(old.read_text())
    found["facts"]["cores"] = 4096
    (tmp_path / "new.json").write_text(json.dumps(found))
    assert main(["bench", "compare", str(old), str(tmp_path / "new.json")]) == 1
    assert "of unlike machines (cores: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "none"], "none/ holds no benchmarks"),
        (["--suite", BLOCKS, "--only", "step"], "--only step: there are"),
        (["--suite", BLOCKS, "--only", "steps", "--device", "cuda"], "--device cuda: none of steps takes a device"),
        (["compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], words: str, capsys: Any) -> None:
    assert main(["bench", *arguments]) == 1
    assert words in capsys.readouterr().err
