"""Backward passes that no output of a prepared model shows, and those of several models and batches: they train the
weights of one device, with final gradients when they end, or are refused before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import Lines, State, compare, data, loader_of, mean_loss, model, sgd, train, whole

from unisono import Accelerator

MODES = pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
EVEN, UNEVEN = 24, 21  # samples, in batches of 3 on two ranks


class Outputs:
    """No container that is searched for tensors."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def forward(self, inputs: torch.Tensor, targets: Any = None) -> Outputs:
        found = Outputs(self.network(inputs))
        self.kept = None if targets is None else F.mse_loss(found.logits, targets)
        return found

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.network(inputs), targets)


def kept_loss(network: Any, raw: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    network(inputs, targets)
    return network.kept  # type: ignore[no-any-return]


HIDDEN: dict[str, Callable[..., torch.Tensor]] = {
    "a method that is not marked": lambda network, raw, inputs, targets: network.loss(inputs, targets),
    "a submodule": lambda network, raw, inputs, targets: F.mse_loss(network.network(inputs), targets),
    "an output in an object": lambda network, raw, inputs, targets: F.mse_loss(network(inputs).logits, targets),
    "a loss that the module keeps": kept_loss,
    "the module from before prepare()": lambda network, raw, inputs, targets: F.mse_loss(raw(inputs).logits, targets),
}


def hidden(loss: Callable[..., torch.Tensor]) -> Lines:
    def lines(accelerator: Any, loader: DataLoader[Any]) -> State:
        raw = Hiding()

        def learn(accelerator: Any, network: Any, batch: Any) -> None:
            accelerator.backward(loss(network, raw, *batch[:2]))
            nn.utils.clip_grad_norm_(network.parameters(), 0.2)

        return train(accelerator, loader, learn, raw)

    return lines


@MODES
def test_torch_clips_the_right_gradients_after_a_pass_no_output_shows(mode: Mode) -> None:
    compare(mode, {what: hidden(loss) for what, loss in HIDDEN.items()}, samples=EVEN)


def two_loops(accelerator: Any, samples: int) -> Iterator[Any]:
    """Loops of which the first one ends with an uneven batch."""
    first, second = (DataLoader(data(each), batch_size=3) for each in (samples, EVEN))
    yield from zip(accelerator.prepare(first), accelerator.prepare(second), strict=True)


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 2)).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(inputs)  # type: ignore[no-any-return]


Losses = Callable[[Any, Any, Any, Any], tuple[torch.Tensor, Any]]


def refusal_in(mode: Mode, make: Callable[[], nn.Module], losses: Losses) -> str:
    """Of a step on the losses of two batches that count differently, with the name of a batch, on any rank; the models
    have not changed where it comes."""

    def body() -> str:
        accelerator, one, other = Accelerator(), make(), Row()
        one, other, optimizer = accelerator.prepare(one, other, sgd([*one.parameters(), *other.parameters()]))
        for first, second in two_loops(accelerator, UNEVEN):
            before = [each.detach().clone() for each in (*one.parameters(), *other.parameters())]
            try:
                loss, name = losses(one, other, first, second)
                accelerator.backward(loss, batch=name)
                optimizer.step()
            except ValueError as caught:
                now = [*one.parameters(), *other.parameters()]
                assert all(torch.equal(each, was) for each, was in zip(now, before, strict=True))
                return str(caught)
            optimizer.zero_grad()
        return "nothing"

    return "\n".join(mode.run(body))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Losses, str]] = {
    "a pass that may be of an unseen batch too": (
        Hiding,
        lambda one, other, first, second: (one.loss(*first[:2]) + one.loss(*second[:2]), None),
        "name the batch",
    ),
    "models in a row": (
        model,
        lambda one, other, first, second: (
            F.mse_loss(other(one(first[0])), first[1]) + other(one(second[0])).pow(2).mean(),
            None,
        ),
        "would be weighed twice; call accelerator.backward(loss) for the loss of each batch",
    ),
    "a name that fits two batches": (
        model,
        lambda one, other, first, second: (mean_loss(one, first) + mean_loss(one, second), (first, second)),
        "call it for the loss of each batch",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_losses_of_batches_that_count_differently_are_refused_in(what: str) -> None:
    make, losses, words = REFUSED[what]
    assert words in refusal_in(THREADS_2, make, losses)


def with_new_group(accelerator: Any, loader: DataLoader[Any]) -> State:
    first, second = model(), Hiding()
    first, second, optimizer, loader = accelerator.prepare(first, second, sgd(first.parameters()), loader)
    for number, batch in enumerate(loader):
        if number == 1:
            optimizer.add_param_group({"params": list(second.parameters())})
        accelerator.backward(mean_loss(first, batch) + second.loss(*batch[:2]))
        optimizer.step()
        optimizer.zero_grad()
        second.zero_grad()
    return whole(first, second)


@MODES
def test_an_optimizer_may_be_given_another_prepared_models_parameters(mode: Mode) -> None:
    compare(mode, with_new_group, samples=EVEN)


def test_two_prepared_models_that_share_what_they_train_are_refused() -> None:
    trunk = model()
    one, other = nn.Sequential(trunk, nn.Linear(2, 2)), nn.Sequential(trunk, nn.Linear(2, 3))
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"position 1 shares parameters with the Sequential.* parts of one module"):
        accelerator.prepare(one, other)
    kept = accelerator.prepare(one)
    with pytest.raises(ValueError, match="shares parameters"):
        accelerator.prepare(other)
    trunk.requires_grad_(False)
    assert accelerator.prepare(other) is not kept


def test_a_closure_with_batches_that_count_differently_is_refused() -> None:
    def body() -> None:
        accelerator, network = Accelerator(), model()
        network, optimizer, loader = accelerator.prepare(
            network, torch.optim.LBFGS(network.parameters()), loader_of(UNEVEN, 3)
        )
        batches = list(loader)

        def closure() -> torch.Tensor:
            losses = [mean_loss(network, batch) for batch in batches]
            for each in losses:
                accelerator.backward(each)
            return sum(losses)  # type: ignore[return-value]

        optimizer.step(closure)

    for said in THREADS_2.told(body, ValueError):
        assert "compute the loss of one batch in a closure" in said
