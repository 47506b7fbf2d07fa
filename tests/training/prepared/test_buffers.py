"""Buffers that a forward pass updates from its own data: rank zero's replace the others', and that is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, hearing
from torch import nn
from twin import loader_of, sgd

from unisono import Accelerator, all_reduce


class Centred(nn.Module):
    """Subtracts the running mean of its inputs."""

    def __init__(self, is_reduced: bool) -> None:
        super().__init__()
        self.is_reduced = is_reduced
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        now = inputs.detach().mean(0)
        self.mean.lerp_(all_reduce(now, "mean") if self.is_reduced else now, 0.5)
        return inputs - self.mean


def train(first: nn.Module, strategy: Any = "ddp", samples: int = 12) -> tuple[list[str], list[torch.Tensor]]:
    """What is said in the steps (three), and the buffers after them."""
    with hearing("unisono.training.agreement") as said:
        accelerator = Accelerator(strategy=strategy)
        network = nn.Sequential(first, nn.Linear(5, 2)).double()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(samples, 2))
        for inputs, _, _ in loader:
            accelerator.backward(network(inputs).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return said, [each.clone() for each in network.buffers()]


@pytest.mark.parametrize(
    ("mode", "strategy"), [(THREADS_2, "ddp"), *((PROCESSES_2, each) for each in ("ddp", "zero1", "fsdp"))], ids=str
)
def test_a_buffer_that_differs_between_the_ranks_is_said_once(mode: Mode, strategy: str) -> None:
    (said, (own,)), (_, (others,)) = mode.run(lambda: train(Centred(False), strategy))
    about = {each for each in said if "the buffer '0.mean'" in each}  # threads share a logger
    assert len(about) == len(said) == 1
    assert "rank zero's replaces the others'; reduce what updates it (unisono.all_reduce)" in said[0]
    torch.testing.assert_close(own, others, rtol=0, atol=0)


class CentredLater(Centred):
    """Agrees between the ranks in its first steps."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.is_reduced = self.calls < 5
        return super().forward(inputs)


def test_a_buffer_that_differs_later_is_said_too() -> None:
    (said, _), _ = THREADS_2.run(lambda: train(CentredLater(True), samples=40))
    assert len(said) == 1


@pytest.mark.parametrize("mode", [THREADS_2], ids=str)
@pytest.mark.parametrize("make", [lambda: Centred(True), lambda: nn.BatchNorm1d(5)], ids=["reduced", "batch norm"])
def test_nothing_is_said_where_the_ranks_agree_nor_of_batch_norm(mode: Mode, make: Any) -> None:
    for said, _ in mode.run(lambda: train(make())):
        assert not said


OF_EIGHT = {"virtual_ranks": 8, "split_batches": True, "seed": 0}
OF_TWO = {"virtual_ranks": 2, "seed": 0}


@pytest.mark.parametrize(
    ("mode", "samples", "size", "options", "advice"),
    [
        (THREADS_2, 6, 2, {}, "sync_batchnorm=True"),
        (THREADS_2, 5, 2, {"sync_batchnorm": True}, "sync_batchnorm=True"),
        (SOLO, 3, 2, {}, "sync_batchnorm=True"),
        (SOLO, 20, 1, {}, "the model gets 1 of 1 samples; use a batch_size of at least 2"),
        (
            SOLO,
            20,
            5,
            OF_EIGHT,
            "the 8 virtual ranks gets 0 or 1 of 5 samples; use a batch_size of at least 16",
        ),
        (SOLO, 20, 1, OF_TWO, "each of the 2 virtual ranks gets 1 of 2 samples; use a batch_size of at least 2"),
        (
            SOLO,
            20,
            9,
            {**OF_TWO, "split_batches": True},
            "variance over one sample; pass DataLoader(drop_last=True)",
        ),
    ],
    ids=str,
)
def test_where_batch_norm_gets_one_sample_the_error_says_what_helps(
    mode: Mode, samples: int, size: int, options: Any, advice: str
) -> None:
    def body() -> None:
        accelerator = Accelerator(**options)
        network = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
        network, optimizer, loader = accelerator.prepare(network, sgd(network.parameters()), loader_of(samples, size))
        for inputs, _, _ in loader:
            optimizer.zero_grad()
            accelerator.backward(network(inputs).pow(2).mean())
            optimizer.step()

    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as error:
        mode.run(body)
    notes = " ".join(error.value.__notes__)
    assert advice in notes
    assert ("sync_batchnorm" in notes) is ("virtual_ranks" not in options)
