"""torch.compile of what `prepare` returned: the user's module is compiled, as alone, and this package's code is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import Plain, State, assert_all_are, loader_of, seeded, sgd

from unisono import Accelerator

BATCH = 3


class Network(nn.Module):
    """Of a class of its own: torch compiles the frames of users' classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


def train(accelerator: Any, loader: DataLoader[Any], is_part: bool) -> tuple[State, int]:
    """The weights, and the number of graphs."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    network = seeded(Network().double(), 0)
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    computed = torch.compile((lambda inputs: network(inputs)) if is_part else network, backend=keep)
    for _ in range(2):
        for inputs, targets, _ in loader:
            accelerator.backward(F.mse_loss(computed(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return network.state_dict(), len(graphs)


@pytest.mark.parametrize("is_part", [False, True], ids=["the model", "a function that calls it"])
@pytest.mark.parametrize("mode", [SOLO, PROCESSES_2], ids=str)
def test_a_prepared_model_is_compiled_as_the_module_alone(mode: Mode, is_part: bool) -> None:
    plain, count = train(Plain(), loader_of(24, mode.ranks * BATCH), is_part)
    found = mode.run(lambda: train(Accelerator(), loader_of(24, BATCH), is_part))
    assert_all_are([state for state, _ in found], plain)
    assert [graphs for _, graphs in found] == [count] * mode.ranks


def test_replicas_may_compile_it_too() -> None:
    plain, _ = train(Plain(), loader_of(24, 2 * BATCH), False)
    assert_all_are(
        [state for state, _ in THREADS_2.run(lambda: train(Accelerator(), loader_of(24, BATCH), False))], plain
    )
