"""README's example and the quickstart print what their pages show; the changes lead from first script to last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import warm_scripts
from test_code_blocks import ROOT, blocks_of

BLOCKS = list(blocks_of(ROOT / "docs" / "quickstart.md"))
CHANGED = (ROOT / "examples" / "quickstart.py").read_text().partition('"""\n\n')[2]
README = (ROOT / "README.md").read_text()
(CHANGES,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
PLAIN, EXAMPLE = (re.sub(rf"^[{away}].*\n|^[{kept} ]", "", CHANGES, flags=re.MULTILINE) for away, kept in ("+-", "-+"))
COMMANDS = re.findall(r"^\$ (.*)\n(.*)", README, re.MULTILINE)  # and the line that each prints
SCRIPTS = {
    "train.py": next(block.text for block in BLOCKS if block.title),
    "quickstart.py": CHANGED,
    "README": EXAMPLE,
    "plain": PLAIN,
}
(SHOWN,) = (block.text for block in BLOCKS if block.language == "text")


def run(directory: Path, script: str, *options: str) -> list[str]:
    """The lines that it prints, as `unisono run` with these options."""
    (directory / "train.py").write_text(SCRIPTS[script])
    code, output, errors = warm_scripts.launch(directory, "run", "--backend", "cpu", *options, "train.py")
    assert code == 0, errors
    return [re.sub(r"^\[rank 0\] ", "", line) for line in output.splitlines()]


def is_close(found: str, shown: str) -> bool:
    """The same words, and numbers that differ by less than rounding may make of them."""
    number = r"\d+\.\d+"
    pairs = zip(re.findall(number, found), re.findall(number, shown), strict=True)
    same_words = re.sub(number, "", found) == re.sub(number, "", shown)
    return same_words and all(abs(float(one) - float(other)) < 2e-3 for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_script_prints_what_the_page_shows(ranks: str, tmp_path: Path) -> None:
    found = run(tmp_path, "train.py", "-n", ranks)
    shown = SHOWN.splitlines()
    assert len(found) == len(shown)
    assert all(map(is_close, found[:-1], shown[:-1])), found
    assert abs(float(found[-1].split("%")[0]) - float(shown[-1].split("%")[0])) <= 0.5


@pytest.mark.slow
def test_the_last_script_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    found = run(tmp_path, "quickstart.py", "-n", "2")
    assert found[0].startswith("epoch 0"), found
    assert any("bound:" in line for line in found)
    assert list((tmp_path / "runs/spirals/spirals").glob("events.out.tfevents.*"))
    again = run(tmp_path, "quickstart.py", "-n", "1")
    assert again[0] == next(line for line in found if line.endswith("points are right")), "no epoch is left to train"


def test_the_changes_lead_from_the_first_script_to_the_last() -> None:
    lines = SCRIPTS["train.py"].splitlines()
    for block in BLOCKS:
        if block.language == "diff":
            for line in block.text.splitlines():
                if line.startswith("-"):
                    lines.remove(line[1:])
                elif line.startswith("+") and not line.startswith("+from"):
                    lines.append(line[1:])
    ours = [line for line in CHANGED.splitlines() if not line.startswith("from unisono")]
    assert sorted(line for line in lines if not line.startswith("from unisono")) == sorted(ours)


@pytest.mark.slow
def test_the_example_prints_one_hash_on_each_number_of_devices(tmp_path: Path) -> None:
    assert [command for command, _ in COMMANDS] == ["python train.py", *(f"unisono run -n {n} train.py" for n in "23")]
    assert len({shown for _, shown in COMMANDS}) == 1
    assert len(re.findall(r"^[+-]", CHANGES, re.MULTILINE)) == 5
    assert run(tmp_path, "plain", "-n", "1") == []
    printed = [run(tmp_path, "README", "-n", devices) for devices in "123"]
    assert printed[0] == printed[1] == printed[2]
    assert re.fullmatch(r"weights sha256 [0-9a-f]{64}", "\n".join(printed[0])), "another processor has another hash"
    assert re.fullmatch(r"weights sha256 [0-9a-f]{64}", COMMANDS[0][1])
