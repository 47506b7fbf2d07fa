"""Loops with lines that no random program has: they train the weights of one device with the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from modes import FAMILY, HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, fitting, scaling
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from twin import State, adam, compare, data, loader_of, mean_loss, model, seeded, sgd, steps, straight, whole

from unisono import Accelerator, backward

ALONE = [SOLO] if FAMILY == "cpu" else []  # elsewhere all of these loops may be compiled, and once is enough
MODES = pytest.mark.parametrize("mode", [SOLO, THREADS_3, PROCESSES_2], ids=str)
PAIRS = pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)

Training = tuple[Any, Any, Any]


def prepared(accelerator: Any, loader: DataLoader[Any]) -> Training:
    network = model()
    made: Training = accelerator.prepare(network, sgd(network.parameters()), loader)
    return made


def two_losses_of_forward_passes_of_which_one_does_not_sync(accelerator: Any, network: Any, batch: Any) -> None:
    with accelerator.no_sync(network):
        outputs = network(batch[0])
    accelerator.backward(F.mse_loss(outputs, batch[1]) + outputs.abs().mean())
    accelerator.backward(0.3 * network(2 * batch[0]).pow(2).mean())


def twice_in_one_loss(accelerator: Any, network: Any, batch: Any) -> None:
    accelerator.backward(F.mse_loss(network(batch[0]) + network(batch[0].flip(1)), batch[1]))


def checkpointed(accelerator: Any, network: Any, batch: Any) -> None:
    accelerator.backward(F.mse_loss(checkpoint(network, batch[0] * 2, use_reentrant=False), batch[1]))


class Tied(nn.Module):
    """The output layer's weight is the input layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.first(inputs).tanh())[:, :2]
        return outputs


def gan() -> tuple[nn.Module, nn.Module]:
    critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return seeded(nn.Linear(5, 2).double(), 1), seeded(critic, 2)


def a_gan_that_steps_on_both_losses(accelerator: Any, loader: DataLoader[Any]) -> State:
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
    return whole(maker, critic)


def a_frozen_teacher(accelerator: Any, loader: DataLoader[Any]) -> State:
    network, teacher = model(), model(5).requires_grad_(False)
    network, teacher, optimizer, loader = accelerator.prepare(network, teacher, adam(network.parameters()), loader)
    for inputs, _, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(network(inputs), teacher(inputs)))
        optimizer.step()
    return whole(network, teacher)


def by_an_optimizer_that_was_not_prepared(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, loader = accelerator.prepare(network, loader)
    optimizer = sgd(network.parameters())
    for batch in loader:
        accelerator.backward(mean_loss(network, batch))
        if getattr(accelerator, "sync_gradients", True):
            optimizer.step()
            optimizer.zero_grad()
    return whole(network)


def through_a_reader_without_gradients(accelerator: Any, loader: DataLoader[Any]) -> State:
    @torch.no_grad()
    def changed(batches: Iterable[Any]) -> Iterator[Any]:
        for inputs, *others in batches:
            yield [inputs * 2 + 1, *others]

    network, optimizer, loader = prepared(accelerator, loader)
    for batch in changed(loader):
        accelerator.backward(mean_loss(network, batch))
        optimizer.step()
        optimizer.zero_grad()
    return whole(network)


def beside_a_loop_of_evaluation_that_stays_open(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    network, optimizer, loader, other = accelerator.prepare(
        network, sgd(network.parameters()), loader, loader_of(90, 1)
    )
    evaluated = iter(other)
    for batch in loader:
        accelerator.backward(mean_loss(network, batch))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            network(next(evaluated)[0])
    del evaluated
    return whole(network)


LINES = {
    twice_in_one_loss.__name__: steps(twice_in_one_loss),
    "tied weights": steps(straight, lambda: seeded(Tied())),
    **{
        each.__name__: each
        for each in (
            a_gan_that_steps_on_both_losses,
            a_frozen_teacher,
            by_an_optimizer_that_was_not_prepared,
            through_a_reader_without_gradients,
            beside_a_loop_of_evaluation_that_stays_open,
        )
    },
}


@pytest.mark.parametrize(
    ("mode", "accumulate"),
    [
        (THREADS_3, 1),
        *(pytest.param(each, 2, marks=pytest.mark.any_family) for each in scaling(*ALONE, THREADS_3, PROCESSES_2)),
    ],
    ids=str,
)
def test_the_same_lines_take_the_steps_of_one_device(mode: Mode, accumulate: int) -> None:
    compare(mode, LINES, 43, 2, gradient_accumulation_steps=accumulate)


def several_backward_passes_of_one_forward_pass(accelerator: Any, network: Any, batch: Any) -> None:
    outputs, others = network(batch[0]), network(batch[0].flip(1))
    F.mse_loss(outputs, batch[1]).backward(retain_graph=True)
    (0.3 * outputs.pow(2).mean()).backward()
    others.abs().mean().backward()


def several_of_one_that_does_not_sync(accelerator: Any, network: Any, batch: Any) -> None:
    with accelerator.no_sync(network):
        outputs = network(batch[0])
    F.mse_loss(outputs, batch[1]).backward(retain_graph=True)
    (0.3 * outputs.pow(2).mean()).backward()


def edited_by_hand(accelerator: Any, network: Any, batch: Any) -> None:
    accelerator.backward(mean_loss(network, batch))
    for each in network.parameters():
        each.grad = each.grad.sign() * each.grad.abs().max()


def means_over_tokens_of_two_kinds(accelerator: Any, network: Any, batch: Any) -> None:
    inputs, targets, _ = batch
    for kind in range(2):
        tokens = 1 + (inputs[:, kind] > 0).double()
        with accelerator.accumulate():
            accelerator.backward(mean_loss(network, [inputs, targets, tokens], True), weight=tokens.sum())


def one_optimizer_of_two_models_of_which_one_rests(accelerator: Any, loader: DataLoader[Any]) -> State:
    first, second = model(1), model(2)
    optimizer = sgd([*first.parameters(), *second.parameters()])
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for number, (inputs, targets, _) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss((first if number % 2 else second)(inputs), targets))
        optimizer.step()
    return whole(first, second)


def a_group_that_is_added_and_trained(accelerator: Any, loader: DataLoader[Any]) -> State:
    network = model()
    weight = network[0].weight
    network[0].requires_grad_(False)
    network, optimizer, loader = accelerator.prepare(network, sgd(network[2].parameters()), loader)
    for number, batch in enumerate(itertools.chain(loader, loader)):
        if number == 2:
            weight.requires_grad_(True)
            optimizer.add_param_group({"params": [weight]})
        optimizer.zero_grad()
        accelerator.backward(mean_loss(network, batch))
        optimizer.step()
    return whole(network)


def sums_of_two_batches(accelerator: Any, loader: DataLoader[Any]) -> State:
    network, optimizer, loader = prepared(accelerator, loader)
    for number, batch in enumerate(loader):
        with accelerator.no_sync(network) if number % 2 else nullcontext():
            mean_loss(network, batch).backward()
        if number % 2 == 0:  # the first batch alone, then two
            optimizer.step()
            optimizer.zero_grad()
    return whole(network)


STEP_BY_STEP = {
    **{
        each.__name__: steps(each)
        for each in (
            checkpointed,
            two_losses_of_forward_passes_of_which_one_does_not_sync,
            several_backward_passes_of_one_forward_pass,
            several_of_one_that_does_not_sync,
            edited_by_hand,
            means_over_tokens_of_two_kinds,
        )
    },
    **{
        each.__name__: each
        for each in (
            one_optimizer_of_two_models_of_which_one_rests,
            a_group_that_is_added_and_trained,
            sums_of_two_batches,
        )
    },
}


@MODES
def test_they_do_where_each_batch_is_a_step(mode: Mode) -> None:
    compare(mode, STEP_BY_STEP, 23, 3)


@pytest.mark.parametrize(("mode", "accumulate"), [(SOLO, 1), (SOLO, 2), (THREADS_2, 1)], ids=str)
def test_a_batch_that_matters_but_is_ambiguous_is_an_error_with_a_way_out(mode: Mode, accumulate: int) -> None:
    def body() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=accumulate)
        network, optimizer, loader = prepared(accelerator, loader_of(23, 3))
        held: list[Any] = []
        for inputs, *others in loader:
            held.append([inputs + 0, *others])
            if len(held) > 1:  # one ahead
                accelerator.backward(mean_loss(network, held.pop(0)))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.backward(mean_loss(network, held.pop()))

    if (mode, accumulate) == (SOLO, 1):  # each batch weighs 1 there
        mode.run(body)
        return
    way = r"with accelerator\.accumulate\(\)" if accumulate > 1 else r"backward\(loss, batch=batch\)"
    with pytest.raises(ValueError, match=way):
        mode.run(body)


@PAIRS
def test_backward_passes_around_the_prepared_model_are_weighed_and_reduced(mode: Mode) -> None:
    def past(accelerator: Any, network: Any, batch: Any) -> None:
        mean_loss(getattr(network, "module", network), batch).backward()

    compare(mode, steps(past), gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("mode", "strategy"), [(THREADS_2, "ddp"), (PROCESSES_2, "ddp"), (PROCESSES_2, "fsdp")], ids=str
)
def test_a_mean_over_nothing_with_the_weight_0_spreads_no_nan(mode: Mode, strategy: Any) -> None:
    def train(is_last: bool) -> bool:
        accelerator = Accelerator(gradient_accumulation_steps=2, strategy=strategy)
        network = model()
        network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
        for place in range(2):
            with accelerator.accumulate():
                inputs, targets, _ = data(4)[:]
                counts = torch.full((4, 1), float(accelerator.world.rank == 0 or (place == 1) != is_last))
                optimizer.zero_grad()
                backward(((network(inputs) - targets).pow(2) * counts).sum() / counts.sum(), counts.sum())
                optimizer.step()
        return all(bool(each.isfinite().all()) for each in (accelerator.state_dict(network) or {}).values())

    assert mode.run(lambda: [train(False), train(True)]) == [[True, True]] * 2


@pytest.mark.parametrize("in_blocks", [False, True])
def test_what_is_left_of_a_loop_that_is_not_prepared_is_told_of(
    in_blocks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, network = Accelerator(gradient_accumulation_steps=2), model()
    network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
    with HOST:
        batches = loader_of(12, 2)
    for batch in batches:
        with accelerator.accumulate() if in_blocks else nullcontext():
            optimizer.zero_grad()
            mean_loss(network, batch).backward()
            optimizer.step()
    found = [each.message for each in caplog.records if "gradient_accumulation_steps=2" in each.message]
    assert len(found) == (not in_blocks)
    assert all("prepare(loader)" in each and "accumulate():" in each for each in found)


@PAIRS
def test_fixed_size_noise_is_an_error_and_each_way_out_counts_the_batch(mode: Mode) -> None:
    def train(rows: int | None, is_named: bool) -> float:
        accelerator, (maker, critic) = Accelerator(), gan()
        maker, critic, optimizer, loader = accelerator.prepare(maker, critic, sgd(maker.parameters()), loader_of(5, 4))
        for batch in loader:
            optimizer.zero_grad()
            fake = maker(torch.ones(rows or len(batch[0]), 5, dtype=torch.double, device=accelerator.device))
            accelerator.backward(F.softplus(-critic(fake)).mean(), **({"batch": batch} if is_named else {}))
            optimizer.step()
        return float(whole(maker)["weight"].sum())

    with pytest.raises(ValueError, match=r"as noise is.*torch\.randn\(len\(batch\), .*backward\(loss, batch=batch\)"):
        mode.run(lambda: train(4, False))
    assert mode.run(lambda: train(None, False)) == pytest.approx(mode.run(lambda: train(4, True)))


@pytest.mark.parametrize(
    ("mode", "rows", "skipped"), [(THREADS_2, 2, 3), (THREADS_2, 5, 0), (PROCESSES_2, 2, 0)], ids=str
)
def test_data_of_no_loader_is_refused_at_once_or_never(mode: Mode, rows: int, skipped: int) -> None:
    """Whether it counts as the batches do is known from the first use on, or from the second where it has their rows;
    it depends on the loader's last round alone, also of an epoch that is resumed."""

    def train(samples: int) -> tuple[int, str]:
        accelerator, network = Accelerator(), model()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(samples, 2))
        state = loader.state_dict()
        loader.load_state_dict({**state, "offset": skipped})
        other, taken = torch.ones(rows, 5, dtype=torch.double, device=accelerator.device), 0
        try:
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(mean_loss(network, batch))
                accelerator.backward(network(other).mean())
                optimizer.step()
                taken += 1
        except ValueError as error:
            return taken, str(error)
        return taken, ""

    assert mode.run(lambda: [train(skipped + left) for left in (20, 22)]) == [[(5, ""), (6, "")]] * 2
    for left in (19, 21, 23):
        for taken, error in mode.run(lambda left=left: train(skipped + left)):
            assert taken == (rows == 2)
            assert "batch=()" in error
