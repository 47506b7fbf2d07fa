"""How often a step waits for its device: as often as docs/performance.md says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_syncs import DEVICE, Syncs, on_stand_in
from modes import FAMILY, PATIENCE
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from twin import sgd

import unisono
from unisono import Accelerator, DeviceLoader, spawn

pytestmark = pytest.mark.skipif(FAMILY != "cpu", reason="an accelerator stands in, on the CPU")

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
STEPS = 3  # behind the first two, which make buckets, but the 4th, 8th, 16th, which compare the models
LONG = 36  # for what may wait in one of many steps

Body = Callable[[], Iterator[None]]


def network_on_host() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def batches() -> DataLoader[Any]:
    count = 4 * (LONG + 10)  # for two ranks, and not to the end of a loop
    return DataLoader(TensorDataset(torch.randn(count, 5), torch.randn(count, 2)), 2)


def prepared(
    backward: Callable[..., None] = lambda accelerator, loss: accelerator.backward(loss),
    behind: Callable[..., Any] = lambda accelerator, network, loss, targets: None,
    **options: Any,
) -> Body:
    """Steps of an Accelerator; each ends at a yield."""

    def steps() -> Iterator[None]:
        accelerator = Accelerator(**options)
        network = network_on_host()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), batches())
        for inputs, targets in loader:
            loss = F.mse_loss(network(inputs), targets)
            backward(accelerator, loss)
            optimizer.step()
            optimizer.zero_grad()
            behind(accelerator, network, loss.detach(), targets)
            yield

    return steps


def by_hand() -> Iterator[None]:
    network = network_on_host().to(DEVICE)
    optimizer = sgd(network.parameters())
    for inputs, targets in DeviceLoader(batches()):
        F.mse_loss(network(inputs), targets).backward()
        unisono.optimizer_step(optimizer)
        optimizer.zero_grad()
        yield


def weighed(accelerator: Accelerator, loss: torch.Tensor) -> None:
    accelerator.backward(loss, weight=2.0 + accelerator.process_index)


def weighed_by_a_tensor(accelerator: Accelerator, loss: torch.Tensor) -> None:
    accelerator.backward(loss, weight=torch.full((), 2.0, device=DEVICE))


LINES: dict[str, Body] = {
    'strategy="ddp"': prepared(),
    'strategy="zero1"': prepared(strategy="zero1"),
    'strategy="fsdp"': prepared(strategy="fsdp"),
    "gradient_accumulation_steps=2": prepared(gradient_accumulation_steps=2),
    'mixed_precision="bf16"': prepared(mixed_precision="bf16"),
    "max_grad_norm=1.0": prepared(max_grad_norm=1.0),
    'max_grad_norm=1.0, strategy="fsdp"': prepared(max_grad_norm=1.0, strategy="fsdp"),
    "optimizer_step(optimizer)": by_hand,
    "backward(loss, weight=number)": prepared(weighed),
    "should_stop()": prepared(behind=lambda *_: unisono.should_stop()),
    "gather_for_metrics(values)": prepared(
        behind=lambda accelerator, network, loss, targets: accelerator.gather_for_metrics(targets.argmax(1))
    ),
    "gather(loss)": prepared(behind=lambda accelerator, network, loss, targets: accelerator.gather(loss)),
    "check_trigger()": prepared(behind=lambda accelerator, *_: accelerator.check_trigger()),
    'mixed_precision="fp16"': prepared(mixed_precision="fp16", scaler_options={"init_scale": 1.0}),  # no overflow
    "backward(loss, weight=tensor)": prepared(weighed_by_a_tensor),
    "check_replicas(model)": prepared(behind=lambda accelerator, network, *_: unisono.check_replicas(network)),
    "loss.item()": prepared(behind=lambda accelerator, network, loss, targets: loss.item()),
}

TAKEN = dict.fromkeys(LINES, STEPS) | dict.fromkeys(
    ('strategy="ddp"', 'strategy="zero1"', 'strategy="fsdp"', "max_grad_norm=1.0"), LONG
)


def count_all() -> dict[str, list[list[str]]]:
    """What waited in each step, by lines."""
    found = {}
    for name, body in LINES.items():
        with on_stand_in() as (_, marks), Syncs(marks) as syncs:
            steps = body()
            found[name] = []
            for number, _ in enumerate(steps, 1):
                if number & (number - 1):  # no power of two
                    found[name].append(list(syncs.found))
                if len(found[name]) == TAKEN[name]:
                    break
                syncs.found.clear()
            steps.close()
    return found


@pytest.mark.slow
def test_a_step_waits_for_its_device_as_often_as_the_table_says():
    table = PAGE.read_text().partition("## Waiting for the device")[2].partition("\n## ")[0]
    said = {name: int(count) for name, count in re.findall(r"^\| `(.+?)`.*\| (\d+) \|$", table, re.MULTILINE)}
    assert said.keys() == LINES.keys()
    for found in spawn(lambda _: count_all(), nprocs=2, cores=1, process_group="gloo", timeout=PATIENCE):
        for name, steps in found.items():
            assert [len(each) for each in steps] == [said[name]] * TAKEN[name], (name, steps)
