"""ZeRO-1: what an optimizer has when it is prepared goes along, and each rank keeps a part of its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PROCESSES_2
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from twin import CLOSE, Plain, State, assert_all_are, loader_of, mean_loss, model, seeded, sgd

from unisono import Accelerator


def goes_on_with_its_state(accelerator: Any, loader: DataLoader[Any]) -> tuple[State, Any]:
    """Of two groups, after two steps; a schedule changes their rates and their momentum."""
    network = model()
    network[0].bias.requires_grad_(False)
    first, second = list(network[0].parameters()), list(network[2].parameters())
    groups = [{"params": first, "weight_decay": 0.01}, {"params": second, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, amsgrad=True)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(network, loader.dataset[:6]).backward()
        optimizer.step()
    scheduler: Any = OneCycleLR(optimizer, [0.1, 0.3], total_steps=20)
    trained, stepped, scheduler, loader = accelerator.prepare(network, optimizer, scheduler, loader)
    assert stepped is optimizer or not optimizer.state  # the whole state would take the memory that is saved
    for batch in loader:
        stepped.zero_grad()
        accelerator.backward(mean_loss(trained, batch))
        stepped.step()
        scheduler.step()
    return network.state_dict(), stepped


def test_an_optimizer_keeps_its_state_and_each_rank_holds_its_part() -> None:
    mode = PROCESSES_2

    def body() -> tuple[State, int, list[Any]]:
        state, optimizer = goes_on_with_its_state(Accelerator(strategy="zero1", schedule_unit="step"), loader_of(23, 3))
        return state, len(optimizer.optim.state), [without_parameters(group) for group in optimizer.param_groups]

    ranks = mode.run(body)
    expected, plain = goes_on_with_its_state(Plain(), loader_of(23, 3 * mode.ranks))
    assert_all_are([state for state, *_ in ranks], expected)
    for _, _, groups in ranks:
        assert groups == [without_parameters(group) for group in plain.param_groups]
    kept = [count for _, count, _ in ranks]
    assert sum(kept) == len(plain.state) == 3
    assert max(kept) < 3


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def test_hooks_of_steps_go_along_and_their_handles_still_remove_them() -> None:
    def body() -> list[str]:
        called, network, accelerator = [], model(), Accelerator(strategy="zero1")
        plain = sgd(network.parameters())
        before = plain.register_step_pre_hook(lambda optimizer, *_: called.append(f"before {type(optimizer).__name__}"))
        after = plain.register_step_post_hook(lambda *_: called.append("after"))
        network, optimizer = accelerator.prepare(network, plain)

        def step() -> None:
            network(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()

        step()
        step()
        before.remove()
        step()
        after.remove()
        step()
        return called

    assert PROCESSES_2.run(body) == [[*["before ZeroRedundancyOptimizer", "after"] * 2, "after"]] * 2


def test_memory_formats_stay_as_they_are() -> None:
    def step(accelerator: Any) -> tuple[State, bool]:
        network: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).double()
        network = seeded(network.to(memory_format=torch.channels_last))
        trained, optimizer = accelerator.prepare(network, torch.optim.Adam(network.parameters()))
        trained(torch.ones(2, 3, 8, 8, dtype=torch.float64)).pow(2).sum().backward()
        optimizer.step()
        return network.state_dict(), network[1].weight.is_contiguous(memory_format=torch.channels_last)

    expected, _ = step(Plain())
    for state, is_channels_last in PROCESSES_2.run(lambda: step(Accelerator(strategy="zero1"))):
        torch.testing.assert_close(state, expected, **CLOSE)
        assert is_channels_last


class Jointly(torch.optim.SGD):
    """Made by something else than its groups."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network.parameters(), lr=0.1)


def test_what_cannot_be_divided_is_refused_before_its_model_is_prepared() -> None:
    def body() -> list[str]:
        network, accelerator = model(), Accelerator(strategy="zero1")
        two_types = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        found = []
        for module, optimizer in ((network, Jointly(network)), (two_types, sgd(two_types.parameters()))):
            with pytest.raises((TypeError, ValueError)) as error:
                accelerator.prepare(module, optimizer)
            found.append(f"{type(error.value).__name__}: {error.value}")
        accelerator.prepare(network, sgd(network.parameters()))
        return found

    for jointly, two_types in PROCESSES_2.run(body):
        assert jointly.startswith("TypeError: strategy='zero1' makes a Jointly on each rank from its groups")
        assert "parameter 0 of the SGD is torch.float32, parameter 2 is torch.float64" in two_types


def test_its_state_dict_says_how_to_have_the_whole_state() -> None:
    def body() -> int | None:
        accelerator, network = Accelerator(strategy="zero1"), model()
        network, optimizer = accelerator.prepare(network, torch.optim.Adam(network.parameters()))
        network(torch.ones(1, 5).double()).sum().backward()
        optimizer.step()
        words = r"divided the state of the Adam among the ranks, .*; accelerator.save_state\(\) saves it, and acc"
        with pytest.raises(RuntimeError, match=words):
            optimizer.state_dict()
        whole = accelerator.state_dict(optimizer)
        optimizer.consolidate_state_dict(to=0)  # torch's own way
        if accelerator.is_main_process:
            assert whole["state"].keys() == optimizer.state_dict()["state"].keys()
            return len(whole["state"])
        return None

    assert PROCESSES_2.run(body) == [4, None]
