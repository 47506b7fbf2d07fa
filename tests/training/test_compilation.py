"""Compiled models: replicas use their own weights, and meet in the middle of a model that each of them compiles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from modes import THREADS_2
from torch import nn

from unisono import DataParallel, current_world
from unisono.training.batch_norm import synchronize_batch_norm
from unisono.training.compilation import compile_module

THREE = [f"cpu:{rank}" for rank in range(3)]


class Net(nn.Module):
    """Two layers, one of them in a container, with a buffer between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
        self.register_buffer("factor", torch.ones(4))

    def forward(self, inputs: torch.Tensor, is_bad: bool = False) -> torch.Tensor:
        if is_bad:
            raise LookupError("no such token")
        return self.rest(self.first(inputs) * self.factor)


def of_torch() -> nn.Module:
    """Of its own forward methods torch compiles no frame."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def compiled(model: nn.Module, backend: Any) -> nn.Module:
    compile_module(model, {"backend": backend})
    return model


def steps(model: nn.Module, sizes: list[int]) -> list[torch.Tensor]:
    """The outputs of all batches, then the gradients of their sum."""
    outputs = [model(torch.ones(size, 3) / size) for size in sizes]
    for output in outputs:
        output.square().sum().backward()
    return [*(output.detach() for output in outputs), *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("make", [Net, of_torch])
def test_replicas_that_arrive_at_once_use_their_own_weights(make: Callable[[], nn.Module]) -> None:
    backend, replicas = Counting(), DataParallel(make(), THREE)
    for number, replica in enumerate(replicas.models):
        torch.manual_seed(number)
        for parameter in replica.parameters():
            nn.init.normal_(parameter)
    sizes = [5, 6, 1]
    expected = [steps(copy.deepcopy(model), sizes) for model in replicas.models]

    def loop(model: nn.Module, *_: Any) -> list[torch.Tensor]:
        current_world().comm.barrier()
        return steps(compiled(model, backend), sizes)

    torch.testing.assert_close(replicas(loop, []), expected)
    assert backend.graphs > 0


@pytest.mark.parametrize("make", [Net, of_torch])
def test_the_module_stays_what_it_was_and_its_copies_are_plain(make: Callable[[], nn.Module]) -> None:
    module = make()
    names, kind = list(module.state_dict()), type(module)
    compiled(module, Counting())
    assert list(module.state_dict()) == names
    assert type(module) is kind
    module(torch.ones(2, 3))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied._compiled_call_impl is None
        assert torch.equal(copied(torch.ones(2, 3)), module(torch.ones(2, 3)))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first_norm, self.second_norm = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        middle = self.first_norm(self.first(inputs)).sin()
        return self.second_norm(self.second(middle)).cos()


def normalised(world_share: float, rank: int, backend: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(8, 3, dtype=torch.float64)
    model = Normalised().double()
    synchronize_batch_norm(model, current_world(), lambda: world_share)
    if backend is not None:
        compiled(model, backend)
    own = inputs.chunk(round(1 / world_share))[rank].clone().requires_grad_()
    for _ in range(3):
        output = model(own)
    output.square().mean().backward()
    return [output.detach(), own.grad * world_share]


def test_replicas_meet_in_the_middle_of_a_model_that_each_must_compile():
    mode = THREADS_2
    found = mode.run(lambda: normalised(1 / mode.ranks, current_world().rank, Counting()))
    expected = normalised(1.0, 0, None)
    for place in range(2):
        torch.testing.assert_close(torch.cat([rank[place] for rank in found]), expected[place])


def test_what_a_backend_or_a_model_raises_surfaces_on_each_replica() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise ArithmeticError("no such kernel")

    def loop(model: nn.Module, *_: Any) -> str:
        compiled(model, backend)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such kernel") as caught:
            model(torch.ones(2, 3))
        return type(caught.value.inner_exception).__name__

    replicas = DataParallel(Net(), THREE)
    assert replicas(loop, []) == ["ArithmeticError"] * 3
    with pytest.raises(LookupError, match="no such token"):
        replicas(lambda model, *_: compiled(model, "eager")(torch.ones(2, 3), current_world().rank == 2), [])
    assert len(replicas(lambda model, *_: model(torch.ones(2, 3)), [])) == 3
