"""States that were saved under one strategy continue under any other, as if nothing had been between, in float64."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel.strategies.hooks import attach_hook
from unisono.parallel.strategies.sharded import is_sharded, shard
from unisono.parallel.strategies.states import load_model_state, load_optimizer_state, model_state, optimizer_state
from unisono.parallel.strategies.zero1 import shard_optimizer
from unisono.strategies import FSDP
from unisono.world import current_world

PROCESSES_4 = Mode("processes", 4)
STRATEGIES = ("ddp", "zero1", "fsdp")
IMPOSSIBLE = [("fsdp", "adafactor")]  # for torch's DTensors
SAMPLES = 11
CUTS = {1: [0, 11], 2: [0, 1, 11], 4: [0, 1, 4, 4, 11]}  # one of four ranks has none
CLOSE = {"rtol": 1e-12, "atol": 1e-14}
BEFORE, AFTER = range(3), range(3, 6)  # steps

State = dict[str, Any]
Saved = tuple[State, State]  # of the model and of the optimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.AdamW(groups, lr=0.05, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),  # its state has other shapes than parameters
}


class Network(nn.Module):
    """Tied weights, a buffer, a frozen parameter, a name that looks like a wrapper's, a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.module = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.module[0].bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.module(self.embedding(tokens)))


def network(seed: int = 0) -> Network:
    made = Network().double()
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64) / 3)
    return made


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """In another order than the model's."""
    named = dict(model.named_parameters())
    decayed = [each for name, each in reversed(named.items()) if name.endswith("weight") and each.requires_grad]
    others = [each for name, each in named.items() if name.endswith("bias")]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": others, "lr": 0.02}]


class Run:
    """A model and an optimizer under a strategy."""

    def __init__(self, strategy: str, make_optimizer: Callable[[Any], torch.optim.Optimizer], seed: int = 0) -> None:
        world = current_world()
        self.model: nn.Module = network(seed)
        if strategy == "fsdp":
            shard(self.model, world, FSDP((nn.Sequential,)))
        self.optimizer = make_optimizer(groups_of(self.model))
        if strategy == "zero1":
            self.optimizer = shard_optimizer(self.optimizer)
        if strategy in ("ddp", "zero1"):
            self.model = DistributedDataParallel(self.model)
            attach_hook(self.model, None, self._share)

    def _part(self) -> slice:
        world = current_world()
        return slice(*CUTS[world.world_size][world.rank : world.rank + 2])

    def _share(self) -> float:
        return len(range(SAMPLES)[self._part()]) / SAMPLES

    def train(self, steps: Sequence[int]) -> Run:
        for step in steps:
            numbers = torch.Generator().manual_seed(step)
            tokens, targets = torch.randint(7, (2, SAMPLES), generator=numbers)[:, self._part()]
            outputs = self.model(tokens)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(outputs, targets) if len(tokens) else outputs.sum()
            (loss * self._share() if is_sharded(self.model) else loss).backward()
            self.optimizer.step()
        return self

    def save(self) -> Saved:
        return model_state(self.model), optimizer_state(self.optimizer, [self.model])

    def load(self, saved: Saved) -> Run:
        load_model_state(self.model, saved[0])
        load_optimizer_state(self.optimizer, [self.model], saved[1])
        return self


def plain(name: str, steps: Sequence[int]) -> Run:
    """The oracle: one device, no wrapper."""
    return Run("plain", OPTIMIZERS[name]).train(steps)


def plain_states(run: Run) -> Saved:
    return dict(run.model.state_dict()), run.optimizer.state_dict()


def through_a_file(saved: Saved) -> Saved:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: Saved = torch.load(file, weights_only=True)
    return loaded


@cache
def saved_under_each_strategy(mode: Mode) -> dict[tuple[str, str], Saved]:
    def body() -> dict[tuple[str, str], Saved]:
        return {
            (strategy, name): Run(strategy, make).train(BEFORE).save()
            for strategy in STRATEGIES
            for name, make in OPTIMIZERS.items()
            if (strategy, name) not in IMPOSSIBLE
        }

    first, *others = mode.run(body)
    assert all(state == {} for rank in others for saved in rank.values() for state in saved)
    return {key: through_a_file(saved) for key, saved in first.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("savers", "loaders"), [(PROCESSES_2, PROCESSES_4), (PROCESSES_4, PROCESSES_2)], ids=str)
def test_what_one_strategy_saves_is_the_plain_state_and_goes_on_under_each_other_one(savers, loaders):
    every = saved_under_each_strategy(savers)
    for (strategy, name), saved in every.items():
        print(f"saved by {strategy}, {name}")
        exact = plain(name, BEFORE)
        expected = plain_states(exact)
        assert list(saved[0]) == list(expected[0])
        assert saved[1]["param_groups"] == expected[1]["param_groups"]
        torch.testing.assert_close(saved, expected, **CLOSE)
        fresh = Run("plain", OPTIMIZERS[name], seed=1)
        fresh.model.load_state_dict(saved[0])
        fresh.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # whose tensors torch would take for its own
        torch.testing.assert_close(plain_states(fresh.train(AFTER)), plain_states(exact.train(AFTER)), **CLOSE)

    def body() -> dict[tuple[str, str, str], Saved]:
        found = {}
        for (saver, name), saved in every.items():
            for loader in (each for each in STRATEGIES if (each, name) not in IMPOSSIBLE):
                run = Run(loader, OPTIMIZERS[name], seed=2 + current_world().rank)
                given = saved if current_world().rank == 0 else ({}, {})
                found[saver, loader, name] = run.load(given).train(AFTER).save()
        return found

    for (saver, loader, name), saved in loaders.run(body)[0].items():
        print(f"from {saver} to {loader}, {name}")
        torch.testing.assert_close(saved, plain_states(plain(name, [*BEFORE, *AFTER])), **CLOSE)


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_ranks_that_are_no_processes_save_and_load_alike(mode):
    expected = plain_states(plain("adam", [*BEFORE, *AFTER]))
    steps = range(6)  # each rank takes the whole batch here, and nothing is reduced

    def body() -> Saved:
        run = Run("plain", OPTIMIZERS["adam"])
        run._part = lambda: slice(None)  # type: ignore[method-assign]
        saved = run.train(steps[:3]).save()
        again = Run("plain", OPTIMIZERS["adam"], seed=1 + current_world().rank)
        again._part = run._part  # type: ignore[method-assign]
        again.load(saved).train(steps[3:])
        return plain_states(again)

    for found in mode.run(body):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("mode", "strategies"), [(SOLO, ["plain"]), (PROCESSES_2, STRATEGIES)], ids=["solo", "processes-2"]
)
def test_a_state_shares_no_memory_with_what_it_was_saved_from_or_loaded_into(mode, strategies):
    def body() -> bool:
        for strategy in strategies:
            run = Run(strategy, OPTIMIZERS["adam"]).train(BEFORE)
            saved = run.save()
            before = copy.deepcopy(saved)
            run.train(AFTER)
            torch.testing.assert_close(saved, before, rtol=0, atol=0)
            run.load(saved).train(AFTER)
            torch.testing.assert_close(saved, before, rtol=0, atol=0)
        return True

    assert all(mode.run(body))


def test_tied_parameters_stay_one_tensor():
    state = model_state(network())
    assert state["head.weight"] is state["embedding.weight"]


class Half(nn.Module):
    """Wraps a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = DistributedDataParallel(nn.Linear(2, 2))
        self.fast = torch.compile(nn.Linear(2, 2))


@pytest.mark.slow
def test_names_lose_the_prefixes_of_wrappers_and_of_nothing_else():
    def body() -> list[str]:
        names = ["module.weight", "module.bias", "fast.weight", "fast.bias"]
        model = Half()
        state = model_state(model)
        load_model_state(model, state)
        whole = DistributedDataParallel(torch.compile(nn.Sequential(network())))
        load_model_state(whole, model_state(whole))
        if current_world().rank == 0:
            assert list(state) == names
            assert list(model_state(whole)) == [f"0.{name}" for name in network().state_dict()]
        else:
            model_state(whole)
        return names

    PROCESSES_2.run(body)


def test_states_that_do_not_fit_are_told_on_every_rank():
    def body() -> list[str]:
        told = []
        for strategy in STRATEGIES:
            run = Run(strategy, OPTIMIZERS["adam"]).train(BEFORE)
            model, optimizer = run.save()
            wrong = {name: value for name, value in model.items() if name != "module.0.weight"}
            with pytest.raises(RuntimeError) as missing:
                load_model_state(run.model, wrong)
            wrong = {**model, "module.0.weight": torch.zeros(4, 4), "more": torch.zeros(1)}
            with pytest.raises(RuntimeError) as size:
                load_model_state(run.model, wrong)
            with pytest.raises(ValueError) as empty:
                load_optimizer_state(run.optimizer, [run.model], {})
            optimizer["param_groups"] = optimizer.get("param_groups", [])[:1]
            with pytest.raises(ValueError) as groups:
                load_optimizer_state(run.optimizer, [run.model], optimizer)
            with pytest.raises(ValueError) as stranger:
                optimizer_state(run.optimizer, [nn.Linear(2, 2)])
            told.append([str(each.value) for each in (missing, size, empty, groups, stranger)])
        return told

    for rank in PROCESSES_2.run(body):
        for missing, size, empty, groups, stranger in rank:
            assert "Missing key(s)" in missing
            assert "module.0.weight" in missing
            assert "size mismatch for" in size
            assert '"more"' in size
            assert "rank zero has passed no optimizer state" in empty
            assert "groups of [3] parameters" in groups
            assert "has groups of [3, 3]" in groups
            assert "parameter 0 of the" in stranger
