"""Models that were built on the device "meta": they train as those that were built where they are."""

from __future__ import annotations

import pytest
import torch
from modes import FAMILY, PROCESSES_2, SOLO, THREADS_2, Mode
from torch import nn
from twin import Plain, State, assert_all_are, loader_of, mean_loss, sgd, train

from unisono import Accelerator, rank
from unisono.strategies import FSDP
from unisono.training.meta_modules import fill

pytestmark = pytest.mark.skipif(FAMILY != "cpu", reason="what is filled is the same on each family")

META = torch.device("meta")


def network() -> nn.Sequential:
    """With running statistics, and one weight that two layers have."""
    made = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    made[2].weight = made[0].weight
    return made


def test_what_is_filled_is_what_was_built_there():
    torch.manual_seed(0)
    built = nn.TransformerEncoderLayer(8, 2, 16)
    with META:
        made = nn.TransformerEncoderLayer(8, 2, 16)
    torch.manual_seed(0)
    assert len(fill(made, torch.device("cpu"))) == len(list(made.parameters()))
    shapes = {name: (each.shape, each.dtype) for name, each in built.state_dict().items()}
    assert {name: (each.shape, each.dtype) for name, each in made.state_dict().items()} == shapes
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with META:
        empty = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    torch.manual_seed(0)
    fill(empty, torch.device("cpu"))
    torch.testing.assert_close(empty.state_dict(), plain.state_dict(), rtol=0, atol=0)


def trained(strategy: object) -> tuple[State, State]:
    """The first weights and the last ones; ranks draw other numbers."""
    with META:
        made = network()
    optimizer = sgd(made.parameters())
    torch.manual_seed(rank())
    accelerator = Accelerator(strategy=strategy, sync_batchnorm=True)
    model, optimizer, loader = accelerator.prepare(made, optimizer, loader_of(24, 3))
    first = accelerator.state_dict(model)
    for batch in loader:
        accelerator.backward(mean_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return first, accelerator.state_dict(model)


def trained_by_one(first: State, batch: int) -> State:
    model = network()
    model.load_state_dict(first)
    return train(Plain(), loader_of(24, batch), network=model)


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        pytest.param(SOLO, "fsdp", id="solo"),
        pytest.param(THREADS_2, "ddp", id="threads"),
        pytest.param(PROCESSES_2, "ddp", id="processes"),
        pytest.param(PROCESSES_2, FSDP(units=(nn.BatchNorm1d,)), id="in units"),
    ],
)
def test_a_model_from_meta_is_the_same_on_all_ranks_and_trains_as_one(mode: Mode, strategy: object) -> None:
    (first, last), *_ = mode.run(lambda: trained(strategy))
    assert torch.equal(first["0.weight"], first["2.weight"])
    assert first["0.weight"].abs().sum() > 0
    assert_all_are([last], trained_by_one(first, 3 * mode.ranks))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.empty(3))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_part_that_does_not_say_what_is_in_it_is_refused_by_name(strategy: str) -> None:
    with META:
        made = nn.Sequential(nn.Linear(3, 3), Table())
    with pytest.raises(ValueError, match=r"its part '1', a Table, has entries and no reset_parameters\(\)"):
        Accelerator(strategy=strategy).prepare(made)
    assert made[0].weight.is_meta
