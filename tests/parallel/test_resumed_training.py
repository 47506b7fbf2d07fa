"""A run that is stopped in mid-epoch and continues over another number of devices ends with the same weights.

Compared in float64: a sum over more ranks is added up in another order, which is all that may differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from modes import FAMILY, HOST, devices
from torch.utils.data import DataLoader, Dataset

from unisono import (
    DataParallel,
    DeviceLoader,
    ParallelLoader,
    barrier,
    current_world,
    is_rank_zero,
    optimizer_step,
    spawn,
)

EPOCHS = 3
SAMPLES, GLOBAL_BATCH = 53, 12  # five rounds in an epoch, the last one of five samples


class Points(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        point = torch.randn(4, generator=draw, dtype=torch.float64)
        return point, point.sum().sin().unsqueeze(0)


def source(num_workers: int = 0) -> DataLoader:
    return DataLoader(Points(), batch_size=GLOBAL_BATCH, shuffle=True, num_workers=num_workers)


def network() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def train(model: torch.nn.Module, epoch: Any, loader: Any, checkpoint: Path, stop_after: int | None) -> None:
    """Go on from the checkpoint, if there is one, for so many steps, or to the end; then write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if checkpoint.exists():
        saved = torch.load(checkpoint, HOST, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step, (x, y) in enumerate(epoch, start=1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer_step(optimizer)
        if step == stop_after:
            break
    barrier()
    if is_rank_zero():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, checkpoint)


def loader_state(checkpoint: Path) -> dict[str, Any] | None:
    return torch.load(checkpoint, HOST, weights_only=True)["loader"] if checkpoint.exists() else None


def on_one_rank(index: int, checkpoint: Path, stop_after: int | None, num_workers: int = 0) -> None:
    """One pass of a process, or of a plain script."""
    loader = DeviceLoader(source(num_workers), split="global")
    if state := loader_state(checkpoint):
        loader.load_state_dict(state)
    train(network().to(current_world().device), loader, loader, checkpoint, stop_after)


def solo(checkpoint: Path, stop_after: int | None) -> None:
    on_one_rank(0, checkpoint, stop_after)


def processes(checkpoint: Path, stop_after: int | None) -> None:
    spawn(on_one_rank, args=(checkpoint, stop_after, 1), nprocs=3, backend=FAMILY)


def threads(checkpoint: Path, stop_after: int | None) -> None:
    replicas = DataParallel(network(), devices(2))
    loader = ParallelLoader(source(), replicas.devices, split="global")
    if state := loader_state(checkpoint):
        loader.load_state_dict(state)
    replicas(lambda model, each, *_: train(model, each, each, checkpoint, stop_after), loader)


def weights(tmp_path: Path, name: str, passes: list[tuple[Any, int | None]]) -> torch.Tensor:
    """The weights after `EPOCHS` epochs made of these passes, each `(way, steps)`; the rest is solo."""
    checkpoint = tmp_path / name
    for way, stop_after in passes:
        way(checkpoint, stop_after)
    while (loader_state(checkpoint) or {"epoch": 0})["epoch"] < EPOCHS:
        solo(checkpoint, None)
    saved = torch.load(checkpoint, HOST, weights_only=True)
    return torch.cat([each.flatten() for each in saved["model"].values()])


@pytest.mark.any_family
@pytest.mark.parametrize(
    "passes",
    [
        pytest.param([(solo, 2), (threads, 1), (solo, 2), (threads, 3)], id="threads"),
        pytest.param([(processes, 3), (solo, 1), (threads, 1), (processes, None)], id="processes"),
    ],
)
def test_a_run_that_goes_on_elsewhere_ends_with_the_same_weights(tmp_path, passes):
    expected = weights(tmp_path, "whole", [])
    found = weights(tmp_path, "parts", passes)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
