"""The facade over a whole run: seeds, states, what loops keep from call to call."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from modes import devices
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from twin import Case, assert_all_are, data, model, plain_run, sgd

from unisono import Accelerator, DataParallel, spawn
from unisono.tree import leaves


def test_a_seed_reaches_all_generators_even_of_a_lone_worker_or_replica():
    def body(*_: object) -> tuple[float, float]:
        random.seed(99)
        Accelerator(seed=3)
        return torch.rand(1).item(), random.random()

    with torch.random.fork_rng():
        plain = body()
    replicas = DataParallel(nn.Linear(1, 1), ["cpu:0"])
    before = torch.default_generator.get_state()
    (replica,) = replicas.run_on_replicas(body)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert replica == plain
    with torch.random.fork_rng():
        assert spawn(body, nprocs=1) == [plain]
    assert spawn(body, nprocs=2) == [plain, plain]


def test_the_loss_scale_goes_through_a_checkpoint():
    def steps(accelerator: Any, made: nn.Module, optimizer: Any, count: int, first: int) -> list[bool]:
        taken = []
        for number in range(first, first + count):
            before = [each.detach().clone() for each in made.parameters()]
            optimizer.zero_grad()
            accelerator.backward(made(torch.full((2, 3), 1e4 if number < 3 else 0.1)).square().sum())
            optimizer.step()
            taken.append(not all(map(torch.equal, before, made.parameters())))
        return taken

    def prepared() -> tuple[Any, ...]:
        torch.manual_seed(0)
        accelerator, made = Accelerator(mixed_precision="fp16"), nn.Linear(3, 2)
        return accelerator, *accelerator.prepare(made, torch.optim.Adam(made.parameters(), lr=0.01))

    whole = prepared()
    expected = steps(*whole, 10, 0)
    assert True in expected
    assert False in expected
    first = prepared()
    found = steps(*first, 4, 0)
    saved = first[1].state_dict(), first[2].state_dict(), first[0].scaler.state_dict()
    second = prepared()
    for each, state in zip((second[1], second[2], second[0].scaler), saved, strict=True):
        each.load_state_dict(state)
    assert found + steps(*second, 6, 4) == expected
    assert all(map(torch.equal, leaves(second[1].state_dict()), leaves(whole[1].state_dict())))


@pytest.mark.any_family
def test_an_accelerator_in_the_context_persists_across_calls_and_failures():
    samples = 23
    loader = DataLoader(data(samples), batch_size=2)

    def loop(network: nn.Module, batches: Any, device: Any, context: Any, fails: bool = False) -> None:
        if not hasattr(context, "model"):
            context.accelerator = Accelerator(gradient_accumulation_steps=2)
            context.model, context.optimizer = context.accelerator.prepare(network, sgd(network.parameters()))
        for number, (inputs, targets, _) in enumerate(batches):
            if fails and number == 1:
                raise KeyError("in the middle of a step")
            context.optimizer.zero_grad()
            context.accelerator.backward(F.mse_loss(context.model(inputs), targets))
            context.optimizer.step()

    replicas = DataParallel(model(), devices(2))
    replicas(loop, loader)
    with contextlib.suppress(KeyError):
        replicas(lambda *arguments: loop(*arguments, fails=True), loader)
    replicas(loop, loader)
    assert replicas.are_alike()
    assert_all_are([replicas.state_dict()], plain_run(Case(samples, 2, 2), 2, sgd))


PLAIN = """
import sys
import torch
from torch.utils.data import DataLoader
from unisono import Accelerator, spawn

def train(index=0):
    accelerator = Accelerator()
    imported = {"torch._dynamo", "triton"} & set(sys.modules)
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(torch.randn(8, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    iterator = iter(loader)
    accelerator.backward(model(next(iterator)).mean())
    optimizer.step()
    return imported, iterator

if __name__ == "__main__":
    imported, iterator = train()
    print(imported)
    spawn(lambda index: bool(train()), nprocs=2)
"""


@pytest.mark.slow
def test_a_plain_script_prints_nothing_extra_and_imports_no_compiler(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    command = [sys.executable, "plain.py"]  # a new interpreter: those of other scripts import much beforehand
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("set()\n", "", 0)
