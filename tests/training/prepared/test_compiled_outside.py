"""torch.compile of what `prepare` returned: the user's module is compiled, as alone, and this package's code is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, devices
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import Plain, State, assert_all_are, loader_of, seeded, sgd, whole

from unisono import Accelerator, DataParallel, optimizer_step

BATCH = 3


class Perceptron(nn.Module):
    """Of a class of its own: torch compiles the frames of users' classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


class Transformer(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Linear(1, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer(self.embedding(inputs[..., None])).mean(2))


def sequence() -> nn.Module:
    """Of a class of torch's own, whose frames torch does not compile."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch.compiler.reset()


def train(
    accelerator: Any, loader: DataLoader[Any], make: Any, is_part: bool = False, epochs: int = 2
) -> tuple[State, int]:
    """The weights, and the number of graphs. A break in one is an error, unless the model is a part of a function."""
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    network = seeded(make().double(), 0)
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    computed = torch.compile(
        (lambda inputs: network(inputs)) if is_part else network, backend=keep, fullgraph=not is_part
    )
    for _ in range(epochs):
        for inputs, targets, _ in loader:
            accelerator.backward(F.mse_loss(computed(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        network.eval()
        with torch.no_grad():
            computed(inputs)
        network.train()
    return whole(network), len(graphs)


@pytest.mark.parametrize(
    ("mode", "strategy", "networks"),
    [
        pytest.param(SOLO, "ddp", [sequence, Transformer], id="one rank"),
        pytest.param(THREADS_2, "ddp", [Perceptron], id="threads"),
        pytest.param(PROCESSES_2, "ddp", [sequence], id="ddp", marks=pytest.mark.slow),
        pytest.param(PROCESSES_2, "zero1", [Perceptron], id="zero1"),
        pytest.param(PROCESSES_2, "fsdp", [Transformer], id="fsdp"),
    ],
)
def test_a_prepared_model_is_compiled_as_the_module_alone(mode: Mode, strategy: str, networks: Any) -> None:
    plain = [train(Plain(), loader_of(24, mode.ranks * BATCH), each) for each in networks]
    assert [graphs for _, graphs in plain] == [2] * len(networks)  # for training and evaluation
    torch.compiler.reset()
    found = mode.run(lambda: [train(Accelerator(strategy=strategy), loader_of(24, BATCH), each) for each in networks])
    for number, (state, graphs) in enumerate(plain):
        assert_all_are([rank[number][0] for rank in found], state)
        assert [rank[number][1] for rank in found] == [graphs] * mode.ranks


def test_so_is_one_that_a_compiled_function_calls() -> None:
    plain, found = (train(each, loader_of(24, BATCH), Perceptron, True) for each in (Plain(), Accelerator()))
    assert_all_are([found[0]], plain[0])
    assert found[1] == plain[1]


def test_replicas_may_be_compiled_by_hand_too() -> None:
    def loop(replica: nn.Module, loader: Any, *_: Any) -> State:
        computed, optimizer = torch.compile(replica, backend="eager", fullgraph=True), sgd(replica.parameters())
        for inputs, targets, _ in loader:
            F.mse_loss(computed(inputs), targets).backward()
            optimizer_step(optimizer)
            optimizer.zero_grad()
        return whole(replica)

    found = DataParallel(seeded(Perceptron().double()), devices(2))(loop, loader_of(24, BATCH))
    assert_all_are(found, train(Plain(), loader_of(24, 2 * BATCH), Perceptron, epochs=1)[0])
