"""FSDP2 against the whole batch on one device, in float64 and under uneven shares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, Mode
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from twin import State, compare, seeded, whole

from unisono import Accelerator, rank
from unisono.strategies import FSDP
from unisono.training.strategies.sharded import SMALLEST_UNIT, units_of


class Block(nn.Module):
    """Of sizes that no number of ranks divides, some smaller than it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.gate = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs + self.gate * self.down(torch.tanh(self.up(inputs)))


class Tied(nn.Module):
    """Input and output share a weight, one block runs twice, one is computed again in the backward pass, and some
    parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].up.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](self.embedding(tokens))
        hidden = self.blocks[1](self.blocks[1](hidden))
        return self.head(checkpoint(self.blocks[2], hidden, use_reentrant=False))


def clipped(accelerator: Any, loader: DataLoader[Any], kind: float = 2.0) -> State:
    """With the norms, beside a parameter that is whole on each rank."""
    network, beside = seeded(Tied().double()), nn.Parameter(torch.ones(3, dtype=torch.float64))
    trained = [each for each in network.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW([*trained, beside], lr=0.05)
    network, beside, optimizer, loader = accelerator.prepare(network, beside, optimizer, loader)
    norms = []
    for inputs, _, _ in loader:
        tokens = (inputs * 4 + 6).long().clamp(0, 12)
        outputs = network(tokens) * beside.sum()
        accelerator.backward(F.cross_entropy(outputs.flatten(0, 1), tokens.flip(1).flatten()))
        norm = accelerator.clip_grad_norm_([*network.parameters(), beside], 0.01, kind)
        assert type(norm) is torch.Tensor
        norms.append(norm.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    assert getattr(network, "module", network).head.weight is getattr(network, "module", network).embedding.weight
    return {**whole(network), "norms": torch.stack(norms)}


@pytest.mark.parametrize(
    ("ranks", "units"),
    [(2, (Block,)), *(pytest.param(3, each, marks=pytest.mark.slow) for each in [(), (Block, nn.Linear)])],
    ids=["blocks", "one piece", "nested"],
)
def test_sharded_training_is_that_of_the_whole_batch_for_each_norm(ranks: int, units: Any) -> None:
    lines = {
        f"{kind}": lambda accelerator, loader, kind=kind: clipped(accelerator, loader, kind)
        for kind in (2.0, 1.0, 3.0, math.inf)
    }
    compare(Mode("processes", ranks), lines, 20, 3, strategy=FSDP(units))  # of three ranks, one has none at the end


def test_a_nan_gradient_on_one_rank_makes_the_norm_nan_on_all_ranks() -> None:
    def body() -> list[float]:
        accelerator, found = Accelerator(strategy="fsdp"), []
        for kind in (2.0, math.inf):
            network = accelerator.prepare(nn.Linear(3, 5))
            network(torch.ones(2, 3)).sum().backward()
            if rank() == 1:
                network.weight.grad.to_local()[0] = math.nan
            found.append(float(accelerator.clip_grad_norm_(network.parameters(), 1.0, kind)))
        return found

    assert all(math.isnan(each) for found in PROCESSES_2.run(body) for each in found)


def test_other_types_are_sharded_too() -> None:
    precisions = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.complex128: 1e-12}

    def gradients(accelerator: Any, dtype: torch.dtype, rows: slice) -> list[torch.Tensor]:
        network = seeded(nn.Sequential(nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)))
        network = accelerator.prepare(network) if accelerator else network
        inputs = torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5).to(dtype)[rows]
        loss = network(inputs).abs().square().mean()
        accelerator.backward(loss, weight=len(inputs)) if accelerator else loss.backward()
        return [getattr(each.grad, "full_tensor", each.grad.clone)() for each in network.parameters()]

    def body() -> list[list[torch.Tensor]]:
        accelerator = Accelerator(strategy=FSDP((nn.Linear,)))
        return [gradients(accelerator, dtype, (slice(2), slice(2, 8))[rank()]) for dtype in precisions]

    for found in PROCESSES_2.run(body):
        for each, (dtype, precision) in zip(found, precisions.items(), strict=True):
            expected = gradients(None, dtype, slice(8))
            torch.testing.assert_close(each, expected, rtol=precision, atol=precision / 10)


def of_size(millions: float) -> nn.Module:
    return nn.Linear(int(millions * SMALLEST_UNIT / 1024), 1024, bias=False)


def test_units_are_the_large_list_elements_that_share_nothing():
    with torch.device("meta"):
        inner = nn.Sequential(of_size(2), of_size(0.1))
        shared, alone = nn.Sequential(of_size(1)), nn.Sequential(of_size(1))
        model = nn.ModuleDict(
            {
                "blocks": nn.ModuleList([inner, of_size(0.6), shared, alone]),
                "small": nn.Sequential(of_size(0.6), nn.ReLU()),
                "lonely": of_size(3),
                "attention": nn.MultiheadAttention(1024, 1),
            }
        )
        model["head"] = of_size(1)
        model["head"].weight = shared[0].weight
    assert units_of(model) == [alone[0], inner[0]]
    assert units_of(model, (nn.Sequential,)) == [model["small"], alone, inner]
    assert units_of(model, ()) == []


def test_a_unit_of_two_types_is_refused() -> None:
    two_types = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"'0.weight' is torch.float32 and '1.weight' is torch.float64"):
        PROCESSES_2.run(lambda: Accelerator(strategy="fsdp").prepare(two_types))
