"""A rank that trains a model of its own on its part of the data is told so; one whose gradients are reduced is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, each_of, hearing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from unisono import Accelerator, DeviceLoader, backward, optimizer_step

ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
TOLD = "the SGD steps again, and the ranks have exchanged nothing since its last step"

mode = each_of([THREADS_2, PROCESSES_2])


def made() -> tuple[nn.Module, torch.optim.Optimizer, DeviceLoader]:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    return model, torch.optim.SGD(model.parameters(), 0.1), DeviceLoader(DataLoader(ROWS, 2))  # type: ignore[arg-type]


def alone() -> None:
    model, optimizer, loader = made()
    for x in loader:
        model(x).mean().backward()
        optimizer.step()


def beside_an_accelerator() -> None:
    Accelerator()
    model, optimizer, _ = made()
    for x in DataLoader(ROWS, 2):  # type: ignore[arg-type]
        model(x).mean().backward()
        optimizer.step()


def by_hand() -> None:
    model, optimizer, loader = made()
    for x in loader:
        backward(model(x).mean())
        optimizer_step(optimizer)
        optimizer.zero_grad()


def of_two_optimizers() -> None:
    model, first, loader = made()
    second = torch.optim.SGD(model.parameters(), 0.01)
    for x in loader:
        model(x).mean().backward()
        optimizer_step(first)
        second.step()


def prepared(**options: Any) -> Callable[[], None]:
    def loop() -> None:
        accelerator = Accelerator(**options)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ROWS, 2))  # type: ignore[arg-type]
        for x in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()

    return loop


def by_ddp() -> None:
    model, optimizer, loader = made()
    replica = DistributedDataParallel(model)
    for x in loader:
        replica(x).mean().backward()
        optimizer.step()


def by_torchs_reduction() -> None:
    model, optimizer, loader = made()
    for x in loader:
        model(x).mean().backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
        optimizer.step()


def said(loop: Callable[[], None]) -> list[str]:
    with hearing("unisono") as found:
        loop()
    return [each for each in found if TOLD in each]


def test_steps_on_its_own_gradients_are_told_of_once_on_one_rank(mode: Mode) -> None:
    first, *others = mode.run(lambda: said(alone))
    assert len(first) == 1
    assert "call unisono.optimizer_step(optimizer) in place of optimizer.step()" in first[0]
    assert mode is THREADS_2 or others == [[]]


def test_an_accelerator_that_has_prepared_nothing_is_told_of(mode: Mode) -> None:
    first, *others = mode.run(lambda: said(beside_an_accelerator))
    assert len(first) == 1
    assert "this Accelerator has prepared nothing: each rank does all of the work, alone" in first[0]
    assert mode is THREADS_2 or others == [[]]


def test_steps_that_are_reduced_pass_in_silence(mode: Mode) -> None:
    loops = [by_hand, of_two_optimizers, prepared()]
    if mode is PROCESSES_2:  # and so do those that torch reduces for
        loops += [by_ddp, by_torchs_reduction]
    assert mode.run(lambda: [each for loop in loops for each in said(loop)]) == [[], []]


def test_on_one_device_nothing_is_said() -> None:
    assert SOLO.run(lambda: said(alone)) == [[]]
