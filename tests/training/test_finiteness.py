"""The first loss or gradient that is not finite is said once, with its rank, step and batch; and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_syncs import on_stand_in
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from torch.utils.data import DataLoader, TensorDataset
from twin import CLOSE, data, loader_of, mean_loss, model, sgd

from unisono import Accelerator, DeviceLoader, backward, gather_report, optimizer_step
from unisono.report.text import table_of

MODES = pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
BAD = 15  # a sample of the third step of 6 samples; of the second rank of two


def poisoned(samples: int = 24) -> TensorDataset:
    inputs, *others = data(samples).tensors
    inputs[BAD] = torch.nan
    return TensorDataset(inputs, *others)


def train(
    learn: Callable[[Accelerator, torch.Tensor], Any] = lambda accelerator, loss: accelerator.backward(loss),
    step: Callable[[Accelerator, Any, Any], Any] = lambda accelerator, network, optimizer: optimizer.step(),
    batches: Callable[[], Any] = poisoned,
    **options: Any,
) -> Any:
    accelerator = Accelerator(split_batches=True, **options)
    network = model()
    loader = DataLoader(batches(), batch_size=6)
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for _ in range(2):
        for batch in loader:
            learn(accelerator, mean_loss(network, batch))
            step(accelerator, network, optimizer)
            optimizer.zero_grad()
    return network.state_dict()


def said(caplog: Any, capfd: Any) -> list[str]:
    lines = (caplog.text + capfd.readouterr().err).splitlines()
    return [line for line in lines if "is NaN or infinite in step" in line]


@MODES
def test_a_loss_is_named_with_its_rank_and_step(mode: Mode, caplog, capfd) -> None:  # type: ignore[no-untyped-def]
    def body() -> str:
        train()
        report = gather_report()
        return "" if report is None else table_of(report)

    report, *_ = mode.run(body)
    first, *others = said(caplog, capfd)
    assert f"the loss of rank {mode.ranks - 1} is NaN or infinite in step 3 (batch 3 of its loop);" in first
    # Rank zero of two, on whose parameters it was in the next step.
    assert len(others) == mode.ranks - 1
    assert all(
        "the loss of rank 0 is NaN or infinite in step 4 (batch 4 of its loop), and param" in it for it in others
    )
    assert f"from step 3 on: rank {mode.ranks - 1} has met it first" in report


@pytest.mark.parametrize(("mode", "strategy"), [(SOLO, "ddp"), (THREADS_2, "ddp"), (PROCESSES_2, "fsdp")], ids=str)
def test_a_gradient_of_plain_backward_is_too(mode: Mode, strategy: str, caplog, capfd) -> None:  # type: ignore[no-untyped-def]
    mode.run(lambda: train(lambda accelerator, loss: loss.backward(), strategy=strategy) and None)
    [line] = said(caplog, capfd)
    assert (
        "a gradient that was reduced (with accelerator.backward(loss) the line would name the rank) is NaN or" in line
    )
    assert "in step 3 (batch 3 of its loop);" in line


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_gradient_of_a_finite_loss_shows_in_the_next_step(mode: Mode, caplog, capfd) -> None:  # type: ignore[no-untyped-def]
    def spoil(accelerator: Accelerator, loss: torch.Tensor) -> None:
        accelerator.backward(loss + (loss * 0).sqrt())  # whose gradient is 0 times infinity

    mode.run(lambda: train(spoil, batches=lambda: data(24)) and None)
    [line] = said(caplog, capfd)
    assert (
        "the loss of rank 0 is NaN or infinite in step 2 (batch 2 of its loop), and parameters are so already" in line
    )


def leave_out(accelerator: Any, network: Any, optimizer: Any) -> None:
    norm = accelerator.clip_grad_norm_(network, 10.0)
    if norm is None or norm.isfinite():
        optimizer.step()


@pytest.mark.parametrize(("mode", "accumulate"), [(SOLO, 1), (THREADS_2, 2), (PROCESSES_2, 1)], ids=str)
def test_the_way_out_leaves_such_steps_out_on_all_ranks(mode: Mode, accumulate: int) -> None:
    states = mode.run(lambda: train(step=leave_out, gradient_accumulation_steps=accumulate))
    network = model()
    optimizer = sgd(network.parameters())
    windows = [[*range(start, start + 6 * accumulate)] for start in range(0, 24, 6 * accumulate)]
    for window in [each for each in windows if BAD not in each] * 2:
        mean_loss(network, [each[window] for each in data(24).tensors]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in states:
        torch.testing.assert_close(state, network.state_dict(), **CLOSE)


def by_hand() -> None:
    network = model()
    optimizer = sgd(network.parameters())
    for batch in DeviceLoader(DataLoader(poisoned(), batch_size=6), split="global"):
        backward(mean_loss(network, batch))
        optimizer_step(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", [THREADS_2], ids=str)
def test_a_loss_by_hand_is_named(mode: Mode, caplog, capfd) -> None:  # type: ignore[no-untyped-def]
    mode.run(by_hand)
    assert f"the loss of rank {mode.ranks - 1} is NaN or infinite in step 3 (batch 3" in said(caplog, capfd)[0]


def test_fp16s_overflows_and_losses_over_no_samples_are_none(caplog, capfd) -> None:  # type: ignore[no-untyped-def]
    def body() -> None:
        accelerator = Accelerator()
        network = model()
        loader = loader_of(3, 2)  # the second rank has nothing in the last batch of two
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
        for inputs, targets, _ in loader:
            kept = loader.valid_samples * (accelerator.process_index == 0)
            errors = (network(inputs) - targets)[:kept]
            accelerator.backward(errors.square().mean(), weight=kept)
            optimizer.step()
            optimizer.zero_grad()

    def overflow() -> None:
        options = {"init_scale": 2.0**120, "growth_interval": 1}
        train(mixed_precision="fp16", scaler_options=options, batches=lambda: data(24))

    THREADS_2.run(body)
    overflow()
    assert said(caplog, capfd) == []


def test_on_an_accelerator_it_is_named_some_steps_later(caplog) -> None:  # type: ignore[no-untyped-def]
    def numbers() -> TensorDataset:
        return TensorDataset(*(each.float() for each in poisoned(24).tensors))

    with on_stand_in():
        accelerator = Accelerator()
        network = model().float()
        network, optimizer, loader = accelerator.prepare(
            network, sgd(network.parameters()), DataLoader(numbers(), batch_size=6)
        )
        for _ in range(10):
            for batch in loader:
                accelerator.backward(mean_loss(network, batch))
                optimizer.step()
                optimizer.zero_grad()
    [line] = [each for each in caplog.text.splitlines() if "is NaN or infinite" in each]
    assert "the loss of rank 0 is NaN or infinite in step 3 (batch 3 of its loop);" in line
