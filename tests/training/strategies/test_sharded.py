"""FSDP2 against the whole batch on one device, in float64 and under uneven shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, Mode, each_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twin import assert_same_bits

from unisono.strategies import FSDP
from unisono.training.clipping import clip_grad_norm
from unisono.training.strategies.sharded import SMALLEST_UNIT, check_shardable, shard, units_of
from unisono.world import current_world

PROCESSES_4 = Mode("processes", 4)
SAMPLES = 11
CUTS = {2: [0, 1, 11], 4: [0, 1, 4, 4, 11]}  # one of four ranks has none
CLOSE = {"rtol": 1e-12, "atol": 1e-14}

Named = dict[str, torch.Tensor]


mode = each_of([PROCESSES_2, PROCESSES_4])


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


def seeded(model: nn.Module) -> nn.Module:
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype) / 3)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randint(13, (SAMPLES, 4), generator=numbers), torch.randint(13, (SAMPLES, 4), generator=numbers)


def own_part() -> tuple[torch.Tensor, torch.Tensor]:
    world = current_world()
    start, stop = CUTS[world.world_size][world.rank : world.rank + 2]
    tokens, targets = batch()
    return tokens[start:stop], targets[start:stop]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens, times their share of the batch."""
    outputs = model(tokens)
    mean = F.cross_entropy(outputs.flatten(0, 1), targets.flatten()) if len(tokens) else outputs.sum()
    return mean * (len(tokens) / SAMPLES)


def sharded(units: Sequence[type[nn.Module]] | None = (Block,)) -> Any:
    return shard(seeded(Tied().double()), current_world(), FSDP(units))


def whole(tensors: Named) -> Named:
    """Collective for sharded tensors."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach().clone()
        for name, each in tensors.items()
    }


def parameters_of(model: nn.Module) -> Named:
    return whole({name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)})


def gradients_of(model: nn.Module) -> Named:
    return whole({name: each.grad for name, each in model.named_parameters() if each.grad is not None})


def train(model: nn.Module, part: Callable[[], tuple[torch.Tensor, torch.Tensor]], clip: Callable[..., Any]) -> Named:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, *part()).backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
    return parameters_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("units", [(Block,), (), (Block, nn.Linear)], ids=["blocks", "one-piece", "nested"])
def test_sharded_training_is_that_of_the_whole_batch_however_it_was_dealt(mode, units):
    def body() -> tuple[Named, bool, Named]:
        model = sharded(units)
        found = train(model, own_part, clip_grad_norm)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return found, model.head.weight is model.embedding.weight, dict(model.named_buffers())

    plain = seeded(Tied().double())
    expected = train(plain, batch, torch.nn.utils.clip_grad_norm_)
    ranks = mode.run(body)
    assert_same_bits([found for found, *_ in ranks])
    for found, is_tied, buffers in ranks:
        torch.testing.assert_close(found, expected, **CLOSE)
        assert is_tied
        torch.testing.assert_close(buffers, dict(plain.named_buffers()), **CLOSE)


def test_clipping_takes_the_norm_over_all_ranks_for_each_kind_of_norm(mode):
    kinds = (2.0, 1.0, 3.0, math.inf)

    def body() -> list[tuple[torch.Tensor, Named]]:
        model = sharded()
        plain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        found = []
        for kind in kinds:
            model.zero_grad()
            loss_of(model, *own_part()).backward()
            plain.grad = torch.full((3,), 0.1, dtype=torch.float64)  # the same on each rank, as reduced ones are
            total = clip_grad_norm([*model.parameters(), plain], 0.01, kind)
            assert type(total) is torch.Tensor
            found.append((total, {**gradients_of(model), "plain": plain.grad}))
        return found

    ranks = mode.run(body)
    assert_same_bits(ranks)
    for kind, (total, gradients) in zip(kinds, ranks[0], strict=True):
        twin, plain = seeded(Tied().double()), nn.Parameter(torch.ones(3, dtype=torch.float64))
        loss_of(twin, *batch()).backward()
        plain.grad = torch.full((3,), 0.1, dtype=torch.float64)
        expected = torch.nn.utils.clip_grad_norm_([*twin.parameters(), plain], 0.01, kind)
        torch.testing.assert_close(total, expected, **CLOSE)
        torch.testing.assert_close(gradients, {**gradients_of(twin), "plain": plain.grad}, **CLOSE)


def test_a_nan_gradient_on_one_rank_makes_the_norm_nan_on_all_ranks():
    def body() -> list[float]:
        model = sharded()
        loss_of(model, *own_part()).backward()
        if current_world().rank == 1:
            next(each.grad.to_local() for each in model.parameters() if each.grad is not None)[0] = math.nan
        return [float(clip_grad_norm(model.parameters(), 1.0, kind)) for kind in (2.0, math.inf)]

    assert all(math.isnan(total) for totals in PROCESSES_2.run(body) for total in totals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_other_types_are_sharded_too(dtype):
    def model() -> nn.Module:
        return seeded(nn.Sequential(nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)))

    def loss(network: nn.Module, start: int, stop: int) -> torch.Tensor:
        inputs = torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5).to(dtype)
        return network(inputs[start:stop]).abs().square().mean()

    def body() -> Named:
        network: Any = shard(model(), current_world(), FSDP((nn.Linear,)))
        start, stop, share = [(0, 2, 0.25), (2, 8, 0.75)][current_world().rank]
        (loss(network, start, stop) * share).backward()
        return gradients_of(network)

    plain = model()
    loss(plain, 0, 8).backward()
    for gradients in PROCESSES_2.run(body):
        precision = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.complex128: 1e-12}[dtype]
        torch.testing.assert_close(gradients, gradients_of(plain), rtol=precision, atol=precision / 10)


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


def test_what_cannot_be_sharded_is_told():
    def told(model: nn.Module) -> str:
        with pytest.raises(ValueError) as error:
            check_shardable(model)
        return str(error.value)

    two_types = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    assert "'0.weight' is torch.float32 and '1.weight' is torch.float64" in told(two_types)
