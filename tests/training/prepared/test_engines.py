"""Engines: what a forward pass in the wrong place, a parameter without a gradient, or a misfit does to a step."""

from __future__ import annotations

import pytest
import torch
from modes import PROCESSES_2, THREADS_2
from torch import nn
from twin import CLOSE, assert_same_bits, model, seeded, sgd

from unisono import Accelerator, current_world
from unisono.strategies import FSDP, ZeRO1


class Fork(nn.Module):
    """Its forward pass goes the ways that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor, *ways: str) -> torch.Tensor:
        return sum((self.get_submodule(way)(inputs) for way in ways), inputs.new_zeros(()))


def fork() -> nn.Module:
    return seeded(Fork().double())


def test_a_step_without_gradients_is_an_error_that_says_so():
    def body(strategy):
        accelerator, network = Accelerator(strategy=strategy), model()
        network, optimizer = accelerator.prepare(network, sgd(network.parameters()))
        for act in (optimizer.step, lambda: accelerator.clip_grad_norm_(network, 1.0)):
            with pytest.raises(RuntimeError, match="none of the optimizer's 4 parameters has a gradient"):
                act()

    PROCESSES_2.run(lambda: [body("ddp"), body("fsdp")])


def test_parameters_unused_on_one_rank_are_named_and_no_rank_keeps_waiting():
    def body():
        network = Accelerator().prepare(fork())
        ways = ("left", "right") if current_world().rank else ("left",)
        network(torch.ones(2, 5).double(), *ways).sum().backward()

    expected = r"gave no gradient to 'right.weight', 'right.bias' of the Fork.*find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=expected):
        PROCESSES_2.run(body)


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_a_model_is_prepared_again_when_what_prepared_it_is_gone(mode):
    def train(network):
        accelerator = Accelerator(mixed_precision="bf16")
        prepared, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="is already prepared"):
            Accelerator().prepare(network)
        prepared(torch.full((2, 5), 1.0 + accelerator.world.rank)).sum().backward()
        optimizer.step()

    def body():
        network = model().float()
        train(network)
        train(network)
        return network.state_dict()

    assert_same_bits(mode.run(body))


class Normalized(torch.optim.Optimizer):
    """Steps by the gradient over its norm, of all parameters together, or of each."""

    def __init__(self, parameters, lr=0.1, together=True):
        super().__init__(parameters, {"lr": lr, "together": together})

    @torch.no_grad()
    def step(self, closure=None):
        trained = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in trained]).norm()
        for each in trained:
            each.sub_(each.grad / norm if self.defaults["together"] else each.grad.sign(), alpha=self.defaults["lr"])


class Inherited(torch.optim.AdamW):
    """Its step is torch's."""


def test_an_optimizer_must_be_known_or_declared_to_be_elementwise():
    def body(strategy):
        network = model()
        accelerator = Accelerator(strategy=strategy())
        with pytest.raises(TypeError, match=r"Normalized is not one of .*\(elementwise_optimizer=True\)"):
            accelerator.prepare(network, Normalized(network.parameters()))
        accelerator.prepare(network, Inherited(network.parameters()))
        told = Accelerator(strategy=strategy(elementwise_optimizer=True))
        network = model()
        network, optimizer = told.prepare(network, Normalized(network.parameters(), together=False))
        network(torch.ones(2, 5).double()).sum().backward()
        optimizer.step()
        return told.state_dict(network)

    first, _ = PROCESSES_2.run(lambda: [body(ZeRO1), body(FSDP)])
    plain = model()
    optimizer = Normalized(plain.parameters(), together=False)
    plain(torch.ones(2, 5).double()).sum().backward()
    optimizer.step()
    torch.testing.assert_close(first, [dict(plain.state_dict())] * 2, **CLOSE)
