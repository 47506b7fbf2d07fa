"""What is shown of a traceback, and the place where the user's program calls into this package."""

import os
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from unisono.stacks import PACKAGE, fold_frames

OWN, USERS, LIBRARY = (
    f"{PACKAGE}comm/processes.py",
    "/home/me/train.py",
    "/usr/lib/python3.11/site-packages/torch/nn.py",
)
HEAD = "Traceback (most recent call last):\n"

SCRIPT = """
import torch, unisono

def train(rank):
    accelerator = unisono.Accelerator()
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(3))
    accelerator.wait_for_everyone()

if __name__ == "__main__":
    unisono.spawn(train, nprocs=2)
"""


def frame(file: str, number: int) -> str:
    return f'  File "{file}", line {number}, in function\n    call({number})\n    ^^^^^^^\n'


@given(st.lists(st.sampled_from([OWN, USERS, LIBRARY])), st.booleans())
def test_the_users_frames_stay_and_the_packages_become_numbers(files, is_by_rule):
    error = f"{'unisono.errors.' if is_by_rule else ''}BrokenWorldError: rank 1 is gone\n"
    text = HEAD + "".join(frame(*each) for each in zip(files, range(len(files)), strict=True)) + error
    folded = fold_frames(text)
    assert folded.startswith(HEAD)
    assert folded.endswith(error)
    assert re.findall(r"call\((\d+)\)", folded) == sorted(set(re.findall(r"call\((\d+)\)", folded)), key=int)
    shown = {int(number) for number in re.findall(r"call\((\d+)\)", folded)}
    users = {number for number, file in enumerate(files) if file == USERS}
    raised_here = {len(files) - 1} if files[-1:] == [OWN] and not is_by_rule else set()
    assert users | raised_here <= shown
    assert {number for number in shown if files[number] == OWN} == raised_here
    # A library's frame goes only where the package has called it, and it has called the package.
    for number in set(range(len(files))) - shown:
        before, after = files[:number][::-1], files[number + 1 :]
        ends = [next((file for file in side if file != LIBRARY), None) for side in (before, after)]
        assert files[number] == OWN or ends == [OWN, OWN]


def run(path: Path, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=100, env={**os.environ, **environment}
    )
    assert ended.returncode == 1
    return ended.stderr


def test_an_error_is_short_and_names_each_ranks_line_and_the_users_call(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    errors = run(tmp_path / "train.py")
    place = rf'in train \("{tmp_path}/train.py", line %d\)'
    first, second = rf"gather\(\) {place % 7}", rf"wait_for_everyone\(\) {place % 8}"
    found = re.findall(rf"rank 0 came to gather .* by {first} while rank 1 called {second}, ", errors)
    assert len(found) == 1
    assert PACKAGE not in errors
    assert re.search(r"  \.\.\. \d+ frames of unisono\n", errors)
    assert len(errors.splitlines()) < 20
    assert PACKAGE in run(tmp_path / "train.py", UNISONO_TRACEBACK="full")
