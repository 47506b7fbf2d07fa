"""How many graphs are compiled: as many as there are distinct shapes and programs, whatever the epochs and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, DataParallel, barrier, current_world, gather_report, optimizer_step, rank
from unisono.compat.placement import compiled as compiled_function
from unisono.devices import get_backend


def compiled() -> int:
    return get_backend("xla").counters()["graphs compiled"]


def loader(samples: int, batch: int) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, 5), torch.randint(0, 3, (samples,)))
    return DataLoader(data, batch, shuffle=True)


def epoch(model: nn.Module, batches: Any, device: torch.device, context: Any) -> None:
    make = lambda: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)  # noqa: E731
    optimizer = context.getattr_or("optimizer", make)
    for inputs, targets in batches:
        optimizer.param_groups[0]["lr"] *= 0.99
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer_step(optimizer)


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()


def width() -> int:
    """Another one for each test: graphs stay compiled as long as the process lives."""
    width.last += 1
    return width.last


width.last = 20


@pytest.mark.parametrize("tail", [0, 1])
def test_from_the_second_epoch_on_nothing_is_compiled(devices, tail):
    size = width()
    replicas = DataParallel(nn.Sequential(nn.Linear(5, size), nn.ReLU(), nn.Linear(size, 3)), devices)
    replicas(lambda *_: barrier(), [])  # where the devices are joined, once in a process
    batches = loader(len(devices) * 4 * 3 + tail * len(devices), 4)
    before = compiled()
    replicas(epoch, batches)
    first = compiled() - before
    # Forward, backward and flat gradients, once for each shape; the reduction; the first step, which makes the
    # momentum, and every other one. Where the ranks compare their models, nothing.
    assert first == 1 + tail + 1 + 2
    for _ in range(2):
        replicas(epoch, batches)
    assert compiled() - before == first


def test_one_device_needs_one_graph_per_shape_and_one_for_the_first_step(devices):
    size = width()
    accelerator = Accelerator(device=devices[0])
    model = nn.Sequential(nn.Linear(5, size), nn.ReLU(), nn.Linear(size, 3))
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), loader(4 * 3 + 2, 4)
    )
    before = compiled()
    for _ in range(3):
        train(accelerator, model, optimizer, batches)
    assert compiled() - before == 3
    report = gather_report(accelerator.world)
    assert report is not None
    assert report.counters["graphs compiled"] == compiled()
    assert "A lazy device computes where its graph is cut" in report.verdict or "-bound" in report.verdict


def graphs_of(make_optimizer: type[torch.optim.Optimizer], device: torch.device) -> int:
    """Compiled in ten steps."""
    size = width()
    accelerator = Accelerator(device=device)
    model = nn.Linear(5, size)
    model, optimizer, batches = accelerator.prepare(model, make_optimizer(model.parameters()), loader(4 * 10, 4))
    before = compiled()
    train(accelerator, model, optimizer, batches)
    return compiled() - before


@pytest.mark.parametrize(("make_optimizer", "graphs"), [(torch.optim.Adam, 2), (torch.optim.RAdam, 3)])
def test_an_optimizer_needs_a_graph_for_its_first_step_and_each_step_rule(devices, make_optimizer, graphs):
    """RAdam rectifies its steps from the sixth on (Liu et al., 2020: from rho_t > 5 on; torch's beta2 of 0.999)."""
    assert graphs_of(make_optimizer, devices[0]) == graphs


def test_a_schedule_and_weights_of_nought_and_one_compile_nothing_new(devices):
    size = width()
    accelerator = Accelerator(device=devices[0])
    model = nn.Sequential(nn.Linear(5, size), nn.ReLU(), nn.Linear(size, 3))
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 1.0, momentum=0.5), loader(4 * 6, 4)
    )
    for number, batch in enumerate([*batches, *batches]):
        optimizer.param_groups[0]["lr"] = (1.0, 0.5, 0.1)[number % 3]
        train(accelerator, model, optimizer, [batch])
        if number == 2:
            before = compiled()
    assert compiled() == before


def test_a_compiled_function_is_one_program_for_each_shape_on_all_devices(devices):
    size = width()

    @compiled_function
    def energies(inputs: torch.Tensor, factor: float) -> torch.Tensor:
        return (inputs * factor).exp().sum(1) / size

    def loop(*_: Any) -> list[list[float]]:
        device = current_world().device
        found = []
        for number in range(4):
            inputs = torch.full((2 + number % 2, size), float(number)).to(device)
            beside = inputs + rank()  # what is recorded before the call is no part of the program
            found.append(energies(inputs, 0.5 + rank()).tolist())
            assert beside.sum().item() == inputs.numel() * (number + rank())
        return found

    replicas = DataParallel(nn.Identity(), devices)
    replicas(loop, [])
    before, found = compiled(), get_backend("xla").counters()["graphs found compiled"]
    for own, result in enumerate(replicas(loop, [])):
        for number, values in enumerate(result):
            expected = torch.full((2 + number % 2,), number * (0.5 + own)).exp()
            torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-6)
    assert compiled() == before
    assert get_backend("xla").counters()["graphs found compiled"] >= found + 4 * len(devices)


def test_replicas_that_come_at_once_compile_a_program_once(devices):
    size = width()
    program = compiled_function(lambda inputs: inputs.sin() * size)

    def once(*_: Any) -> None:
        inputs = torch.ones(3, size).to(current_world().device)
        barrier()
        program(inputs)

    replicas = DataParallel(nn.Identity(), devices)
    replicas(lambda *_: barrier(), [])
    before = compiled()
    replicas(once, [])
    assert compiled() == before + 1
