"""Backward passes through gradients, and gradients that go elsewhere than to `.grad`: exact, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import PROCESSES_2
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from twin import Plain, State, assert_all_are, loader_of, mean_loss, seeded, sgd

from unisono import Accelerator, backward
from unisono.parallel.strategies import sharded

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])


class Units(nn.Module):
    """All parameters are in units, and what the model returns is no output of one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 2)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.parts[0](inputs))
        return 2 * self.parts[2](torch.tanh(self.parts[1](self.hidden)))


def in_workers(body: Callable[[], Any]) -> list[Any]:
    """By rank, where every element of a list is a unit."""

    def in_units() -> Any:
        sharded.SMALLEST_UNIT = 1
        return body()

    return PROCESSES_2.run(in_units)


Training = tuple[Any, Any, Any]


def prepared(accelerator: Any, loader: DataLoader[Any]) -> Training:
    network = seeded(Units().double())
    objects: Training = accelerator.prepare(network, sgd(network.parameters()), loader)
    return objects


def slope(network: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the model in its inputs, and what the model returned."""
    varied = inputs.clone().requires_grad_()
    outputs = network(varied)
    return torch.autograd.grad(outputs.pow(2).sum(), varied, create_graph=True)[0], outputs


def steps(lines: Callable[[Any, Any, list[torch.Tensor]], None]) -> Callable[[Any, DataLoader[Any]], State]:
    """A loop of these lines."""

    def loop(accelerator: Any, loader: DataLoader[Any]) -> State:
        network, optimizer, loader = prepared(accelerator, loader)
        for batch in loader:
            lines(accelerator, network, batch)
            optimizer.step()
            optimizer.zero_grad()
        return whole(network)

    return loop


def whole(network: nn.Module) -> State:
    return {name: getattr(each, "full_tensor", each.clone)() for name, each in network.state_dict().items()}


def straight(accelerator: Any, network: nn.Module, batch: list[torch.Tensor]) -> None:
    accelerator.backward(mean_loss(network, batch))


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


def checkpointed(
    accelerator: Any, loader: DataLoader[Any], kind: type[Units] = Checkpointed, loss: Callable[..., Any] = mean_loss
) -> State:
    network: Any = seeded(kind().double())
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for batch in loader:
        accelerator.backward(loss(network, batch))
        optimizer.step()
        optimizer.zero_grad()
    return whole(network)


def in_halves(network: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The whole model is checkpointed, once for each half of the batch."""
    halves = [checkpoint(network, each, use_reentrant=True) for each in batch[0].requires_grad_().tensor_split(2)]
    return F.mse_loss(torch.cat(halves), batch[1])


CHECKPOINTED = pytest.mark.parametrize(
    ("kind", "loss"),
    [(Checkpointed, mean_loss), (AllCheckpointed, mean_loss), (Units, in_halves)],
    ids=["a part", "all parts", "the model"],
)


@CHECKPOINTED
@pytest.mark.parametrize("accumulate", [1, 2])
@STRATEGIES
def test_a_backward_pass_inside_of_another_one_is_a_part_of_it(
    strategy: str, accumulate: int, kind: type[Units], loss: Callable[..., Any]
) -> None:
    def body() -> State:
        accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=accumulate)
        return checkpointed(accelerator, loader_of(23, 3), kind, loss)

    assert_all_are(in_workers(body), checkpointed(Plain(), loader_of(23, 6 * accumulate), kind, loss))


def test_batches_that_meet_before_a_checkpoint_reaches_parameters_are_refused() -> None:
    class Bypassed(AllCheckpointed):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # The last of the forward passes comes first in the backward pass, and reaches no parameters.
            return super().forward(inputs) if self.training else inputs.clone().requires_grad_()[:, :2]

    def body() -> str:
        accelerator = Accelerator()
        network: Any = seeded(Bypassed().double())
        network, _, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(23, 3))
        *_, first, second = loader  # the last one is uneven
        loss = mean_loss(network, first)
        network.eval()
        with pytest.raises(RuntimeError) as error:
            accelerator.backward(loss + mean_loss(network, second))
        return str(error.value)

    for each in in_workers(body):
        assert "outputs of the Bypassed from several batches met in one backward pass" in each
        assert "pass use_reentrant=False, or call backward() for the loss of each batch" in each


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_backward_pass_that_failed_is_none_that_the_next_one_is_a_part_of(strategy: str) -> None:
    def body() -> State:
        network, optimizer, loader = prepared(accelerator := Accelerator(strategy=strategy), loader_of(23, 3))
        for batch in loader:
            outputs = network(batch[0])
            failing = outputs.register_hook(fail)
            loss = F.mse_loss(outputs, batch[1])
            with pytest.raises(ValueError, match="once"):
                accelerator.backward(loss, retain_graph=True)
            failing.remove()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return whole(network)

    assert_all_are(in_workers(body), steps(straight)(Plain(), loader_of(23, 6)))


def fail(_: torch.Tensor) -> None:
    raise ValueError("once")


def upstream(accelerator: Any, loader: DataLoader[Any]) -> State:
    """The gradient is taken where one model ends and the other one begins."""
    first, second = seeded(nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double(), 1), seeded(Units().double())
    optimizer = sgd([*first.parameters(), *second.parameters()])
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        middle = first(inputs)
        outputs = second(middle)
        (found,) = torch.autograd.grad(outputs.pow(2).sum(), middle, create_graph=True)
        accelerator.backward(F.mse_loss(outputs, targets) + found.pow(2).mean())
        optimizer.step()
    return {**whole(first), **{f"second.{name}": each for name, each in whole(second).items()}}


@STRATEGIES
def test_penalties_on_gradients_are_those_of_the_whole_batch_under_every_strategy(strategy: str) -> None:
    loops = [*map(steps, LINES), upstream]
    ranks = in_workers(lambda: [loop(Accelerator(strategy=strategy), loader_of(23, 3)) for loop in loops])
    for place, loop in enumerate(loops):
        print(place)
        assert_all_are([states[place] for states in ranks], loop(Plain(), loader_of(23, 6)))


def test_a_penalty_is_accumulated_under_fsdp_as_losses_are() -> None:
    loop = steps(with_a_penalty)
    ranks = in_workers(lambda: loop(Accelerator(strategy="fsdp", gradient_accumulation_steps=2), loader_of(23, 3)))
    assert_all_are(ranks, loop(Plain(), loader_of(23, 12)))


def test_a_backward_by_hand_finds_a_sharded_model() -> None:
    loop = steps(lambda _, network, batch: backward(mean_loss(network, batch)))
    ranks = in_workers(lambda: loop(Accelerator(strategy="fsdp"), loader_of(23, 3)))
    assert_all_are(ranks, steps(straight)(Plain(), loader_of(23, 6)))


def told(strategy: str, lines: Callable[[Any, Any, list[torch.Tensor]], None], **options: Any) -> list[str]:
    """What the lines are told, by rank."""

    def body() -> str:
        try:
            steps(lines)(Accelerator(strategy=strategy, **options), loader_of(23, 3))
        except (RuntimeError, TypeError) as error:
            return str(error)
        return "nothing"

    return in_workers(body)


@STRATEGIES
def test_gradients_with_a_graph_that_ranks_would_have_to_share_are_refused(strategy: str) -> None:
    for each in told(strategy, lambda _, network, batch: mean_loss(network, batch).backward(create_graph=True)):
        assert "backward(create_graph=True) through the Units" in each
        assert "torch.autograd.grad(..., create_graph=True), and call backward()" in each


def test_gradients_of_parameters_elsewhere_are_refused_under_fsdp() -> None:
    def body() -> str:
        network: Any = seeded(nn.Sequential(nn.Linear(5, 2)).double())
        network, _ = Accelerator(strategy="fsdp").prepare(network, sgd(network.parameters()))
        with pytest.raises(RuntimeError) as error:
            loss = network(torch.ones(1, 5, dtype=torch.float64)).sum()
            torch.autograd.grad(loss, list(network.parameters()))
        return str(error.value)

    for each in PROCESSES_2.run(body):
        assert "gradients of the Sequential were requested by torch.autograd.grad(loss, parameters)" in each
        assert "let loss.backward() leave them in .grad, or use strategy='ddp'" in each


def test_a_graph_that_begins_inside_of_a_sharded_model_is_refused() -> None:
    def lines(accelerator: Any, network: Any, batch: list[torch.Tensor]) -> None:
        outputs = network(batch[0])
        (found,) = torch.autograd.grad(outputs.sum(), network.hidden, create_graph=True)
        accelerator.backward(outputs.mean() + found.pow(2).mean())

    for each in told("fsdp", lines):
        assert "through the Units, none of whose inputs requires a gradient" in each
        assert "with respect to an input of the model" in each


def test_a_penalty_on_parts_of_parameters_is_refused_where_it_would_count_wrongly() -> None:
    def in_the_loss(accelerator: Any, network: Any, batch: list[torch.Tensor]) -> None:
        accelerator.backward(mean_loss(network, batch) + sum(each.pow(2).sum() for each in network.parameters()))

    assert all("the loss is a DTensor" in each for each in told("fsdp", in_the_loss))
    assert all(
        "in each of the gradient_accumulation_steps=2 microbatches" in each
        for each in told("fsdp", with_a_penalty_on_parameters, gradient_accumulation_steps=2)
    )


def test_a_loss_past_all_outputs_is_refused_under_fsdp_and_the_way_out_is_one() -> None:
    def loop(accelerator: Any, loader: DataLoader[Any], weight: float | None) -> State:
        network: Any = seeded(nn.Linear(5, 2).double())
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
        for inputs, *_ in loader:
            found, outputs = slope_of_sum(network, inputs)
            accelerator.backward(found.pow(2).mean() + (0 if weight is None else weight * outputs.sum()))
            optimizer.step()
            optimizer.zero_grad()
        return whole(network)

    def slope_of_sum(network: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        varied = inputs.clone().requires_grad_()
        outputs = network(varied)
        return torch.autograd.grad(outputs.sum(), varied, create_graph=True)[0], outputs

    def body() -> tuple[str, State]:
        with pytest.raises(RuntimeError) as error:
            loop(Accelerator(strategy="fsdp"), loader_of(23, 3), None)
        return str(error.value), loop(Accelerator(strategy="fsdp"), loader_of(23, 3), 0)

    ranks = in_workers(body)
    assert all("on none of its outputs" in each and "add 0 * outputs.sum()" in each for each, _ in ranks)
    assert_all_are([state for _, state in ranks], loop(Plain(), loader_of(23, 6), 0))
