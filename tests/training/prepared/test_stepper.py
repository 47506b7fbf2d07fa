"""What a prepared optimizer's step notices: foreign batches, gradients that come late, schedulers stepped by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, fitting
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twin import seeded

from unisono import Accelerator, rank


def prepared(accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(nn.Linear(3, 1).double())
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("is_plain", [False, True], ids=["prepared", "plain optimizer"])
@pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)
def test_batches_that_no_loader_has_cut_are_told_of_once(mode: Mode, is_plain: bool, capfd, caplog) -> None:  # type: ignore[no-untyped-def]
    def train() -> None:
        accelerator = Accelerator()
        model, optimizer = prepared(accelerator)
        if is_plain:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (inputs,) in DataLoader(TensorDataset(torch.ones(4, 3, dtype=torch.float64)), batch_size=2):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

    mode.run(train)
    told = caplog.text + capfd.readouterr().err
    assert told.count("a step on 2 ranks without batches of a prepared loader") == 1
    assert "prepare(loader)" in told


KEPT = []


@pytest.mark.parametrize(
    ("mode", "is_plain", "every", "strategy"),
    [
        (mode, *each)
        for mode in fitting(THREADS_2, PROCESSES_2)
        for each in [(False, 2, "ddp"), (True, 1, "ddp"), (False, 1, "zero1"), (False, 2, "fsdp")]
        if mode is PROCESSES_2 or each[-1] == "ddp"  # replicas are of DDP
    ],
    ids=str,
)
def test_it_does_not_matter_when_a_rank_collects_a_replaced_optimizer(
    mode: Mode, is_plain: bool, every: int, strategy: str
) -> None:
    rows = torch.arange(48, dtype=torch.float64).view(16, 3) / 48

    def train() -> torch.Tensor:
        accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=every)
        model, optimizer = prepared(accelerator)
        loader = accelerator.prepare(DataLoader(TensorDataset(rows), batch_size=2))
        for rate in (0.1, 0.05, 0.02):
            if rate != 0.1:
                if rank() == 1:
                    KEPT.append(optimizer)
                optimizer = torch.optim.SGD(model.parameters(), lr=rate)
                if not is_plain:
                    optimizer = accelerator.prepare(optimizer)
                gc.collect()
            for (inputs,) in loader:
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        state = accelerator.state_dict(model)  # a collective; whole on rank zero
        return state["weight"] if rank() == 0 else rows

    try:
        found = mode.run(train)[0]
    finally:
        KEPT.clear()
    twin = seeded(nn.Linear(3, 1).double())
    for rate in (0.1, 0.05, 0.02):
        optimizer = torch.optim.SGD(twin.parameters(), lr=rate)
        for inputs in rows.split(4 * every):
            optimizer.zero_grad()
            twin(inputs).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(found, twin.state_dict()["weight"], rtol=1e-11, atol=1e-13)


def test_a_step_notices_that_the_scheduler_was_stepped_by_hand() -> None:
    accelerator = Accelerator()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, _ = accelerator.prepare(model, optimizer, scheduler)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    scheduler.step()
    with pytest.raises(RuntimeError, match="StepLR was stepped by hand, from 0 to 1"):
        optimizer.step()


def test_two_steps_on_one_batch_scale_each_loss() -> None:
    def train() -> int:
        accelerator, model = Accelerator(mixed_precision="fp16"), nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data)
        steps = 0
        for (inputs,) in loader:
            for _ in range(2):
                optimizer.zero_grad()
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                steps += 1
        return steps

    assert SOLO.run(train) == [4]
