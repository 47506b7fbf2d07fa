"""Replica threads on the XLA devices of a process: any program, any failure, and the process continues."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from faults import SOON_S
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import DataParallel, all_reduce, current_world, optimizer_step, rank
from unisono.errors import BusyError


class BoomError(Exception):
    pass


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def loader(samples: int, batch: int = 4) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 6, generator=numbers)
    return DataLoader(TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=numbers)), batch)


def train(model: nn.Module, batches: Any, device: torch.device, context: Any, disturb: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        if disturb is not None:
            disturb(number, outputs, loss)
        optimizer_step(optimizer)
        losses.append(loss.item())
    return losses


def weights(replicas: DataParallel) -> list[torch.Tensor]:
    return [each.detach().cpu() for each in replicas.models[0].parameters()]


def plain_weights(ranks: int, samples: int) -> list[torch.Tensor]:
    """The same steps on one device: each takes the samples of a round of batches."""
    model, step = network(), ranks * 4
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    inputs, targets = loader(samples).dataset.tensors  # type: ignore[attr-defined]
    for start in range(0, samples, step):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[start : start + step]), targets[start : start + step]).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def _reads(number: int, outputs: torch.Tensor, kept: list[Any]) -> None:
    if rank() == 0:
        outputs.argmax(1).tolist()


def _computes(number: int, outputs: torch.Tensor, kept: list[Any]) -> None:
    if rank() == 0:
        kept.append([outputs.detach() * 2, outputs.exp().sum()])  # and leaves it unread


def _computes_by_rank(number: int, outputs: torch.Tensor, kept: list[Any]) -> None:
    kept.append(outputs.detach()[: 1 + (rank() + number) % 3].sum() * rank())


@pytest.mark.parametrize("beside", [_reads, _computes, _computes_by_rank])
def test_what_only_some_ranks_do_changes_nothing(devices, beside):
    kept: list[Any] = []
    samples = len(devices) * 4 * 4
    replicas = DataParallel(network, devices)

    def disturbed(*args: Any) -> None:
        train(*args, disturb=lambda number, outputs, loss: beside(number, outputs, kept))

    replicas(disturbed, loader(samples))
    torch.testing.assert_close(weights(replicas), plain_weights(len(devices), samples), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moment", ["before the forward pass", "before the step", "instead of a collective"])
def test_a_replica_that_fails_is_its_own_error_and_the_process_goes_on(devices, moment):
    samples = len(devices) * 4 * 4
    replicas = DataParallel(network, devices)

    def fails(model: nn.Module, batches: Any, device: torch.device, context: Any) -> None:
        if rank() == fails.culprit and moment == "before the forward pass":
            raise BoomError("in replica")

        def disturb(number: int, outputs: torch.Tensor, loss: torch.Tensor) -> None:
            if moment == "instead of a collective" and number == 1 and rank() != fails.culprit:
                all_reduce(loss.detach().clone())
            if number == 1 and rank() == fails.culprit:
                raise BoomError("in replica")

        train(model, batches, device, context, disturb)

    for fails.culprit in range(len(devices)):
        began = time.monotonic()
        with pytest.raises(BoomError, match="in replica") as failure:
            replicas(fails, loader(samples))
        assert time.monotonic() - began < SOON_S  # and not after a fallback; the first time it compiles
        assert f"rank {fails.culprit} of {len(devices)}, xla:{fails.culprit}" in failure.value.__notes__[0]
    fresh = DataParallel(network, devices)
    fresh(train, loader(samples))
    torch.testing.assert_close(weights(fresh), plain_weights(len(devices), samples), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_one_number_for_all_elements_is_reduced_rightly(devices):
    def steps(*_: Any) -> list[float]:
        weights = nn.Parameter(torch.ones(4, device=current_world().device))
        (weights.sum() * (rank() + 1)).backward()
        optimizer_step(torch.optim.SGD([weights], 1.0))
        return weights.tolist()

    count = len(devices)
    assert DataParallel(network, devices)(steps, []) == [[1 - (count + 1) / 2] * 4] * count


def test_some_of_the_devices_reduce_through_main_memory(devices):
    if len(devices) < 3:
        pytest.skip("all devices of this process are two")
    replicas = DataParallel(network, devices[:2])
    replicas(train, loader(33))
    torch.testing.assert_close(weights(replicas), plain_weights(2, 33), rtol=1e-5, atol=1e-6)


def test_two_objects_take_turns_at_a_device(devices):
    """Two threads that record on one device end the process."""
    first, second = DataParallel(network, devices), DataParallel(network, devices[-1:])
    has_begun, may_end = threading.Event(), threading.Event()
    told: list[Any] = []

    def waits(*_: Any) -> float:
        has_begun.set()
        may_end.wait()
        return all_reduce(torch.ones(1, device=current_world().device)).item()

    calling = threading.Thread(target=lambda: told.extend(first(waits, [])))
    calling.start()
    has_begun.wait()
    try:
        refused = f"xla:{len(devices) - 1} is used by another DataParallel"
        with pytest.raises(BusyError, match=refused):
            second(train, loader(8))
        with pytest.raises(BusyError, match=refused):
            DataParallel(network, devices[-1:])
    finally:
        may_end.set()
        calling.join()
    assert told == [float(len(devices))] * len(devices)
    second(train, loader(8))
    torch.testing.assert_close(weights(second), plain_weights(1, 8), rtol=1e-5, atol=1e-6)
