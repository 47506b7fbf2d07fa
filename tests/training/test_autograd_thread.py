"""On accelerators autograd runs a backward pass, and its hooks, in a thread of its own: so does this, on the CPU.

What is computed has the same bits as in a backward pass in the rank's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twin import State, assert_same_bits, loader_of, model, seeded, sgd, whole

import unisono
from unisono import Accelerator, current_world, functional
from unisono.errors import NoWorldError

HANDS_ON = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
MEETS_IN_BACKWARD = "checkpoint, functional"


class Elsewhere:
    """torch's engine, whose backward passes run in other threads, to which it hands on its caller's context."""

    def __init__(self) -> None:
        self.engine = torch.autograd.Variable._execution_engine
        self.callers: dict[int, bool] = {}  # the threads whose backward passes do; whether that context is handed on
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **options: Any) -> Any:
        if threading.get_ident() not in self.callers:
            return self.engine.run_backward(*args, **options)
        self.passes += 1
        if not self.callers[threading.get_ident()]:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self.engine.run_backward, *args, **options).result()
        context = torch._C._get_obj_in_tls("context")

        def run() -> Any:
            torch._C._stash_obj_in_tls("context", context)
            try:
                return self.engine.run_backward(*args, **options)
            finally:
                torch._C._remove_obj_from_tls("context")

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    @contextmanager
    def entered(self, hands_on: bool = HANDS_ON) -> Iterator[None]:
        self.callers[threading.get_ident()] = hands_on
        try:
            yield
        finally:
            del self.callers[threading.get_ident()]


def elsewhere() -> Elsewhere:
    """The engine of this process from now on."""
    if not isinstance(torch.autograd.Variable._execution_engine, Elsewhere):
        torch.autograd.Variable._execution_engine = Elsewhere()
    return torch.autograd.Variable._execution_engine


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """Of this process: replicas share it."""
    before = elsewhere().engine
    yield
    torch.autograd.Variable._execution_engine = before


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(inputs))))  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """Runs its part a second time in the backward pass, with what it exchanges."""

    def __init__(self, exchanges: bool) -> None:
        super().__init__()
        self.first, self.second, self.exchanges = nn.Linear(5, 7), nn.Linear(7, 2), exchanges

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.part, inputs, use_reentrant=False))  # type: ignore[no-any-return]

    def part(self, inputs: torch.Tensor) -> torch.Tensor:
        values = torch.tanh(self.first(inputs))
        return torch.sin(values - functional.all_reduce(values.mean(0), "mean")) if self.exchanges else values


def prepared(
    backward: Callable[[Accelerator, torch.Tensor], None] = Accelerator.backward,
    make: Callable[[], nn.Module] = lambda: model(),
    samples: int = 23,
    **options: Any,
) -> Callable[[str], State]:
    def lines(strategy: str) -> State:
        accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=2, **options)
        network = seeded(make().double())
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(samples, 3))
        for inputs, targets, _ in loader:
            backward(accelerator, F.mse_loss(network(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        return whole(network)

    return lines


def by_hand(strategy: str) -> State:
    network = model()
    optimizer = sgd(network.parameters())
    for number, (inputs, targets, _) in enumerate(unisono.DeviceLoader(loader_of(24, 3)), 1):
        unisono.backward(F.mse_loss(network(inputs), targets))
        if number % 2 == 0:
            unisono.optimizer_step(optimizer)
            optimizer.zero_grad()
    return whole(network)


def compared(accelerator: Accelerator, loss: torch.Tensor) -> None:
    """The loss of all ranks together, on each of them."""
    accelerator.backward(functional.all_gather(loss).square().sum())


WAYS: dict[str, Callable[[str], State]] = {
    "accelerator": prepared(),
    "plain": prepared(lambda accelerator, loss: loss.backward()),
    "weights": prepared(lambda accelerator, loss: accelerator.backward(loss, weight=2.0 + current_world().rank)),
    "functional": prepared(compared, samples=24),
    "sync_batchnorm": prepared(make=Normalized, sync_batchnorm=True),
    "checkpoint": prepared(make=lambda: Recomputed(False)),
    MEETS_IN_BACKWARD: prepared(make=lambda: Recomputed(True), samples=24),
    "by hand": by_hand,
}


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        pytest.param(SOLO, "ddp", id="one rank"),
        pytest.param(THREADS_2, "ddp", id="threads"),
        *(pytest.param(PROCESSES_2, each, id=each) for each in ("ddp", "zero1", "fsdp")),
    ],
)
def test_gradients_do_not_depend_on_the_thread_that_computes_them(mode: Mode, strategy: str) -> None:
    def body() -> dict[str, list[State]]:
        found, engine = {}, elsewhere()
        for name, lines in WAYS.items():
            if name == MEETS_IN_BACKWARD and mode is THREADS_2 and not HANDS_ON:
                continue
            here, before = lines(strategy), engine.passes
            with engine.entered():
                found[name] = [here, lines(strategy)]
            assert engine.passes > before
        return found

    for rank in mode.run(body):
        for states in rank.values():
            assert_same_bits(states)


def test_a_replicas_world_is_not_guessed_where_torch_does_not_hand_it_on() -> None:
    def body() -> None:
        with elsewhere().entered(hands_on=False):
            with pytest.raises(NoWorldError, match="pass world= what current_world"):
                WAYS[MEETS_IN_BACKWARD]("ddp")

    THREADS_2.run(body)
