"""Backward passes that no output of a prepared model shows, and those of several models and batches: they train the
weights of one device, with final gradients when they end, or are refused before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from twin import State, compare, data, loader_of, mean_loss, model, sgd

from unisono import Accelerator

MODES = pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
SEVERAL = pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
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


def hidden(loss: Callable[..., torch.Tensor]) -> Any:
    def lines(accelerator: Any, loader: DataLoader[Any]) -> State:
        raw = Hiding()
        network, optimizer, loader = accelerator.prepare(raw, sgd(raw.parameters()), loader)
        for inputs, targets, _ in loader:
            accelerator.backward(loss(network, raw, inputs, targets))
            nn.utils.clip_grad_norm_(network.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
        return {name.removeprefix("module."): each for name, each in network.state_dict().items()}

    return lines


@MODES
def test_torch_clips_the_gradients_of_the_step_after_a_pass_that_no_output_shows(mode: Mode) -> None:
    compare(mode, {what: hidden(loss) for what, loss in HIDDEN.items()}, samples=EVEN)


def two_loops(accelerator: Any, samples: int) -> Iterator[Any]:
    """Loops of which the first one ends with an uneven batch."""
    first, second = (DataLoader(data(each), batch_size=3) for each in (samples, EVEN))
    yield from zip(accelerator.prepare(first), accelerator.prepare(second), strict=True)


def refusal_in(mode: Mode, loss: Callable[[Any, Any, Any, Any], torch.Tensor], error: type[Exception]) -> list[str]:
    """Of a step on the losses of two batches that count differently; the model has not changed."""

    def body() -> str:
        accelerator, one, other = Accelerator(), Hiding(), model(1)
        one, other, optimizer = accelerator.prepare(one, other, sgd([*one.parameters(), *other.parameters()]))
        for first, second in two_loops(accelerator, UNEVEN):
            before = [each.detach().clone() for each in (*one.parameters(), *other.parameters())]
            try:
                accelerator.backward(loss(one, other, first, second))
                optimizer.step()
            except error as caught:
                now = [*one.parameters(), *other.parameters()]
                assert all(torch.equal(each, was) for each, was in zip(now, before, strict=True))
                return str(caught)
            optimizer.zero_grad()
        return "nothing"

    return mode.run(body)


@SEVERAL
def test_a_pass_that_may_be_of_an_unseen_batch_too_is_refused_where_it_counts_otherwise(mode: Mode) -> None:
    for told in refusal_in(
        mode, lambda one, other, first, second: one.loss(*first[:2]) + one.loss(*second[:2]), ValueError
    ):
        assert "name the batch" in told


@SEVERAL
def test_models_in_a_row_on_batches_that_count_differently_need_a_pass_each(mode: Mode) -> None:
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(2, 2)).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.network(inputs)  # type: ignore[no-any-return]

    def body() -> str:
        accelerator, first, second = Accelerator(), model(), Row()
        first, second, optimizer = accelerator.prepare(first, second, sgd([*first.parameters(), *second.parameters()]))
        for (inputs, targets, _), (others, _, _) in two_loops(accelerator, UNEVEN):
            try:
                accelerator.backward(F.mse_loss(second(first(inputs)), targets) + second(first(others)).pow(2).mean())
            except ValueError as error:
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
        return "nothing"

    assert any(
        "would be weighed a second time; call accelerator.backward(loss) for the loss of each batch" in told
        for told in mode.run(body)
    )


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
    return first.state_dict() | {f"second.{name}": each for name, each in second.state_dict().items()}


@MODES
def test_an_optimizer_may_be_given_the_parameters_of_another_prepared_model(mode: Mode) -> None:
    compare(mode, {"lines": with_new_group}, samples=EVEN)


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


def recomputed(accelerator: Any, loader: DataLoader[Any]) -> State:
    first, second = model(), model(1)
    first, second, optimizer, loader = accelerator.prepare(
        first, second, sgd([*first.parameters(), *second.parameters()]), loader
    )
    last = None
    for batch in loader:
        last = last or batch
        inner = checkpoint(first, batch[0].requires_grad_(), use_reentrant=True).pow(2).mean()
        accelerator.backward(inner + second(last[0]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return first.state_dict() | {f"second.{name}": each for name, each in second.state_dict().items()}


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_model_in_a_reentrant_checkpoint_keeps_its_own_batch_beside_that_of_another(mode: Mode) -> None:
    compare(mode, {"lines": recomputed}, samples=UNEVEN)


def by_formula(accelerator: Any, loader: DataLoader[Any]) -> State:
    """Gradients are overwritten in each step, without a backward pass, and never zeroed."""
    network = nn.Linear(5, 2, bias=False).double()
    with torch.no_grad():
        network.weight.fill_(0.1)
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for inputs, targets, _ in loader:
        with torch.no_grad():
            errors = network(inputs) - targets
            network.weight.grad = errors.T @ inputs / len(inputs)
        optimizer.step()
    return network.state_dict()


def by_function(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for inputs, targets, _ in loader:
        own = {name: each.detach() for name, each in network.named_parameters()}
        found = torch.func.grad(
            lambda own, inputs=inputs, targets=targets: F.mse_loss(
                torch.func.functional_call(network, own, (inputs,)), targets
            )
        )(own)
        optimizer.zero_grad()
        for name, each in network.named_parameters():
            each.grad = found[name]
        optimizer.step()
    return network.state_dict()


@MODES
@pytest.mark.parametrize("samples", [EVEN, UNEVEN])
def test_gradients_by_a_formula_or_by_torch_func_are_reduced_with_the_weights_of_their_batch(
    samples: int, mode: Mode
) -> None:
    compare(mode, {"formula": by_formula, "function": by_function}, samples=samples)


@SEVERAL
def test_a_closure_with_batches_that_count_differently_is_refused(mode: Mode) -> None:
    def body() -> str:
        accelerator, network = Accelerator(), model()
        network, optimizer, loader = accelerator.prepare(
            network, torch.optim.LBFGS(network.parameters()), loader_of(UNEVEN, 3)
        )
        batches = list(loader)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for batch in batches:
                loss = mean_loss(network, batch)
                accelerator.backward(loss)
                total = total + loss.detach()
            return total

        with pytest.raises(ValueError) as error:
            optimizer.step(closure)
        return str(error.value)

    for told in mode.run(body):
        assert "compute the loss of one batch in a closure" in told


@SEVERAL
def test_a_name_that_fits_two_batches_which_count_differently_is_refused(mode: Mode) -> None:
    def body() -> str:
        accelerator, network = Accelerator(), model()
        network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
        for first, second in two_loops(accelerator, UNEVEN):
            try:
                accelerator.backward(mean_loss(network, first) + mean_loss(network, second), batch=(first, second))
            except ValueError as error:
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
        return "nothing"

    assert any("name the batch" in told for told in mode.run(body))


def test_inputs_that_another_open_loop_may_have_given_are_refused_where_its_batch_counts_otherwise() -> None:
    def body() -> None:
        accelerator, network = Accelerator(), model()
        network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
        first, second = (accelerator.prepare(DataLoader(data(each), batch_size=1)) for each in (8, 9))
        for one, other in zip(first, second, strict=True):
            outputs = [network(one[0]), network(one[0] * 1.1), network(other[0])]
            accelerator.backward(sum(each.pow(2).mean() for each in outputs))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ValueError, match="name the batch"):
        THREADS_3.run(body)
