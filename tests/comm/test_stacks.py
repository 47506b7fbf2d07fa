"""What is shown of a traceback, and the place where the user's program calls into this package."""

import os
import re

import pytest
import warm_scripts

from unisono.comm.stacks import PACKAGE, fold_frames

OWN, USERS, LIBRARY, COLLECTIVE = (
    f"{PACKAGE}comm/processes.py",
    "/home/me/train.py",
    "/usr/lib/python3.11/site-packages/torch/nn.py",
    "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
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


@pytest.mark.parametrize("last", [OWN, COLLECTIVE])
@pytest.mark.parametrize("error", ["unisono.errors.BrokenWorldError: rank 1 is gone\n", "KeyError: 'x'\n"])
def test_internal_frames_are_hidden_unless_one_raised_a_foreign_error(error, last):
    files = [OWN, COLLECTIVE, USERS, LIBRARY, OWN, USERS, OWN, last]
    text = HEAD + "".join(frame(*each) for each in zip(files, range(len(files)), strict=True)) + error
    stay = [2, 3, 5] if error.startswith("unisono") else [2, 3, 5, 7]
    assert fold_frames(text) == HEAD + "".join(frame(files[number], number) for number in stay) + error


def test_an_error_is_short_and_names_each_ranks_line_and_the_users_call(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, errors = warm_scripts.complete(tmp_path / "train.py")
    assert code == 1
    place = rf'in train \("{tmp_path}/train.py", line %d\)'
    first, second = rf"gather\(\) {place % 7}", rf"wait_for_everyone\(\) {place % 8}"
    found = re.findall(rf"rank 0 came to gather .* by {first} while rank 1 called {second}, ", errors)
    assert len(found) == 1
    assert PACKAGE not in errors
    frames = re.findall(r'^  File "(.*)", line (\d+)', errors, re.MULTILINE)
    assert {file for file, _ in frames} == {f"{tmp_path}/train.py"}
    assert [line for _, line in frames] in (["7", "11"], ["8", "11"]), "the call of the first rank to report, and spawn"
    full = warm_scripts.complete(tmp_path / "train.py", environ={**os.environ, "UNISONO_TRACEBACK": "full"})
    assert PACKAGE in full[2]
