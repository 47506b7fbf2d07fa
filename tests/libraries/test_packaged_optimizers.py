"""Optimizers from outside torch, as their packages have them, step as on one device under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import on
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator
from unisono.strategies import FSDP, Options, ZeRO1

Make = Callable[[nn.Sequential], torch.optim.Optimizer]


def network_and_rows() -> tuple[nn.Sequential, TensorDataset]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return network, TensorDataset(torch.randn(24, 8), torch.randint(4, (24,)))


def muon(network: nn.Sequential) -> torch.optim.Optimizer:
    """Matrices by Muon, the head and the biases by Adam, as its README says."""
    from muon import SingleDeviceMuonWithAuxAdam

    hidden = [network[0].weight, network[2].weight]
    others = [network[0].bias, network[2].bias, *network[4].parameters()]
    return SingleDeviceMuonWithAuxAdam(
        [{"params": hidden, "use_muon": True, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 0.01}]
    )


def lion(network: nn.Sequential) -> torch.optim.Optimizer:
    from lion_pytorch import Lion

    return Lion(network.parameters(), lr=1e-3, weight_decay=0.01)


def alone(make: Make) -> dict[str, torch.Tensor]:
    """The weights by a plain loop on one device."""
    network, rows = network_and_rows()
    optimizer = make(network)
    for _ in range(2):
        for inputs, labels in DataLoader(rows, 8):
            optimizer.zero_grad()
            cross_entropy(network(inputs), labels).backward()
            optimizer.step()
    return network.state_dict()


def weights(strategies: list[str | Options], make: Make) -> list[dict[str, torch.Tensor]]:
    """Those that each strategy trains, with the batches of the plain loop."""
    found = []
    for strategy in strategies:
        accelerator = Accelerator(strategy=strategy, virtual_ranks=4)
        network, rows = network_and_rows()
        model, optimizer, loader = accelerator.prepare(network, make(network), DataLoader(rows, 2))
        for _ in range(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                accelerator.backward(cross_entropy(model(inputs), labels))
                optimizer.step()
        found.append(accelerator.state_dict(model))
    return found


@pytest.mark.parametrize(
    ("package", "make", "option"),
    [("muon", muon, {"per_parameter_optimizer": True}), ("lion_pytorch", lion, {"elementwise_optimizer": True})],
    ids=["muon", "lion"],
)
def test_an_optimizer_of_another_package_steps_as_on_one_device(package: str, make: Make, option: Any) -> None:
    pytest.importorskip(package)
    strategies: list[str | Options] = ["ddp", ZeRO1(**option), FSDP(**option)]
    (one,) = weights(["ddp"], make)
    torch.testing.assert_close(one, alone(make), rtol=0, atol=2e-3)  # Muon multiplies in bf16
    for each in on(2, lambda: weights(strategies, make)):
        torch.testing.assert_close(each, one, rtol=0, atol=0)
