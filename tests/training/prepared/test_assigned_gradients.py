"""Gradients that no backward pass leaves in `.grad`, and models that run with other parameters than their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, THREADS_2, Mode
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import State, compare, loader_of, mean_loss, model, seeded, sgd, steps, train

from unisono import Accelerator, DeviceLoader, backward, functional, optimizer_step

MODES = pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)


def adapted(network: Any, parameters: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """The parameters behind a step of their own on these samples, as a function of what they were."""
    loss = F.mse_loss(functional_call(network, parameters, (inputs,)), targets)
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    return {name: each - 0.1 * own for (name, each), own in zip(parameters.items(), gradients, strict=True)}


def learned_to_learn(accelerator: Any, network: Any, batch: Any) -> None:
    """MAML, where each sample is a task."""
    own, losses = dict(network.named_parameters()), []
    for one, target in zip(batch[0].split(1), batch[1].split(1), strict=True):
        fast = adapted(network, own, one, target)
        losses.append(F.mse_loss(functional_call(network, fast, (one,)), target))
    accelerator.backward(sum(losses) / len(losses))


def with_first_order_steps(accelerator: Any, network: Any, batch: Any) -> None:
    """As FOMAML has it: the gradients of other parameters are assigned."""
    fast = {name: each.detach().clone().requires_grad_() for name, each in network.named_parameters()}
    F.mse_loss(functional_call(network, fast, (batch[0],)), batch[1]).backward()
    for name, each in network.named_parameters():
        each.grad = fast[name].grad


def by_formula(accelerator: Any, loader: DataLoader[Any]) -> State:
    """Gradients are overwritten in each step, without a backward pass, and never zeroed."""
    layer = seeded(nn.Linear(5, 2, bias=False).double())
    network, optimizer, loader = accelerator.prepare(layer, sgd(layer.parameters()), loader)
    for inputs, targets, _ in loader:
        with torch.no_grad():
            network.weight.grad = (network(inputs) - targets).T @ inputs / len(inputs)
        optimizer.step()
    return network.state_dict()


def with_parameters_of_its_own(accelerator: Any, loader: DataLoader[Any]) -> State:
    """The model is a layer: torch puts the other parameters into what `prepare` has returned."""
    layer = seeded(nn.Linear(5, 2).double())
    network, optimizer, loader = accelerator.prepare(layer, sgd(layer.parameters()), loader)
    for inputs, targets, _ in loader:
        smaller = {name: 0.9 * each for name, each in network.named_parameters()}
        accelerator.backward(F.mse_loss(functional_call(network, smaller, (inputs,)), targets))
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


def beside_gradients_of_each_sample(accelerator: Any, loader: DataLoader[Any]) -> State:
    """As samples are weighted by the norms of their gradients, which torch.func computes of parameters held fixed."""
    layer = seeded(nn.Linear(5, 2).double())
    network, optimizer, loader = accelerator.prepare(layer, sgd(layer.parameters()), loader)
    for inputs, targets, _ in loader:
        fixed = {name: each.detach() for name, each in network.named_parameters()}
        norms = vmap(lambda *one: grad(partial(squared, network))(*one)["weight"].norm(), (None, 0, 0))
        weights = norms(fixed, inputs, targets)
        accelerator.backward((weights * F.mse_loss(network(inputs), targets, reduction="none").mean(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


def squared(network: Any, parameters: Any, one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(functional_call(network, parameters, (one[None],)), target[None])


def penalized_by_torch_func(accelerator: Any, loader: DataLoader[Any]) -> State:
    """By the gradients of the samples, through the parameters that train."""
    layers = seeded(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).double())
    network, optimizer, loader = accelerator.prepare(layers, sgd(layers.parameters()), loader)
    for inputs, targets, _ in loader:
        slopes = vmap(grad(lambda one: network(one[None]).sum()))(inputs)
        accelerator.backward(F.mse_loss(network(inputs), targets) + slopes.square().sum(1).mean())
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


@MODES
def test_models_run_with_other_parameters_weigh_their_own_gradients_once(mode: Mode) -> None:
    lines = {each.__name__: steps(each) for each in (learned_to_learn, with_first_order_steps)}
    compare(mode, {**lines, "formula": by_formula, "own": with_parameters_of_its_own})
    compare(mode, {each.__name__: each for each in (beside_gradients_of_each_sample, penalized_by_torch_func)})


def learned_on_parts(accelerator: Any, network: Any, batch: Any, reduces: bool = False) -> None:
    """MAML, where the samples of a batch are one task, of which each rank has a part."""
    own = dict(network.named_parameters())
    loss = F.mse_loss(functional_call(network, own, (batch[0],)), batch[1])
    gradients: Any = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    if reduces:
        gradients = [functional.all_reduce(each, "mean") for each in gradients]
    fast = {name: each - 0.1 * gradient for (name, each), gradient in zip(own.items(), gradients, strict=True)}
    accelerator.backward(F.mse_loss(functional_call(network, fast, (batch[0],)), batch[1]))


def test_a_task_spread_over_ranks_steps_on_all_samples_only_if_reduced() -> None:
    with pytest.raises(AssertionError, match="not close"):  # each rank's own step is not a part of that of all
        compare(THREADS_2, steps(learned_on_parts), samples=24)
    compare(THREADS_2, steps(partial(learned_on_parts, reduces=True)), samples=24)


def assign(network: Any, batch: Any) -> None:
    own = list(network.parameters())
    for each, gradient in zip(own, torch.autograd.grad(mean_loss(network, batch), own), strict=True):
        each.grad = gradient if each.grad is None else each.grad + gradient


def added_up(accelerator: Any, loader: DataLoader[Any]) -> State:
    """Of two batches each."""
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for number, batch in enumerate(loader):
        assign(network, batch)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return network.state_dict()


@MODES
def test_gradients_of_evenly_dealt_batches_can_be_added_up_by_hand(mode: Mode) -> None:
    compare(mode, added_up, samples=24)


def others(network: Any, batch: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(network(batch[0]).pow(2).mean(), list(network.parameters()), **options)


def add(network: Any, gradients: tuple[torch.Tensor, ...], in_place: bool) -> None:
    for each, gradient in zip(network.parameters(), gradients, strict=True):
        if in_place:
            each.grad += gradient
        else:
            each.grad = each.grad + gradient


def added(order: str, in_place: bool, clips: bool = False) -> Any:
    """Gradients of torch.autograd.grad are added to those of a backward pass."""

    def learn(accelerator: Any, network: Any, batch: Any) -> None:
        found = others(network, batch) if order != "after" else ()
        accelerator.backward(mean_loss(network, batch))
        if clips:
            accelerator.clip_grad_norm_(network.parameters(), 0.1)
        if order == "twice":
            add(network, found, in_place)
        add(network, others(network, batch) if order != "before" else found, in_place)
        if clips:
            accelerator.clip_grad_norm_(network.parameters(), 0.1)

    return steps(learn)


@MODES
def test_gradients_added_to_those_of_a_backward_pass_are_reduced_too(mode: Mode) -> None:
    orders = [("before", False, True), ("before", True, False), ("after", False, False), ("after", True, True)]
    orders += [("twice", False, False), ("twice", True, True)]
    compare(mode, {str(order): added(*order) for order in orders})


@pytest.mark.parametrize(("order", "in_place"), [("before", False), ("after", True)])
def test_where_their_weight_is_not_known_it_is_an_error(order: str, in_place: bool) -> None:
    lines, options = added(order, in_place), {"gradient_accumulation_steps": 2}
    for said in THREADS_2.told(lambda: lines(Accelerator(**options), loader_of(24, 3)), RuntimeError):
        assert "gradient_accumulation_steps=2 counts backward passes, and the gradients that the SGD finds" in said
        assert "changed by hand" in said
        assert "pass gradient_accumulation_steps=1 and step on each batch" in said


def test_gradients_that_were_asked_for_and_only_looked_at_change_nothing() -> None:
    """As GradNorm does, which weighs losses by the norms of their gradients."""

    def looking(accelerator: Any, network: Any, batch: Any) -> None:
        others(network, batch)
        accelerator.backward(mean_loss(network, batch))
        others(network, batch)
        accelerator.clip_grad_norm_(network.parameters(), 0.1)

    compare(THREADS_2, steps(looking), gradient_accumulation_steps=2)


def test_where_they_were_not_it_is_an_error_whose_way_out_is_one() -> None:
    for said in THREADS_2.told(lambda: added_up(Accelerator(), loader_of(23, 3)), ValueError):
        assert "where this rank had different parts" in said
        assert "step on each batch and zero_grad() after each step" in said
    compare(THREADS_2, steps(lambda accelerator, network, batch: assign(network, batch)))


def never_zeroed(accelerator: Any, loader: DataLoader[Any], adds: bool = False) -> State:
    """Each step's gradients replace those of the step before, or are added to them."""
    network = model()
    network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader)
    for batch in loader:
        for each in network.parameters() if not adds else ():
            each.grad = None
        assign(network, batch)
        optimizer.step()
    return network.state_dict()


@MODES
def test_batches_of_earlier_steps_do_not_count_where_nothing_is_zeroed(mode: Mode) -> None:
    compare(mode, {"replaced": never_zeroed, "added": partial(never_zeroed, adds=True)})


def test_by_hand_the_advice_is_one_too() -> None:
    def body(learn: Any) -> None:
        network = model()
        optimizer = sgd(network.parameters())
        for number, batch in enumerate(DeviceLoader(loader_of(23, 3))):
            learn(network, batch)
            if number % 2:
                optimizer_step(optimizer)
                optimizer.zero_grad()

    for said in THREADS_2.told(lambda: body(assign), ValueError):
        assert "unisono.backward(loss, batch=batch) instead" in said
    THREADS_2.run(lambda: body(lambda network, batch: backward(mean_loss(network, batch))))


def test_under_fsdp_they_are_refused() -> None:
    def assign_ones(accelerator: Any, network: Any, batch: Any) -> None:
        for each in network.parameters():
            each.grad = torch.ones_like(each)

    body = lambda: train(Accelerator(strategy="fsdp"), loader_of(23, 3), assign_ones)  # noqa: E731
    for said in PROCESSES_2.told(body, RuntimeError):
        assert "the gradients of the Sequential were assigned by hand" in said
        assert "let loss.backward() leave them in .grad, or use strategy='ddp'" in said
