"""ZeRO-1 against the plain optimizer on one device with the whole batch, in float64 and under uneven shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, Mode
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from unisono.parallel.strategies.hooks import attach_hook
from unisono.parallel.strategies.sharded import shard
from unisono.parallel.strategies.zero1 import check_divisible, is_divided, shard_optimizer
from unisono.strategies import FSDP
from unisono.world import current_world

PROCESSES_4 = Mode("processes", 4)
SAMPLES = 11
CUTS = {2: [0, 1, 11], 4: [0, 1, 4, 4, 11]}  # one of four ranks has none
CLOSE = {"rtol": 1e-12, "atol": 1e-14}

Named = dict[str, torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.05, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.05, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
}


@pytest.fixture(params=[PROCESSES_2, PROCESSES_4], ids=str)
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


def network() -> nn.Sequential:
    """With a frozen bias; three parameters of four ranks' at most are trained in the second group."""
    made = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)).double()
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64) / 3)
    made[0].bias.requires_grad_(False)
    return made


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    first, second = list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]
    return [{"params": first, "weight_decay": 0.01}, {"params": second, "lr": 0.02}]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 5, generator=numbers, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 2, generator=numbers, dtype=torch.float64)


def own_range() -> slice:
    world = current_world()
    return slice(*CUTS[world.world_size][world.rank : world.rank + 2])


def own_share() -> float:
    return len(batch(0)[0][own_range()]) / SAMPLES


def backward(model: nn.Module, step: int, part: slice) -> None:
    inputs, targets = (each[part] for each in batch(step))
    outputs = model(inputs)
    (F.mse_loss(outputs, targets) if len(inputs) else outputs.sum()).backward()


def replicated(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    attach_hook(ddp, None, own_share)
    return ddp


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, part: slice = slice(None)) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, part)
        optimizer.step()


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def assert_same_bits(ranks: list[Any]) -> None:
    for others in ranks[1:]:
        torch.testing.assert_close(others, ranks[0], rtol=0, atol=0)


def test_weights_are_those_of_the_plain_optimizer_with_the_whole_batch(mode):
    def body() -> dict[str, Named]:
        found = {}
        for name, make in OPTIMIZERS.items():
            model = network()
            optimizer = shard_optimizer(make(groups_of(model)))
            train(replicated(model), optimizer, range(4), own_range())
            found[name] = model.state_dict()
        return found

    ranks = mode.run(body)
    assert_same_bits(ranks)
    for name, make in OPTIMIZERS.items():
        plain = network()
        train(plain, make(groups_of(plain)), range(4))
        print(name)
        torch.testing.assert_close(ranks[0][name], dict(plain.state_dict()), **CLOSE)


def test_an_optimizer_goes_on_with_its_state_and_each_rank_keeps_its_part_of_it(mode):
    def body() -> tuple[Named, int, int, list[dict[str, Any]]]:
        model = network()
        plain = OPTIMIZERS["adamw"](groups_of(model))
        train(model, plain, range(2))  # the whole batch on each rank
        optimizer = shard_optimizer(plain)
        train(replicated(model), optimizer, range(2, 4), own_range())
        groups = [without_parameters(group) for group in optimizer.param_groups]
        return model.state_dict(), len(optimizer.optim.state), len(plain.state), groups

    plain = network()
    optimizer = OPTIMIZERS["adamw"](groups_of(plain))
    train(plain, optimizer, range(4))
    ranks = mode.run(body)
    for state, _, num_left, groups in ranks:
        torch.testing.assert_close(state, dict(plain.state_dict()), **CLOSE)
        assert num_left == 0
        for own, exact in zip(groups, optimizer.param_groups, strict=True):
            assert own == without_parameters(exact)
    kept = [num_kept for _, num_kept, *_ in ranks]
    assert sum(kept) == len(optimizer.state) == 4
    assert max(kept) < 4


def test_schedulers_reach_the_optimizers_of_all_ranks():
    def schedule(optimizer: torch.optim.Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, [0.1, 0.3], total_steps=6)  # of the momentum, too

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
        scheduler = schedule(optimizer)
        for step in range(5):
            train(model, optimizer, range(step, step + 1), part)
            scheduler.step()

    def body() -> tuple[Named, list[float]]:
        model = network()
        optimizer = shard_optimizer(OPTIMIZERS["adamw"](groups_of(model)))
        run(replicated(model), optimizer, own_range())
        return model.state_dict(), [group["lr"] for group in optimizer.param_groups]

    plain = network()
    optimizer = OPTIMIZERS["adamw"](groups_of(plain))
    run(plain, optimizer, slice(None))
    for state, rates in PROCESSES_2.run(body):
        torch.testing.assert_close(state, dict(plain.state_dict()), **CLOSE)
        assert rates == [group["lr"] for group in optimizer.param_groups]


def test_hooks_of_steps_go_along_and_their_handles_still_remove_them():
    def body() -> list[str]:
        called, model = [], network()
        plain = OPTIMIZERS["sgd"](groups_of(model))
        before = plain.register_step_pre_hook(lambda optimizer, *_: called.append(f"before {type(optimizer).__name__}"))
        after = plain.register_step_post_hook(lambda *_: called.append("after"))
        optimizer = shard_optimizer(plain)
        wrapped = replicated(model)
        train(wrapped, optimizer, range(2), own_range())
        before.remove()
        train(wrapped, optimizer, range(2, 3), own_range())
        after.remove()
        train(wrapped, optimizer, range(3, 4), own_range())
        return called

    assert PROCESSES_2.run(body) == [[*["before ZeroRedundancyOptimizer", "after"] * 2, "after"]] * 2


def test_memory_formats_stay_as_they_are():
    def model() -> nn.Sequential:
        made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).double().to(memory_format=torch.channels_last)
        numbers = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64))
        return made

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
        for place, parameter in enumerate(network.parameters()):
            parameter.grad = torch.full_like(parameter, place + 1)
        optimizer.step()
        return dict(network.state_dict())

    def body() -> tuple[Named, bool]:
        network = model()
        state = step(network, shard_optimizer(torch.optim.Adam(network.parameters())))
        return state, network[1].weight.is_contiguous(memory_format=torch.channels_last)

    plain = model()
    expected = step(plain, torch.optim.Adam(plain.parameters()))
    for state, is_channels_last in PROCESSES_2.run(body):
        torch.testing.assert_close(state, expected, **CLOSE)
        assert is_channels_last


class Jointly(torch.optim.SGD):
    """Made by something else than its groups."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)


def test_what_cannot_be_divided_is_told():
    def told(optimizer: torch.optim.Optimizer) -> str:
        with pytest.raises((TypeError, ValueError)) as error:
            check_divisible(optimizer)
        return f"{type(error.value).__name__}: {error.value}"

    def processes() -> list[str]:
        model = network()
        divided = shard_optimizer(torch.optim.SGD(model.parameters()))
        assert is_divided(divided)
        in_parts: Any = shard(network(), current_world(), FSDP(()))
        assert all(isinstance(parameter, DTensor) for parameter in in_parts.parameters())
        two_types = [*nn.Linear(2, 2).parameters(), *network().parameters()]
        wrong = [divided, torch.optim.SGD(in_parts.parameters()), torch.optim.SGD(two_types), Jointly(model)]
        return [told(optimizer) for optimizer in wrong]

    for already, in_parts, two_types, jointly in PROCESSES_2.run(processes):
        assert already.startswith("TypeError: the optimizer is already a ZeroRedundancyOptimizer")
        assert in_parts.startswith("ValueError: ")
        assert "parameter 0 of the SGD is a DTensor" in in_parts
        assert "parameter 0 of the SGD is torch.float32, parameter 2 is torch.float64" in two_types
        assert jointly.startswith("TypeError: strategy='zero1' makes a Jointly on each rank from its groups")
