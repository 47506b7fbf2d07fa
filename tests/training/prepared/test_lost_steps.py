"""A rank that does something else than the others is named, with what it did, before the next step is over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, THREADS_2, THREADS_3, Mode, by_value
from torch import nn
from twin import Case, loader_of, mean_loss, model, sgd

from unisono import Accelerator, all_gather, barrier, rank, spawn
from unisono.errors import BrokenWorldError, CollectiveMismatchError
from unisono.strategies import FSDP

pytestmark = pytest.mark.every_mode

CASE = Case(samples=48, batch=2)
AT = 4  # the batch at which rank 1 does it
GOES_ON, LEAVES_OUT, LEAVES_LOOP = "continues", "leaves out", "leaves loop"


class Training:
    def __init__(self, strategy: str, accumulate: int) -> None:
        self.accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=accumulate)  # type: ignore[arg-type]
        network = model()
        self.network, self.optimizer, self.loader = self.accelerator.prepare(
            network, sgd(network.parameters()), loader_of(CASE.samples, CASE.batch)
        )

    def learn(self, batch: Any) -> None:
        mean_loss(self.network, batch).backward()


def load_another_rate(training: Training) -> None:
    parameters = [nn.Parameter(each) for each in training.network.state_dict().values()]
    training.optimizer.load_state_dict(torch.optim.SGD(parameters, lr=0.25).state_dict())


# What rank 1 does with the batch, and how it goes on.
ACTIONS: dict[str, tuple[Callable[[Training, Any], Any], str]] = {
    "leaves out a batch": (lambda training, batch: None, LEAVES_OUT),
    "leaves out a backward pass": (lambda training, batch: mean_loss(training.network, batch), LEAVES_OUT),
    "leaves out a step": (lambda training, batch: (training.learn(batch), training.optimizer.zero_grad()), LEAVES_OUT),
    "has two backward passes": (lambda training, batch: training.learn(batch), GOES_ON),
    "begins the next loop": (lambda training, batch: None, LEAVES_LOOP),
    "calls a barrier": (lambda training, batch: barrier(), GOES_ON),
    "gathers something": (lambda training, batch: all_gather(torch.ones(3)), GOES_ON),
    "sets a learning rate": (lambda training, batch: training.optimizer.param_groups[0].update(lr=0.25), GOES_ON),
    "loads an optimizer of another rate": (lambda training, batch: load_another_rate(training), GOES_ON),
}


def train(action: str, strategy: str, accumulate: int) -> None:
    training = Training(strategy, accumulate)
    for epoch in range(2):
        for number, batch in enumerate(training.loader, 1):
            what = GOES_ON
            if (rank(), epoch, number) == (1, 0, AT):
                act, what = ACTIONS[action]
                act(training, batch)
            if what == LEAVES_OUT:
                continue
            if what == LEAVES_LOOP:
                break
            training.learn(batch)
            training.optimizer.step()
            training.optimizer.zero_grad()


PLACES = [(THREADS_2, "ddp"), (THREADS_3, "ddp"), *((PROCESSES_2, each) for each in ("ddp", "zero1", "fsdp"))]


def everywhere(cases: Iterable[Any]) -> Any:
    """Each case on threads, and in processes under one strategy; so that each strategy has some."""
    cases = [*cases]
    pairs = [
        (*PLACES[place], case)
        for number, case in enumerate(cases)
        for place in (number % 2, 2 + number % 3)
    ]  # fmt: skip
    return pytest.mark.parametrize(("mode", "strategy", "case"), pairs, ids=lambda each: str(each))


def lost(mode: Mode, action: str, strategy: str, accumulate: int = 1) -> str:
    """What the caller is told."""
    with pytest.raises((CollectiveMismatchError, BrokenWorldError)) as caught:
        mode.run(lambda: train(action, strategy, accumulate))
    return str(caught.value)


@everywhere([*((each, 1) for each in islice(ACTIONS, 5)), ("leaves out a batch", 2)])
def test_a_rank_that_takes_other_steps_is_named(mode: Mode, strategy: str, case: Any) -> None:
    action, accumulate = case
    told = lost(mode, action, strategy, accumulate)
    assert "rank 1" in told
    assert "every rank must take the same steps on the same rounds: skip a batch" in told
    step = f"of step {AT} (batch" if accumulate == 1 else "of step 2 (batches 3, 4 of its loop"
    assert step in told or "forward pass of the Sequential" in told


@everywhere([("calls a barrier", "barrier()"), ("gathers something", "all_gather(float32[3])")])
def test_a_rank_that_calls_something_else_is_named_with_the_call(mode: Mode, strategy: str, case: Any) -> None:
    action, call = case
    told = lost(mode, action, strategy)
    assert f"rank 1 called {call}" in told
    assert "came to" in told or "for the gradients of step 4 (batch 4 of its loop" in told


@pytest.mark.parametrize(("mode", "strategy"), [PLACES[0], *PLACES[2:]], ids=str)
def test_who_catches_what_the_others_departure_raises_reads_our_words(mode: Mode, strategy: str) -> None:
    def body() -> str:
        training = Training(strategy, 1)
        for number, batch in enumerate(training.loader, 1):
            if (rank(), number) == (1, AT):
                return ""
            try:
                training.accelerator.backward(mean_loss(training.network, batch))
                training.optimizer.step()
            except BrokenWorldError as error:
                return str(error)
            training.optimizer.zero_grad()
        return "nothing"

    told, _ = mode.run(body)
    assert "rank 1 has left this world: let all ranks" in told
    assert "gloo" not in told


CALLS: dict[str, Callable[[Training, Path], Any]] = {
    "gather_for_metrics of ": lambda training, path: training.accelerator.gather_for_metrics(torch.ones(2)),
    "save_state": lambda training, path: training.accelerator.save_state(path),
    "save_model": lambda training, path: training.accelerator.save_model(training.network, path),
    "load_state": lambda training, path: training.accelerator.load_state(path),
}


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_what_a_rank_calls_alone_is_named_as_it_was_called(mode: Mode, tmp_path: Path) -> None:
    for name, hooks in [*((each, False) for each in CALLS), ("save_state", True)]:
        if mode is PROCESSES_2 and (hooks, name) not in ((True, "save_state"), (False, "gather_for_metrics of ")):
            continue  # which is so in either mode

        def body(name: str = name, hooks: bool = hooks) -> None:
            training = Training("ddp", 1)
            if hooks:
                training.accelerator.register_save_state_pre_hook(lambda *_: None)
            for batch in training.loader:
                training.learn(batch)
                training.optimizer.step()
                if rank() == 0:
                    CALLS[name](training, tmp_path / "one")

        with pytest.raises(CollectiveMismatchError) as caught:
            mode.run(body)
        assert re.search(f"rank 0 (came to|called .* for) {name}.* while rank 1 .* the gradients of", str(caught.value))


class Speaker(nn.Module):
    """A model of two units, with a method that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))

    def speak(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


ALONE: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "the model": (lambda model, x: model(x), "a forward pass of the Speaker"),
    "its method": (lambda model, x: model.speak(x), "a forward pass of the Speaker"),
    "a marked method": (
        lambda model, x: (model.mark_forward_method("speak"), model.speak(x)),
        "speak() of the Speaker",
    ),
    "the module": (lambda model, x: model.module(x), "a forward pass of the Speaker"),
    "a unit": (lambda model, x: model.first(x), "a forward pass of the Linear"),
}


@pytest.mark.parametrize(
    ("call", "process_group"),
    [(each, "gloo") for each in ("its method", "a unit")]
    + [pytest.param(each, None, marks=pytest.mark.slow) for each in ("the model", "a marked method", "the module")],
)
def test_a_rank_that_evaluates_alone_under_fsdp_is_named_at_once(
    call: str, process_group: str | None, tmp_path: Path
) -> None:
    evaluate, what = ALONE[call]

    def body(index: int) -> None:
        accelerator = Accelerator(strategy=FSDP(units=(nn.Linear,)))
        network = Speaker()
        model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1))
        x = torch.ones(2, 3)
        for epoch in range(3):
            (tmp_path / f"{index}-{epoch}").touch()
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                with torch.no_grad():
                    evaluate(model, x)

    with by_value(body), pytest.raises(CollectiveMismatchError) as caught:
        spawn(body, nprocs=2, cores=1, process_group=process_group)  # type: ignore[arg-type]
    why = r"without gradients \(strategy='fsdp' gathers its parameters from all ranks\)"
    # With its place, if rank 0 has arrived at what it waits for.
    assert re.search(f"rank 0 came to {re.escape(what)} {why}( by .*)? while rank 1", str(caught.value))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0-0", "1-0", "1-1"]


def test_what_ranks_do_in_step_is_no_mismatch_however_they_do_it() -> None:
    def body() -> int:
        training = Training("ddp", 1)
        for number, batch in enumerate(training.loader, 1):
            if number == AT:  # on all ranks
                continue
            if rank() == 0:
                with torch.no_grad():
                    training.network.module(batch[0])  # pictures of rank zero, past the engine
            training.learn(batch)
            training.optimizer.step()
            training.optimizer.zero_grad()
        return number

    assert PROCESSES_2.run(body) == [12, 12]


@pytest.mark.parametrize(
    ("mode", "strategy", "action"),
    [
        (THREADS_2, "ddp", "sets a learning rate"),
        *((*PLACES[2], each) for each in ("sets a learning rate", "loads an optimizer of another rate")),
        (PROCESSES_2, "zero1", "sets a learning rate"),
        (PROCESSES_2, "fsdp", "sets a learning rate"),
    ],
    ids=str,
)
def test_a_rank_with_another_learning_rate_is_named_with_it(mode: Mode, strategy: str, action: str) -> None:
    told = lost(mode, action, strategy, accumulate=2 if mode is PROCESSES_2 else 1)
    assert " at lr 0.1" in told
    assert " at lr 0.25" in told
    assert "and step schedulers alike" in told
