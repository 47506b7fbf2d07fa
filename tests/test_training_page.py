"""What the pages on training show runs; the loop before its changes trains the same weights as the one after them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_scripts
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, Mode
from test_code_blocks import sides
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, barrier, is_rank_zero, world_size

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "training.md").read_text()
STRATEGIES_PAGE = (DOCS / "strategies.md").read_text()
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE + STRATEGIES_PAGE, re.DOTALL)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)

SAVE = "\ntorch.save(model.state_dict(), f\"weights-{os.environ.get('RANK', 0)}.pt\")\n"


def names(path: Path) -> dict[str, Any]:
    """What a block of the pages finds: objects that nobody has prepared, over 107 samples."""
    torch.manual_seed(0)
    with HOST:
        x, y, mask = torch.randn(107, 8), torch.randint(3, (107,)), torch.randint(2, (107,)).float()
        model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = 12 // world_size()
    return {
        "torch": torch,
        "F": F,
        "barrier": barrier,
        "is_rank_zero": is_rank_zero,
        "path": path,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        "loader": DataLoader(TensorDataset(x, y), batch_size=size),
        "masked_loader": DataLoader(TensorDataset(x, y, mask), batch_size=size),
    }


def run_blocks(path: Path, strategy: str = "ddp") -> list[dict[str, torch.Tensor]]:
    """The state of the model behind each block; rank zero's."""
    found = []
    for number, block in enumerate(BLOCKS):
        scope = names(path / f"{strategy}-{number}.pt")
        scope["Accelerator"] = partial(Accelerator, strategy=strategy)
        exec(compile(block, f"docs/training.md and strategies.md, block {number}", "exec"), scope)
        found.append(scope["accelerator"].state_dict(scope["model"]))
    return found


@pytest.mark.parametrize(
    ("mode", "strategies"),
    [
        pytest.param(THREADS_2, ["ddp"], marks=pytest.mark.any_family, id="threads"),
        pytest.param(PROCESSES_2, ["ddp", "zero1", "fsdp"], marks=pytest.mark.slow, id="processes"),
    ],
)
def test_each_block_trains_what_one_device_does(mode: Mode, strategies: list[str], tmp_path: Path) -> None:
    (expected,) = SOLO.run(lambda: run_blocks(tmp_path))
    for found in mode.run(lambda: [run_blocks(tmp_path, each) for each in strategies])[0]:
        for block, weights, wanted in zip(BLOCKS, found, expected, strict=True):
            rounding = 2.0 ** (-8 if "bf16" in block or "Muon" in block else -23)  # Muon computes in bf16
            torch.testing.assert_close(weights, dict(wanted), rtol=0, atol=8 * rounding)


def run_script(text: str, directory: Path, *launcher: str) -> list[dict[str, torch.Tensor]]:
    """The weights that each rank ends with."""
    directory.mkdir()
    (directory / "script.py").write_text("import os\n" + text + SAVE)
    if launcher:
        code, _, errors = warm_scripts.launch(directory, *launcher, "script.py")
    else:
        code, _, errors = warm_scripts.complete(directory / "script.py", directory=directory)
    assert code == 0, errors
    return [torch.load(path) for path in sorted(directory.glob("weights-*.pt"))]


@pytest.mark.slow
def test_the_changed_script_trains_the_plain_ones_weights_on_two_processes(tmp_path: Path) -> None:
    before, after = sides(DIFF)
    (plain,) = run_script(before.replace("batch_size=10", "batch_size=20"), tmp_path / "plain")
    ranks = run_script(after, tmp_path / "changed", "run", "--nproc", "2")
    assert len(ranks) == 2
    for weights in ranks:
        torch.testing.assert_close(weights, plain)


def test_no_more_lines_change_than_in_the_document_it_is_modelled_on() -> None:
    added, removed = ([line for line in DIFF.splitlines() if line.startswith(sign)] for sign in "+-")
    assert (len(added), len(removed)) == (5, 4)


def test_every_argument_is_in_the_table() -> None:
    table = PAGE.partition("## Arguments")[2].partition("\n## ")[0]
    asked = set(Accelerator.__init__.__annotations__) - {"return", "world", "cpu"}
    assert asked == {name for row in table.splitlines()[4:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
