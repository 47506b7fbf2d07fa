"""`optimizer_step`: what it counts, compares, passes on and refuses. Its weights are held to account in
`prepared/test_exactness.py`, closures in `prepared/test_closures.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, each_of, fitting
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from twin import State, assert_same_bits, data
from twin import model as model_in_main_memory

import unisono
from unisono import DeviceIterator, DeviceLoader, broadcast_parameters, optimizer_step
from unisono.devices.cpu import CpuBackend
from unisono.world import solo_world

Loader = DeviceIterator | DeviceLoader


pair = each_of(fitting(THREADS_2, PROCESSES_2))


def model(seed: int = 0) -> nn.Module:
    return model_in_main_memory(seed).to(torch.get_default_device())


def test_a_loader_that_cuts_itself_counts_equally_per_rank(pair):
    def body() -> float:
        sampler = DistributedSampler(data(6), unisono.world_size(), unisono.rank())
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        for _ in DeviceLoader(DataLoader(data(6), batch_size=3, sampler=sampler)):
            (weight * (unisono.rank() + 1)).sum().backward()
            optimizer_step(torch.optim.SGD([weight], lr=1.0))
        return weight.item()

    assert pair.run(body) == [-1.5, -1.5]


@pytest.mark.any_family
def test_batches_without_gradients_do_not_count(pair):
    """Evaluation between two steps, on a split tail, leaves the shares of the next step as they are."""
    train, test = [torch.ones(3), torch.ones(1)], [torch.ones(5)]

    def body(batches: Loader) -> float:
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        (batch,) = batches
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for _ in DeviceLoader(test):
                    pass
        (weight * len(batch)).sum().backward()
        optimizer_step(torch.optim.SGD([weight], lr=1.0))
        return weight.item()

    assert pair.loop(body, train) == [-(3 * 0.75 + 1 * 0.25)] * 2


def stepped(network: nn.Module, inputs: torch.Tensor) -> None:
    network(inputs).sum().backward()
    optimizer_step(torch.optim.SGD(network.parameters(), lr=0.1))


@pytest.mark.any_family
def test_ranks_with_different_numbers_of_batches_are_told(pair):
    def body() -> None:
        batches = iter(DeviceLoader([torch.ones(2, 5).double()] * 8))
        for _ in range(2 - unisono.rank()):
            batch = next(batches)
        stepped(model(), batch)

    for message in pair.told(body):
        assert "a step on batch 2 of its loop" in message
        assert "a step on batch 1 of its loop" in message


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def longer() -> nn.Module:
    return nn.Sequential(*model(), nn.Linear(2, 2).double())


@pytest.mark.any_family
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: model(1), "the optimizer's parameter 0 is float64[7, 5] with bits"),
        (wider, "is float64[7, 5] with bits"),
        (lambda: model().float(), "and float32[7, 5] with bits"),
        (longer, "the optimizer's parameter 4 is missing on rank 0 and float64[2, 2] with bits"),
    ],
    ids=["another seed", "another shape", "another type", "a parameter more"],
)
def test_ranks_with_different_models_are_told_which_parameter_differs(pair, other, words):
    def body() -> None:
        network = model() if unisono.rank() == 0 else other()
        stepped(network, torch.ones(1, 5, dtype=next(network.parameters()).dtype))

    for message in pair.told(body):
        assert "the ranks' models differ" in message
        assert words in message
        assert "broadcast_parameters(model)" in message


def test_a_broadcast_mends_different_models_buffers_too(pair):
    def body() -> State:
        network = nn.Sequential(model(unisono.rank()), nn.BatchNorm1d(2).double())
        network[1].running_mean += unisono.rank()
        network[1].num_batches_tracked += unisono.rank()
        broadcast_parameters(network, root=1)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        stepped(network.eval(), torch.ones(1, 5).double())
        return before

    states = pair.run(body)
    assert_same_bits(states)
    assert states[0]["1.running_mean"].tolist() == [1.0, 1.0]
    assert states[0]["1.num_batches_tracked"] == 1
    torch.testing.assert_close(
        {name[2:]: states[0][name] for name in states[0] if name.startswith("0.")}, model(1).state_dict()
    )


def ready(value: complex = 0.0) -> nn.Parameter:
    """A parameter whose gradient is one more than the rank, or has that many imaginary parts."""
    weight = nn.Parameter(torch.tensor([value]))
    weight.grad = torch.tensor([1.0 + (1j if isinstance(value, complex) else 1) * unisono.rank()])
    return weight


ALONE: dict[str, tuple[Callable[[], list[nn.Parameter]], dict[str, Any], list[complex]]] = {
    "a closure of None": (lambda: [ready()], {"optimizer_args": {"closure": None}}, [-1.5]),
    "a frozen parameter": (lambda: [nn.Parameter(torch.ones(1), requires_grad=False), ready()], {}, [1.0, -1.5]),
    "complex numbers": (lambda: [ready(0j)], {}, [-1 - 0.5j]),
}


@pytest.mark.any_family
@pytest.mark.parametrize("what", ALONE)
def test_gradients_that_are_there_are_stepped_on_alike_with(pair, what):
    def body() -> list[complex]:
        make, options, _ = ALONE[what]
        weights = make()
        optimizer_step(torch.optim.SGD(weights, lr=1.0), **options)
        return [each.item() for each in weights]

    assert pair.run(body) == [ALONE[what][2]] * 2


class Telling(torch.optim.SGD):
    """Returns what its step was called with."""

    def step(self, closure: Any = None, **options: Any) -> Any:
        super().step(closure)
        return options


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_it_passes_the_arguments_on_and_returns_what_step_returns(mode):
    def body() -> tuple[Any, Any]:
        network = model()
        network(torch.ones(1, 5).double()).sum().backward()
        arguments = {"scale": 2, "closure": lambda: torch.tensor(1.0)}
        kept = dict(arguments)
        result = optimizer_step(Telling(network.parameters(), lr=0.1), optimizer_args=arguments)
        assert arguments == kept
        return result, optimizer_step(Telling(network.parameters(), lr=0.1))

    assert mode.run(body) == [({"scale": 2}, {})] * mode.ranks


class Counting(CpuBackend):
    """A family that counts the ends of steps, and who waits for the device."""

    steps = 0
    waits = 0

    def mark_step(self, device: torch.device) -> None:
        self.steps += 1

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1


def test_a_step_ends_the_devices_step_once_and_a_barrier_waits_for_it():
    world = dataclasses.replace(solo_world(), backend=Counting())
    network = model()
    network(torch.ones(1, 5).double()).sum().backward()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    optimizer_step(optimizer, world=world)
    assert (world.backend.steps, world.backend.waits) == (1, 0)
    optimizer_step(optimizer, barrier=True, world=world)
    assert (world.backend.steps, world.backend.waits) == (2, 1)


@pytest.mark.any_family
def test_steps_are_counted_and_timed():
    world = solo_world()
    network = model()
    network(torch.ones(1, 5).double()).sum().backward()
    for _ in range(3):
        optimizer_step(torch.optim.SGD(network.parameters(), lr=0.1), world=world)
    track = world.timeline.loop()
    assert track.counts == {"steps": 3}
    assert [span.phase for span in track.spans] == ["reduce", "step"] * 3


@pytest.mark.parametrize(
    "optimizer", [None, 5, "sgd", model(), [torch.optim.SGD(model().parameters(), lr=1.0)]], ids=str
)
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError, match=r"pass a torch\.optim\.Optimizer"):
        optimizer_step(optimizer)


@pytest.mark.parametrize("is_left_early", [False, True])
def test_after_a_loop_an_ambiguous_step_needs_its_batch_named(pair, is_left_early):
    def body(batches: Loader) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in batches:
            weight.grad = torch.zeros(1)
            optimizer_step(optimizer)
            if is_left_early:
                break
        del batches
        loss = (weight * (1 + unisono.rank())).sum()
        weight.grad = torch.zeros(1)
        with pytest.raises(ValueError, match=r"data of no loader or \d of the 4 samples of all ranks"):
            optimizer_step(optimizer)
        unisono.backward(loss, batch=())
        optimizer_step(optimizer)
        return weight.item()

    assert pair.run(lambda: body(DeviceLoader([torch.ones(3), torch.ones(1)]))) == [-1.5, -1.5]
