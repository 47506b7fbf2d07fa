"""States that were saved under one strategy continue under any other, as if nothing had been between, in float64."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from twin import CLOSE, Plain, seeded

from unisono import Accelerator, all_gather_object, current_world
from unisono.errors import CheckpointError
from unisono.strategies import FSDP

STRATEGIES = {"ddp": "ddp", "zero1": "zero1", "fsdp": FSDP(units=(nn.Sequential,))}
IMPOSSIBLE = [("fsdp", "adafactor")]  # for torch's DTensors
BEFORE, ALL = 3, 6  # steps

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


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """In another order than the model's."""
    names = dict(model.named_parameters())
    decayed = [each for name, each in reversed(names.items()) if name.endswith("weight") and each.requires_grad]
    others = [each for name, each in names.items() if name.endswith("bias")]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": others, "lr": 0.02}]


class Run:
    """A model and an optimizer; each step is on the same 11 samples, of which ranks have different numbers."""

    def __init__(self, accelerator: Any, name: str, seed: int = 0) -> None:
        self.accelerator = accelerator
        network: Any = seeded(Network().double(), seed)
        tokens, targets = torch.randint(7, (2, 11), generator=torch.Generator().manual_seed(1))
        size = -(-11 // getattr(accelerator, "num_processes", 1))
        self.model, self.optimizer, self.loader = accelerator.prepare(
            network, OPTIMIZERS[name](groups_of(network)), DataLoader(TensorDataset(tokens, targets), size)
        )

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            for tokens, targets in self.loader:
                self.accelerator.backward(F.cross_entropy(self.model(tokens), targets))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def save(self) -> Saved:
        if isinstance(self.accelerator, Plain):
            return dict(self.model.state_dict()), self.optimizer.state_dict()
        return self.accelerator.state_dict(self.model), self.accelerator.state_dict(self.optimizer)

    def load(self, saved: Saved) -> Run:
        for each, state in zip((self.model, self.optimizer), saved, strict=True):
            if isinstance(self.accelerator, Plain):
                each.load_state_dict(copy.deepcopy(state))  # whose tensors torch would take for its own
            else:
                self.accelerator.load_state_dict(each, state)
        return self


def run(strategy: str, name: str, seed: int = 0) -> Run:
    return Run(Accelerator(strategy=STRATEGIES[strategy]), name, seed)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_strategy_saves_the_plain_state_and_it_continues_under_any_other() -> None:
    def saves() -> dict[tuple[str, str], Saved]:
        pairs = [(strategy, name) for strategy in STRATEGIES for name in OPTIMIZERS]
        return {pair: run(*pair).train(BEFORE).save() for pair in pairs if pair not in IMPOSSIBLE}

    first, *others = PROCESSES_2.run(saves)
    for rank in others:
        for (strategy, name), saved in rank.items():
            own = {"ddp": 2, "zero1": 1, "fsdp": 0}[strategy]  # of the two states, those that each rank has
            torch.testing.assert_close(saved[:own], first[strategy, name][:own], rtol=0, atol=0)
            assert all(state == {} for state in saved[own:])
    torch.save(first, file := io.BytesIO())
    file.seek(0)
    every: dict[tuple[str, str], Saved] = torch.load(file, weights_only=True)
    for (strategy, name), saved in every.items():
        print(f"saved by {strategy}, {name}")
        exact = Run(Plain(), name).train(BEFORE)
        expected = exact.save()
        assert list(saved[0]) == list(expected[0])
        assert saved[1]["param_groups"] == expected[1]["param_groups"]
        torch.testing.assert_close(saved, expected, **CLOSE)
        fresh = Run(Plain(), name, seed=1).load(saved).train(ALL - BEFORE)
        torch.testing.assert_close(fresh.save(), exact.train(ALL - BEFORE).save(), **CLOSE)

    def body() -> dict[tuple[str, str, str], Saved]:
        rank, found = current_world().rank, {}
        for (saver, name), saved in every.items():
            for loader in (each for each in STRATEGIES if (each, name) not in IMPOSSIBLE):
                given = saved if rank == 0 else ({}, {})
                found[saver, loader, name] = run(loader, name, 2 + rank).load(given).train(ALL - BEFORE).save()
        return found

    expected = {name: Run(Plain(), name).train(ALL).save() for name in OPTIMIZERS}
    for (saver, loader, name), saved in Mode("processes", 3).run(body)[0].items():
        print(f"from {saver} to {loader}, {name}")
        torch.testing.assert_close(saved, expected[name], **CLOSE)


@pytest.mark.parametrize(
    ("mode", "strategies"), [(SOLO, ["ddp"]), (THREADS_2, ["ddp"]), (PROCESSES_2, list(STRATEGIES))], ids=str
)
def test_a_state_shares_no_memory_with_its_source_or_destination(mode: Mode, strategies: list[str]) -> None:
    def body() -> bool:
        for strategy in strategies:
            trained = run(strategy, "adam").train(BEFORE)
            saved = trained.save()
            here = [each for each in saved if each]
            before = copy.deepcopy(here)
            trained.train(1)
            torch.testing.assert_close(here, before, rtol=0, atol=0)
            trained.load(saved).train(1)
            torch.testing.assert_close(here, before, rtol=0, atol=0)
        return True

    assert all(mode.run(body))


@pytest.mark.parametrize(
    ("mode", "strategies"), [(THREADS_2, ["ddp"]), (PROCESSES_2, list(STRATEGIES))], ids=["threads", "processes"]
)
def test_a_file_that_every_rank_saves_is_whole_or_an_error(mode: Mode, strategies: list[str], tmp_path: Path) -> None:
    def body() -> list[list[str]]:
        rank, refused = current_world().rank, []
        for strategy in strategies:
            trained = run(strategy, "adam").train(1)
            refused.append([])
            for kind, state in zip(("model", "optimizer"), trained.save(), strict=True):
                path = tmp_path / f"{strategy}-{kind}-{rank}.pt"
                try:
                    torch.save({"epoch": 1, "state": state}, path)
                except CheckpointError as error:
                    refused[-1].append(str(error))
                    path.unlink()
        return refused

    _, second = mode.run(body)
    assert [len(each) for each in second] == [{"ddp": 0, "zero1": 1, "fsdp": 2}[each] for each in strategies]
    for each in (text for texts in second for text in texts):
        assert "this rank does not have the state of the" in each
        assert "if accelerator.is_main_process: torch.save(...)" in each
    for own in tmp_path.glob("*-1.pt"):
        first = torch.load(own.with_name(own.name.replace("-1", "-0")))
        torch.testing.assert_close(torch.load(own), first, rtol=0, atol=0)


def test_a_states_placeholder_is_empty_travels_and_cannot_be_read() -> None:
    def body() -> State:
        trained = run("fsdp", "sgd").train(1)
        state = trained.accelerator.state_dict(trained.model)
        trained.accelerator.load_state_dict(trained.model, copy.deepcopy(state.copy()))
        return all_gather_object(state)[1]

    for state in PROCESSES_2.run(body):
        assert not state
        assert len(state) == 0
        assert repr(state) == "<the state of the model, on rank zero>"
        for read in (
            pickle.dumps,
            list,
            dict,
            lambda state: state["head.weight"],
            lambda state: {**state},
            lambda state: {name: each.half() for name, each in state.items()},
            lambda state: Network().load_state_dict(state),
            lambda state: "head.weight" in state,
        ):
            with pytest.raises(CheckpointError, match="rank zero gets the whole"):
                read(state)


def test_tied_parameters_stay_one_tensor() -> None:
    state, _ = run("ddp", "sgd").save()
    assert state["head.weight"] is state["embedding.weight"]


def test_states_that_do_not_fit_are_told_on_every_rank() -> None:
    def body() -> list[list[str]]:
        told = []
        for strategy in STRATEGIES:
            trained = run(strategy, "adam").train(BEFORE)
            model, optimizer = (state or {} for state in trained.save())
            lacking = {name: value for name, value in model.items() if name != "module.0.weight"}
            other = {**model, "module.0.weight": torch.zeros(4, 4), "more": torch.zeros(1)}
            short = {**optimizer, "param_groups": optimizer.get("param_groups", [])[:1]}
            own = trained.accelerator.load_state_dict
            told.append([])
            for each, state in (
                (trained.model, lacking),
                (trained.model, other),
                (trained.optimizer, {}),
                (trained.optimizer, short),
            ):
                with pytest.raises((RuntimeError, ValueError)) as error:
                    own(each, state)
                told[-1].append(str(error.value))
        return told

    for rank in PROCESSES_2.run(body):
        for missing, size, empty, groups in rank:
            assert "Missing key(s)" in missing
            assert "module.0.weight" in missing
            assert "size mismatch for" in size
            assert '"more"' in size
            assert "rank zero has passed no optimizer state" in empty
            assert "groups of [3] parameters" in groups
            assert "has groups of [3, 3]" in groups
