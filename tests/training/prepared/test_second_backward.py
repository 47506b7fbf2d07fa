"""Backward passes through gradients, and gradients that go elsewhere than to `.grad`: exact, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, told
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from twin import (
    Learn,
    Lines,
    Plain,
    State,
    assert_all_are,
    loader_of,
    mean_loss,
    seeded,
    sgd,
    steps,
    straight,
    train,
    whole,
)

from unisono import Accelerator
from unisono.training.strategies import sharded

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])


class Units(nn.Module):
    """All parameters are in units, and what the model returns is no output of one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 2)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.parts[0](inputs))
        return 2 * self.parts[2](torch.tanh(self.parts[1](self.hidden)))


def units(kind: type[Units] = Units) -> Any:
    return seeded(kind().double())


def in_workers(body: Callable[[], Any]) -> list[Any]:
    """By rank, where every element of a list is a unit."""

    def in_units() -> Any:
        sharded.SMALLEST_UNIT = 1
        return body()

    return PROCESSES_2.run(in_units)


def check(loops: Mapping[str, tuple[int, Lines]], strategy: str) -> None:
    """Each in steps of so many batches."""

    def make(accumulate: int) -> Accelerator:
        return Accelerator(strategy=strategy, gradient_accumulation_steps=accumulate)  # type: ignore[arg-type]

    ranks = in_workers(lambda: {name: loop(make(k), loader_of(23, 3)) for name, (k, loop) in loops.items()})
    for name, (accumulate, loop) in loops.items():
        print(name)
        assert_all_are([states[name] for states in ranks], loop(Plain(), loader_of(23, 6 * accumulate)))


def refusals(strategy: str, learn: Learn, **options: Any) -> list[str]:
    """What the lines are told, by rank."""
    make = partial(Accelerator, strategy=strategy, **options)
    return in_workers(lambda: told(lambda: train(make(), loader_of(23, 3), learn, units())))


def slope(network: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the model in its inputs, and what the model returned."""
    varied = inputs.clone().requires_grad_()
    outputs = network(varied)
    return torch.autograd.grad(outputs.pow(2).sum(), varied, create_graph=True)[0], outputs


def with_a_penalty(accelerator: Any, network: nn.Module, batch: list[torch.Tensor]) -> None:
    found, outputs = slope(network, batch[0])
    accelerator.backward(F.mse_loss(outputs, batch[1]) + found.pow(2).mean())


def with_a_penalty_computed_first(accelerator: Any, network: nn.Module, batch: list[torch.Tensor]) -> None:
    found, _ = slope(network, batch[0])
    with torch.no_grad():
        network(batch[0])
    accelerator.backward(mean_loss(network, batch) + found.pow(2).mean())


def with_a_penalty_of_its_own_backward(accelerator: Any, network: nn.Module, batch: list[torch.Tensor]) -> None:
    found, outputs = slope(network, batch[0])
    F.mse_loss(outputs, batch[1]).backward(retain_graph=True)
    found.pow(2).mean().backward()


def with_second_gradients(accelerator: Any, network: nn.Module, batch: list[torch.Tensor]) -> None:
    varied = batch[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(network(varied).pow(2).sum(), varied, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), varied)
    accelerator.backward(mean_loss(network, [batch[0] + 0.1 * second.sign(), *batch[1:]]))


def with_a_penalty_on_parameters(accelerator: Any, network: nn.Module, batch: list[torch.Tensor]) -> None:
    parameters = list(network.parameters())
    accelerator.backward(mean_loss(network, batch))
    (0.01 * sum(each.pow(2).sum() for each in parameters)).backward()


LINES = (
    straight,
    with_a_penalty,
    with_a_penalty_computed_first,
    with_a_penalty_of_its_own_backward,
    with_second_gradients,
    with_a_penalty_on_parameters,
)


class Checkpointed(Units):
    """Its middle is computed again in the backward pass, by a backward pass inside of it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda each: torch.tanh(self.parts[1](each)), self.parts[0](inputs), use_reentrant=True)
        return self.parts[2](hidden)


class AllCheckpointed(Units):
    """No parameter is outside of a checkpoint, as with adapters in the blocks of a frozen model."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.clone().requires_grad_()
        for part in self.parts:
            hidden = checkpoint(lambda each, part=part: torch.tanh(part(each)), hidden, use_reentrant=True)
        return hidden


def in_halves(network: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The whole model is checkpointed, once for each half of the batch."""
    halves = [checkpoint(network, each, use_reentrant=True) for each in batch[0].requires_grad_().tensor_split(2)]
    return F.mse_loss(torch.cat(halves), batch[1])


@STRATEGIES
def test_a_backward_pass_inside_of_another_one_is_a_part_of_it(strategy: str) -> None:
    def lines(kind: type[Units], loss: Callable[..., Any]) -> Lines:
        def learn(accelerator: Any, network: Any, batch: Any) -> None:
            accelerator.backward(loss(network, batch))
            accelerator.backward(loss(network, batch) / 2)

        return steps(learn, lambda: units(kind))

    loops = {
        "a part": (1, lines(Checkpointed, mean_loss)),
        "all parts": (2, lines(AllCheckpointed, mean_loss)),
        "the model": (1, lines(Units, in_halves)),
        "the model, in steps of two": (2, lines(Units, in_halves)),
    }
    check(loops, strategy)


def test_batches_that_meet_before_a_reentrant_checkpoint_are_refused() -> None:
    class Bypassed(AllCheckpointed):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # The last of the forward passes comes first in the backward pass, and reaches no parameters.
            return super().forward(inputs) if self.training else inputs.clone().requires_grad_()[:, :2]

    def body() -> str:
        accelerator = Accelerator()
        network = units(Bypassed)
        network, _, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(23, 3))
        *_, first, second = loader  # the last one is uneven
        loss = mean_loss(network, first)
        network.eval()
        return told(lambda: accelerator.backward(loss + mean_loss(network, second)), RuntimeError)

    for each in in_workers(body):
        assert "outputs of the Bypassed from several batches met in one backward pass" in each
        assert "pass use_reentrant=False, or call backward() for the loss of each batch" in each


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_failed_backward_pass_does_not_absorb_the_next_one(strategy: str) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("once")

    def after_a_failure(accelerator: Any, network: Any, batch: Any) -> None:
        outputs = network(batch[0])
        failing = outputs.register_hook(fail)
        loss = F.mse_loss(outputs, batch[1])
        with pytest.raises(ValueError, match="once"):
            accelerator.backward(loss, retain_graph=True)
        failing.remove()
        accelerator.backward(loss)

    ranks = in_workers(lambda: train(Accelerator(strategy=strategy), loader_of(23, 3), after_a_failure, units()))
    assert_all_are(ranks, train(Plain(), loader_of(23, 6), straight, units()))


def upstream(accelerator: Any, loader: DataLoader[Any]) -> State:
    """The gradient is taken where one model ends and the other one begins."""
    first, second = seeded(nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double(), 1), units()
    optimizer = sgd([*first.parameters(), *second.parameters()])
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        middle = first(inputs)
        outputs = second(middle)
        (found,) = torch.autograd.grad(outputs.pow(2).sum(), middle, create_graph=True)
        accelerator.backward(F.mse_loss(outputs, targets) + found.pow(2).mean())
        optimizer.step()
    return whole(first, second)


@STRATEGIES
def test_gradient_penalties_match_the_whole_batch_under_every_strategy(strategy: str) -> None:
    lines = LINES if strategy != "fsdp" else (straight, with_a_penalty_on_parameters)
    loops: dict[str, tuple[int, Lines]] = {each.__name__: (1, steps(each, units)) for each in lines}
    check(loops if strategy == "fsdp" else {**loops, "upstream": (1, upstream)}, strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_with_a_graph_that_ranks_would_have_to_share_are_refused(strategy: str) -> None:
    for each in refusals(strategy, lambda _, network, batch: mean_loss(network, batch).backward(create_graph=True)):
        assert "backward(create_graph=True) through the Units" in each
        assert "torch.autograd.grad(..., create_graph=True), and call backward()" in each


def of_the_middle(accelerator: Any, network: Any, batch: list[torch.Tensor]) -> None:
    torch.autograd.grad(network(batch[0]).sum(), network.hidden, create_graph=True)


def test_gradients_with_a_graph_are_refused_under_fsdp() -> None:
    for each in (*refusals("fsdp", with_a_penalty), *refusals("fsdp", of_the_middle)):
        assert "a backward pass with create_graph=True through the Units" in each
        assert "use strategy='ddp'" in each


def test_gradients_of_parameters_elsewhere_are_refused_under_fsdp() -> None:
    def body() -> None:
        network = Accelerator(strategy="fsdp").prepare(nn.Sequential(nn.Linear(5, 2)))
        torch.autograd.grad(network(torch.ones(1, 5)).sum(), list(network.parameters()))

    for each in PROCESSES_2.told(body, RuntimeError):
        assert "gradients of the Sequential were requested by torch.autograd.grad(loss, parameters)" in each
        assert "let loss.backward() leave them in .grad, or use strategy='ddp'" in each


def test_a_penalty_on_parameter_shards_is_refused_if_it_would_miscount() -> None:
    def in_the_loss(accelerator: Any, network: Any, batch: list[torch.Tensor]) -> None:
        accelerator.backward(mean_loss(network, batch) + sum(each.pow(2).sum() for each in network.parameters()))

    assert all("the loss is a DTensor" in each for each in refusals("fsdp", in_the_loss))
    assert all(
        "in each of the gradient_accumulation_steps=2 microbatches" in each
        for each in refusals("fsdp", with_a_penalty_on_parameters, gradient_accumulation_steps=2)
    )


def test_under_fsdp_a_loss_past_all_outputs_is_refused_with_a_way_out() -> None:
    class Hiding(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.hidden = super().forward(inputs)
            return 2 * self.hidden

    def loop(names_outputs: bool) -> Lines:
        def learn(accelerator: Any, network: Any, batch: list[torch.Tensor]) -> None:
            outputs = network(batch[0])
            accelerator.backward(network.hidden.pow(2).mean() + (0 * outputs.sum() if names_outputs else 0))

        return steps(learn, lambda: seeded(Hiding(5, 2).double()))

    make = partial(Accelerator, strategy="fsdp", gradient_accumulation_steps=2)
    for each in in_workers(lambda: told(lambda: loop(False)(make(), loader_of(23, 3)))):
        assert "on no tensor that is seen in what it returned (a Tensor)" in each
        assert "add 0 * outputs.sum()" in each
        assert "return tensors, also in a tuple, a dict or a dataclass" in each
    check({"named": (2, loop(True))}, "fsdp")
