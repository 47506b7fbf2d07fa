"""`python -W error`: a run causes no warning of Python's, which a fresh interpreter would print or raise."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_quickstart import EXAMPLE

pytestmark = pytest.mark.slow

SPAWNED = """\
import torch
from torch import nn, ones
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, DataParallel, all_reduce, spawn

def loader(**options):
    return DataLoader(TensorDataset(ones(8, 2)), 2, num_workers=1, **options)

def train(strategy):
    accelerator = Accelerator(strategy=strategy)
    network = nn.Linear(2, 1)
    sgd = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    model, optimizer, rows = accelerator.prepare(network, sgd, loader(persistent_workers=True))
    for (inputs,) in rows:
        accelerator.backward(model(inputs).mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("saved-" + strategy)
    accelerator.load_state("saved-" + strategy)

def work(index):
    for strategy in ("ddp", "zero1", "fsdp"):
        train(strategy)

def count(model, rows, device, context):
    return sum(1 for _ in rows)

if __name__ == "__main__":
    spawn(work, nprocs=2)
    spawn(lambda index: all_reduce(ones(1)), nprocs=2, start_method="spawn")
    assert DataParallel(nn.Linear(2, 1), ["cpu:0", "cpu:1"])(count, loader()) == [2, 2]
    assert DataParallel(nn.Linear(2, 1), ["cpu:0", "cpu:1"])(count, loader()) == [2, 2]
"""


def run(directory: Path, script: str, *command: str) -> str:
    """What the script writes to stderr, by a fresh interpreter that makes errors of warnings."""
    (directory / "train.py").write_text(script)
    # No `unisono warm` of this user's; and short, since loader workers pass memory by sockets in it.
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": tempfile.mkdtemp(prefix="uni-")}
    done = subprocess.run(
        [sys.executable, "-W", "error", *command, "train.py"],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_example_of_the_readme_causes_no_warning_on_two_ranks(tmp_path: Path) -> None:
    errors = run(tmp_path, EXAMPLE, "-m", "unisono", "run", "-n", "2", "--backend", "cpu")
    assert "Warning" not in errors


def test_workers_strategies_and_replicas_cause_no_warning(tmp_path: Path) -> None:
    assert "Warning" not in run(tmp_path, SPAWNED)
