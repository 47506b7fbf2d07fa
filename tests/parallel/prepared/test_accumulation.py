"""Sums of several batches' gradients, batches of nothing, and loops that nobody knows the end of."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, Mode, fitting
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from twin import CLOSE, seeded

from unisono import Accelerator, backward


def samples(count: int, seed: int = 0) -> TensorDataset:
    numbers = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(count, 4, generator=numbers, dtype=torch.float64, device=HOST).split([3, 1], 1)
    return TensorDataset(inputs, targets)


def network() -> nn.Module:
    with HOST:
        return seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double())


def loss_of(model: nn.Module, data: TensorDataset, first: int, last: int) -> torch.Tensor:
    inputs, targets = data[first:last]
    return F.mse_loss(model(inputs), targets)


def close(model: nn.Module, expected: nn.Module) -> bool:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.allclose(got.cpu(), want, **CLOSE) for got, want in pairs)


@pytest.mark.any_family
@pytest.mark.parametrize("skips_sync", [False, True])
@pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)
def test_a_sum_of_batches_weighs_each_sample_of_an_uneven_tail_the_same(mode: Mode, skips_sync: bool) -> None:
    def train() -> bool:
        data, accelerator, model = samples(11), Accelerator(), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
        for place, (inputs, targets) in enumerate(loader):
            with accelerator.no_sync(model) if skips_sync and place == 1 else nullcontext():
                F.mse_loss(model(inputs), targets).backward()
            if place != 1:  # the first batch alone, then two
                optimizer.step()
                optimizer.zero_grad()
        plain = network()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for parts in ([(0, 4)], [(4, 8), (8, 11)]):
            other.zero_grad()
            for first, last in parts:
                loss_of(plain, data, first, last).backward()
            other.step()
        return close(model, plain)

    assert all(mode.run(train))


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_the_number_of_microbatches_may_change_between_the_steps_of_two_optimizers(mode: Mode) -> None:
    def train() -> bool:
        data, accelerator = samples(4 * mode.ranks), Accelerator(gradient_accumulation_steps=2)
        model, other = network(), network()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
        loader: Any = DataLoader(data, batch_size=2)
        model, other, first, second, loader = accelerator.prepare(model, other, *optimizers, loader)
        for inputs, targets in loader:
            accelerator.backward(F.mse_loss(model(inputs), targets) + F.mse_loss(other(inputs), targets))
            first.step()
            if accelerator.sync_gradients:
                accelerator.gradient_accumulation_steps = 1
            second.step()
        plain = network()
        loss_of(plain, data, 0, len(data)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        return close(model, plain) and close(other, plain)

    assert all(mode.run(train))


def test_a_batch_left_out_behind_its_backward_leaves_the_next_ones_weight() -> None:
    def train() -> bool:
        data, accelerator, model = samples(7), Accelerator(), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        plain = network()
        loss_of(plain, data, 4, 7).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        return close(model, plain)

    assert all(THREADS_2.run(train))


@pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)
def test_backward_passes_that_go_past_the_prepared_model_are_weighed_and_reduced_too(mode: Mode) -> None:
    def train() -> bool:
        data, accelerator, model = samples(7), Accelerator(gradient_accumulation_steps=2), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(accelerator.unwrap_model(model)(inputs), targets).backward()
            optimizer.step()
        plain = network()
        loss_of(plain, data, 0, 7).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        return close(model, plain)

    assert all(mode.run(train))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)
def test_a_loop_of_evaluation_that_stays_open_takes_no_step_s_weight(mode: Mode, accumulate: int) -> None:
    def train() -> bool:
        data, accelerator, model = samples(14), Accelerator(gradient_accumulation_steps=accumulate), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader, validation = accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=2), DataLoader(samples(40, seed=3), batch_size=2)
        )
        others = iter(validation)
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            with torch.no_grad():
                model(next(others)[0])
        plain = network()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for first in range(0, 14, 4 * accumulate):
            other.zero_grad()
            loss_of(plain, data, first, first + 4 * accumulate).backward()
            other.step()
        del others
        return close(model, plain)

    assert all(mode.run(train))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("strategy", ["threads", "ddp", "fsdp"])
def test_a_mean_over_nothing_with_the_weight_0_spreads_no_nan(strategy: str, is_last: bool) -> None:
    def train() -> bool:
        accelerator = Accelerator(gradient_accumulation_steps=2, strategy="fsdp" if strategy == "fsdp" else "ddp")
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for place in range(2):
            with accelerator.accumulate():
                inputs, targets = samples(4, seed=place)[:]
                counts = torch.full((4, 1), float(accelerator.world.rank == 0 or (place == 1) != is_last))
                optimizer.zero_grad()
                loss = ((model(inputs) - targets).pow(2) * counts).sum() / counts.sum()
                backward(loss, counts.sum())
                optimizer.step()
        return all(bool(each.isfinite().all()) for each in accelerator.state_dict(model).values())

    assert all((THREADS_2 if strategy == "threads" else PROCESSES_2).run(train))


def test_what_is_left_of_a_loop_that_is_no_prepared_one_s_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in DataLoader(samples(12), batch_size=2):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    found = [each.message for each in caplog.records if "gradient_accumulation_steps=2" in each.message]
    assert len(found) == 1
    assert "prepare(loader)" in found[0]
    assert "accumulate():" in found[0]


def test_nothing_is_told_where_blocks_are_microbatches(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in DataLoader(samples(8), batch_size=2):
        with accelerator.accumulate():
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert "gradient_accumulation_steps=2" not in caplog.text


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
def test_an_optimizer_that_is_not_prepared_steps_on_the_gradients_of_all_ranks(mode: Mode) -> None:
    def train() -> bool:
        data, accelerator, model = samples(11), Accelerator(), network()
        model, loader = accelerator.prepare(model, DataLoader(data, batch_size=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
        plain = network()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for first in range(0, 11, 2 * accelerator.world.world_size):
            other.zero_grad()
            loss_of(plain, data, first, min(first + 2 * accelerator.world.world_size, 11)).backward()
            other.step()
        return close(model, plain)

    assert all(mode.run(train))


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
def test_no_optimizer_steps_in_the_middle_of_an_accumulation(mode: Mode) -> None:
    def train() -> None:
        accelerator, model = Accelerator(gradient_accumulation_steps=2), network()
        model, loader = accelerator.prepare(model, DataLoader(samples(16), batch_size=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [each.clone() for each in model.parameters()]
        for number, (inputs, targets) in enumerate(loader):
            accelerator.backward(F.mse_loss(model(inputs), targets))
            if number == 0:
                with pytest.raises(RuntimeError, match="the SGD, which was not prepared, steps on gradients of"):
                    optimizer.step()
                assert all(map(torch.equal, before, model.parameters()))
            elif number == 1:
                optimizer.step()
                assert not any(map(torch.equal, before, model.parameters()))
                return

    mode.run(train)
