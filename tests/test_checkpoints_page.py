"""What docs/checkpoints.md shows runs, is left in the middle, and continues to the same end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import HOST, SOLO, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Checkpointer, DeviceLoader, backward, current_world, optimizer_step, world_size

PAGE = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STOPPED, IN_EVALUATION, BY_HAND = 1, 2, 3
SAMPLES = 106


class LeftError(Exception):
    """The loop is left."""


class Counts:
    """Of right and of seen samples."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def add(self, right: torch.Tensor, seen: int) -> None:
        self.right, self.seen = self.right + int(right), self.seen + seen

    def state_dict(self) -> dict[str, int]:
        return {"right": self.right, "seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.right, self.seen = state["right"], state["seen"]


def names(path: Path, leave_after: int | None, number: int) -> dict[str, Any]:
    """What a block of the page finds; the network raises in the forward pass after so many, or a stop is asked for."""
    torch.manual_seed(0)
    with HOST:
        x, y = torch.randn(SAMPLES, 8), torch.randint(3, (SAMPLES,))
        model = nn.Linear(8, 3)
    if number == BY_HAND:
        model.to(current_world().device)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == leave_after:
            raise LeftError

    def is_asked() -> bool:
        nonlocal passes
        passes += 1
        return passes == leave_after

    if number != STOPPED:
        model.register_forward_pre_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(x, y)
    return {
        "F": F,
        "Accelerator": Accelerator,
        "Checkpointer": Checkpointer,
        "accuracy": lambda model: float(model.weight.detach().sum()),
        "backward": backward,
        "batches": DeviceLoader(DataLoader(data, 24 // world_size(), shuffle=True)),
        "counts": Counts(),
        "loader": DataLoader(data, 24 // world_size(), shuffle=True),
        "model": model,
        "optimizer": optimizer,
        "optimizer_step": optimizer_step,
        "path": path,
        "should_stop": is_asked,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        "test_loader": DataLoader(data, 24 // world_size()),
    }


def run_block(number: int, path: Path, leave_after: int | None = None) -> dict[str, Any]:
    scope = names(path, leave_after, number)
    exec(compile(BLOCKS[number], f"docs/checkpoints.md, block {number}", "exec"), scope)
    return scope


def state_of(scope: dict[str, Any]) -> tuple[torch.Tensor, dict[str, int]]:
    weight = torch.cat([each.detach().flatten() for each in scope["model"].parameters()])
    return weight, scope["counts"].state_dict()


@pytest.mark.any_family
@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
@pytest.mark.parametrize(("number", "leave_after"), [(0, 8), (STOPPED, 8), (IN_EVALUATION, 8), (BY_HAND, 4)])
def test_each_block_goes_on_where_it_was_left(mode: Mode, number: int, leave_after: int, tmp_path: Path) -> None:
    if mode is THREADS_2 and number == BY_HAND:
        pytest.skip("a network that stops amid a step leaves the other replica waiting at another place")
    whole = mode.run(lambda: state_of(run_block(number, tmp_path / "whole")))
    with pytest.raises(SystemExit if number == STOPPED else LeftError):
        mode.run(lambda: run_block(number, tmp_path / "parts", leave_after))
    parts = mode.run(lambda: state_of(run_block(number, tmp_path / "parts")))
    for (weights, counts), (expected, wanted) in zip(parts, whole, strict=True):
        assert counts == wanted
        assert counts["seen"] == (2 * SAMPLES if number == IN_EVALUATION else 0)
        assert torch.equal(weights, expected)


def test_there_are_the_blocks_that_are_run() -> None:
    assert len(BLOCKS) == 4
    assert "if should_stop():" in BLOCKS[STOPPED]
    assert "optimizer_step(optimizer)" in BLOCKS[BY_HAND]
    assert "must_exist=False)  # resume the latest, if there is one" in BLOCKS[0]
    assert "score=accuracy(model))  # save the best model" in BLOCKS[0]
