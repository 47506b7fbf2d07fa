"""Several losses, models and optimizers in one loop, each against the same lines on one device."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_3, scaling
from torch import nn
from torch.nn import functional as F
from twin import Plain, State, adam, assert_all_are, compare, loader_of, model, seeded, sgd

from unisono import Accelerator

ALONE = [SOLO] if FAMILY == "cpu" else []  # elsewhere all of these loops may be compiled, and once is enough


@pytest.fixture(params=scaling(*ALONE, THREADS_3, PROCESSES_2), ids=str)
def mode(request):
    return request.param


def named(**networks: nn.Module) -> State:
    return {f"{name}.{key}": value for name, each in networks.items() for key, value in each.state_dict().items()}


def two_losses_two_forward_passes(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), targets))
        accelerator.backward(0.3 * network(2 * inputs).pow(2).mean())
        optimizer.step()
    return named(network=network)


def two_losses_two_plain_forward_passes(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        F.mse_loss(network(inputs), targets).backward()
        (0.3 * network(2 * inputs).pow(2).mean()).backward()
        optimizer.step()
    return named(network=network)


def two_losses_one_forward_pass(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        with accelerator.no_sync(network):
            outputs = network(inputs)
        accelerator.backward(F.mse_loss(outputs, targets) + outputs.abs().mean())
        accelerator.backward(0.3 * network(2 * inputs).pow(2).mean())
        optimizer.step()
    return named(network=network)


def losses_of_one_forward_pass_without_reduction(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        with accelerator.no_sync(network):
            outputs = network(inputs)
        first, second = F.mse_loss(outputs, targets), 0.3 * outputs.pow(2).mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
    return named(network=network)


def several_backward_passes_of_one_forward_pass(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        outputs, others = network(inputs), network(inputs.flip(1))
        F.mse_loss(outputs, targets).backward(retain_graph=True)
        (0.3 * outputs.pow(2).mean()).backward()
        others.abs().mean().backward()
        optimizer.step()
    return named(network=network)


def a_model_that_runs_twice_in_one_loss(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs) + network(inputs.flip(1)), targets))
        optimizer.step()
    return named(network=network)


def gan() -> tuple[nn.Module, nn.Module]:
    critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return seeded(nn.Linear(5, 2).double(), 1), seeded(critic, 2)


def a_gan(accelerator, loader, every=1, freezes=False):
    maker, critic = gan()
    maker, critic, of_maker, of_critic, loader = accelerator.prepare(
        maker, critic, adam(maker.parameters()), sgd(critic.parameters()), loader
    )
    for number, (noise, real, _) in enumerate(itertools.chain(loader, loader)):
        of_critic.zero_grad()
        fake = maker(noise)
        accelerator.backward(F.softplus(-critic(real)).mean())
        accelerator.backward(F.softplus(critic(fake.detach())).mean())
        of_critic.step()
        if number % every == 0:
            of_maker.zero_grad()
            if freezes:
                critic.requires_grad_(False)
            accelerator.backward(F.softplus(-critic(fake)).mean())
            critic.requires_grad_(True)
            of_maker.step()
    return named(maker=maker, critic=critic)


def a_gan_whose_maker_steps_on_every_second_batch(accelerator, loader):
    return a_gan(accelerator, loader, every=2)


def a_gan_that_freezes_its_critic(accelerator, loader):
    return a_gan(accelerator, loader, freezes=True)


def a_gan_with_modules_zero_grad(accelerator, loader):
    """As tutorials write it: plain backward passes, and the models zero their gradients."""
    maker, critic = gan()
    maker, critic, of_maker, of_critic, loader = accelerator.prepare(
        maker, critic, adam(maker.parameters()), sgd(critic.parameters()), loader
    )
    for noise, real, _ in loader:
        critic.zero_grad()
        F.softplus(-critic(real)).mean().backward()
        fake = maker(noise)
        F.softplus(critic(fake.detach())).mean().backward()
        of_critic.step()
        maker.zero_grad()
        critic.requires_grad_(False)
        F.softplus(-critic(fake)).mean().backward()
        critic.requires_grad_(True)
        of_maker.step()
    return named(maker=maker, critic=critic)


def a_gan_that_steps_on_both_losses(accelerator, loader):
    maker, critic = gan()
    maker, critic, of_maker, of_critic, loader = accelerator.prepare(
        maker, critic, adam(maker.parameters()), sgd(critic.parameters()), loader
    )
    for noise, real, _ in itertools.chain(loader, loader):
        of_critic.zero_grad()
        accelerator.backward(F.softplus(-critic(real)).mean() + F.softplus(critic(maker(noise).detach())).mean())
        of_maker.zero_grad()
        critic.requires_grad_(False)
        accelerator.backward(F.softplus(-critic(maker(noise))).mean())
        critic.requires_grad_(True)
        of_critic.step()
        of_maker.step()
    return named(maker=maker, critic=critic)


def alternating_gan(accelerator, loader, by_hand=1):
    """The maker's losses are those of the critic before its step, but for the last microbatch's."""
    maker, critic = gan()
    maker, critic, of_maker, of_critic, loader = accelerator.prepare(
        maker, critic, adam(maker.parameters()), sgd(critic.parameters()), loader
    )
    for number, (noise, real, _) in enumerate(itertools.chain(loader, loader)):
        begins, ends = number % by_hand == 0, number % by_hand == by_hand - 1
        if begins:
            of_critic.zero_grad()
        accelerator.backward(F.softplus(-critic(real)).mean() / by_hand)
        if ends:
            of_critic.step()
        if begins:
            of_maker.zero_grad()
        critic.requires_grad_(False)
        accelerator.backward(F.softplus(-critic(maker(noise))).mean() / by_hand)
        critic.requires_grad_(True)
        if ends:
            of_maker.step()
    return named(maker=maker, critic=critic)


def one_optimizer_of_two_models_of_which_one_rests(accelerator, loader):
    first, second = model(1), model(2)
    optimizer = sgd([*first.parameters(), *second.parameters()])
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for number, (inputs, targets, _) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss((first if number % 2 else second)(inputs), targets))
        optimizer.step()
    return named(first=first, second=second)


def two_optimizers_of_one_model(accelerator, loader):
    network = model()
    first, second = sgd(network[0].parameters()), adam(network[2].parameters())
    network, first, second, loader = accelerator.prepare(network, first, second, loader)
    for inputs, targets, _ in loader:
        first.zero_grad()
        second.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), targets))
        first.step()
        second.step()
    return named(network=network)


def evaluation_in_between(accelerator, loader):
    network = model()
    network, optimizer, loader, other = accelerator.prepare(
        network, adam(network.parameters()), loader, loader_of(11, 2)
    )
    for number, (inputs, targets, _) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(network(inputs), targets)
        if number % 2:
            evaluate(network, other, leaves=number == 1)
        accelerator.backward(loss)
        evaluate(network, other, leaves=False)
        optimizer.step()
    return named(network=network)


def evaluate(network, loader, leaves):
    network.eval()
    with torch.no_grad():
        for inputs, _, _ in loader:
            network(inputs)
            if leaves:
                break
    network.train()


def frozen_then_trained(accelerator, loader):
    """Layers are unfrozen in the middle, one in a group that the optimizer gets then."""
    network = model()
    weight = network[0].weight
    network[0].requires_grad_(False)
    network, optimizer, loader = accelerator.prepare(network, sgd(network[2].parameters()), loader)
    for number, (inputs, targets, _) in enumerate(itertools.chain(loader, loader)):
        if number == 2:
            weight.requires_grad_(True)
            optimizer.add_param_group({"params": [weight]})
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), targets))
        optimizer.step()
    return named(network=network)


def a_frozen_teacher(accelerator, loader):
    network, teacher = model(), model(5).requires_grad_(False)
    network, teacher, optimizer, loader = accelerator.prepare(network, teacher, adam(network.parameters()), loader)
    for inputs, _, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), teacher(inputs)))
        optimizer.step()
    return named(network=network, teacher=teacher)


class Tied(nn.Module):
    """The output layer's weight is the input layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).tanh())[:, :2]


def tied_weights(accelerator, loader):
    network = seeded(Tied())
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for inputs, targets, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), targets))
        optimizer.step()
    assert network.last.weight is network.first.weight
    return named(network=network)


def a_batch_left_out(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for number, (inputs, targets, _) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), targets))
        if number != 1:
            accelerator.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    return named(network=network)


def a_clipped_batch_left_out(accelerator, loader):
    network = model()
    network, optimizer, loader = accelerator.prepare(network, adam(network.parameters()), loader)
    for number, (inputs, targets, _) in enumerate(loader):
        network.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), targets))
        accelerator.clip_grad_norm_(network.parameters(), 0.5)
        if number != 1:
            optimizer.step()
    return named(network=network)


EVERY_BATCH_A_STEP = {
    each.__name__: each
    for each in (
        two_losses_two_forward_passes,
        two_losses_two_plain_forward_passes,
        two_losses_one_forward_pass,
        losses_of_one_forward_pass_without_reduction,
        several_backward_passes_of_one_forward_pass,
        a_model_that_runs_twice_in_one_loss,
        a_gan,
        a_gan_whose_maker_steps_on_every_second_batch,
        a_gan_that_freezes_its_critic,
        a_gan_with_modules_zero_grad,
        a_gan_that_steps_on_both_losses,
        one_optimizer_of_two_models_of_which_one_rests,
        two_optimizers_of_one_model,
        evaluation_in_between,
        frozen_then_trained,
        a_frozen_teacher,
        tied_weights,
        a_batch_left_out,
        a_clipped_batch_left_out,
    )
}

ACCUMULATING = {
    each.__name__: each
    for each in (
        two_losses_two_forward_passes,
        two_losses_two_plain_forward_passes,
        a_model_that_runs_twice_in_one_loss,
        a_gan_that_steps_on_both_losses,
        two_optimizers_of_one_model,
        a_frozen_teacher,
        tied_weights,
    )
}


@pytest.mark.parametrize("samples", [24, 23, 19])
def test_the_same_lines_give_the_same_weights_on_one_device_and_on_several_ranks(mode, samples):
    compare(mode, EVERY_BATCH_A_STEP, samples)


@pytest.mark.parametrize("accumulate", [pytest.param(2, marks=pytest.mark.any_family), 3])
def test_the_same_lines_accumulate_what_one_device_takes_at_once(mode, accumulate):
    compare(mode, ACCUMULATING, 43, 2, gradient_accumulation_steps=accumulate)


@pytest.mark.any_family
@pytest.mark.parametrize("accumulate", [2, 3])
def test_optimizers_that_take_turns_accumulate_each_for_itself(mode, accumulate):
    samples = 2 * 2 * mode.ranks * accumulate
    states = mode.run(
        lambda: alternating_gan(Accelerator(gradient_accumulation_steps=accumulate), loader_of(samples, 2))
    )
    assert_all_are(states, alternating_gan(Plain(), loader_of(samples, 2 * mode.ranks), by_hand=accumulate))


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_without_a_prepared_loader_requests_and_blocks_distinguish_microbatches(mode, accumulate, in_blocks):
    samples = 2 * 2 * mode.ranks * accumulate

    def body():
        accelerator = Accelerator(gradient_accumulation_steps=accumulate)
        maker, critic = gan()
        maker, critic, of_maker, of_critic = accelerator.prepare(
            maker, critic, adam(maker.parameters()), sgd(critic.parameters())
        )
        for noise, real, _ in list(loader_of(samples, 2))[accelerator.world.rank :: mode.ranks] * 2:
            with accelerator.accumulate(maker, critic) if in_blocks else nullcontext():
                of_critic.zero_grad()
                accelerator.backward(F.softplus(-critic(real)).mean())
                of_critic.step()
                of_maker.zero_grad()
                critic.requires_grad_(False)
                accelerator.backward(F.softplus(-critic(maker(noise))).mean())
                critic.requires_grad_(True)
                of_maker.step()
        return named(maker=maker, critic=critic)

    assert_all_are(mode.run(body), alternating_gan(Plain(), loader_of(samples, 2 * mode.ranks), by_hand=accumulate))
