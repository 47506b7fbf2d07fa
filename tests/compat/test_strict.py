"""Under `strict` nothing moves and nothing converts by itself. Type "meta" stands for a second device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from modes import devices
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from unisono.compat.placement import copy_to, scalar_like, strict
from unisono.compat.precision import to_full_precision, to_reduced_precision
from unisono.errors import MixedPlacementError

HERE, THERE = torch.ones(2, 2), torch.ones(2, 2, device="meta")
FULL, REDUCED = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)


def test_an_error_names_both_tensors_and_the_way_out():
    with strict(), pytest.raises(MixedPlacementError) as caught:
        torch.add(THERE, other=HERE)
    assert str(caught.value) == (
        "torch.add mixes devices: torch.float32 of shape (2, 2) on meta, and torch.float32 of shape (2, 2) on cpu; "
        "inside unisono.compat.placement.strict() nothing moves or converts by itself: bring both to one device with "
        "copy_to, to one precision with unisono.compat.precision, or create the tensor of a number with scalar_like"
    )


@pytest.mark.any_family
def test_a_device_of_the_family_mixes_with_itself_only():
    here = torch.ones(2, 2, device=devices(1)[0])
    words = rf"torch\.Tensor\.add mixes devices: .* on {here.device}, and .* on meta"
    with strict():
        assert (here + here).sum().item() == 8
        with pytest.raises(MixedPlacementError, match=words):
            here + THERE


MIXED = {
    "an operator": lambda x, y: x * y,
    "an operator in place": lambda x, y: x.mul_(y),
    "a comparison": lambda x, y: x == y,
    "a nested argument": lambda x, y: torch.stack([x, x, y]),
    "an output": lambda x, y: torch.add(x, x, out=y),
    "an assignment to elements": lambda x, y: x.__setitem__(0, y[0]),
    "a tensor without dimensions": lambda x, y: x + y.sum(),
    "a choice": lambda x, y: torch.where(torch.ones_like(x, dtype=torch.bool), x, y),
    "a functional": lambda x, y: F.linear(x, y),
    "an einsum": lambda x, y: torch.einsum("ij,jk", x, y),
    "a module": lambda x, y: nn.Linear(2, 2).to(x)(y),
}


@pytest.mark.parametrize("operation", MIXED)
def test_every_way_to_mix_is_an_error(operation):
    for other in (THERE, REDUCED, FULL.half(), FULL.double()):
        x = FULL.clone()
        with strict(), pytest.raises(MixedPlacementError, match=r"mixes (devices|precisions): "):
            MIXED[operation](x, other.clone())
        assert torch.equal(x, FULL), "it is not carried out"


ALIKE = {
    "numbers": lambda: REDUCED * 2.5 + 1,
    "integers": lambda: REDUCED * torch.ones(2, 2, dtype=torch.int64),
    "booleans": lambda: FULL[FULL > 0],
    "complex numbers": lambda: FULL * torch.ones(2, 2, dtype=torch.complex64),
    "labels": lambda: F.cross_entropy(REDUCED.float(), torch.tensor([0, 1])),
    "an embedding": lambda: nn.Embedding(2, 2).bfloat16()(torch.tensor([0])),
    "a conversion": lambda: FULL.to(REDUCED) + REDUCED.type_as(REDUCED),
    "a movement": lambda: HERE.to(THERE.device) + THERE,
    "a copy": lambda: FULL.clone().copy_(REDUCED),
    "a shape of another": lambda: (FULL.view_as(REDUCED), FULL.expand_as(THERE)),
    "copy_to": lambda: copy_to(HERE, "meta") + THERE,
    "to_reduced_precision": lambda: to_reduced_precision(FULL) + REDUCED,
    "to_full_precision": lambda: to_full_precision(REDUCED) + FULL,
    "scalar_like": lambda: THERE * scalar_like(2, THERE),
    "a text": lambda: repr([FULL, REDUCED]),
    "lengths": lambda: pad_packed_sequence(
        nn.LSTM(1, 2).to("meta")(pack_padded_sequence(torch.ones(3, 2, 1, device="meta"), torch.tensor([3, 1])))[0]
    ),
    "lengths in main memory": lambda: torch.tensor_split(torch.ones(4, device="meta"), torch.tensor([1])),
    "statistics of one's own": lambda: F.batch_norm(torch.ones(2, 3).bfloat16(), torch.zeros(3), torch.ones(3)),
    "loading": lambda: nn.Linear(2, 2).bfloat16().load_state_dict(nn.Linear(2, 2).state_dict()),
    "a module's conversion": lambda: nn.Linear(2, 2).bfloat16().float(),
    "an attention": lambda: nn.TransformerEncoderLayer(4, 2).bfloat16()(torch.ones(1, 1, 4).bfloat16()),
}


@pytest.mark.parametrize("what", ALIKE)
def test_what_is_asked_for_or_mixes_with_everything_passes(what):
    with strict():
        ALIKE[what]()


def test_nothing_is_refused_outside_or_after():
    with pytest.raises(KeyError), strict():
        raise KeyError
    with strict(), strict():
        pass
    assert (FULL + REDUCED).dtype is torch.float32


def test_autocast_may_mix_precisions_and_not_devices():
    layer = nn.Linear(2, 2)
    with strict(), torch.autocast("cpu", torch.bfloat16):
        assert layer(REDUCED).dtype is torch.bfloat16
        with pytest.raises(MixedPlacementError, match="mixes devices"):
            layer(THERE)
        with torch.autocast("cpu", enabled=False), pytest.raises(MixedPlacementError, match="mixes precisions"):
            layer(REDUCED)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Rprop", "Adafactor", "LBFGS"])
def test_a_reduced_model_with_full_statistics_trains(name):
    lr = 0.01 if name == "SGD" else torch.tensor(0.01)
    model = to_reduced_precision(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = to_full_precision(model(REDUCED)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    with strict():
        for _ in range(2):
            optimizer.step(closure)
        with pytest.raises(MixedPlacementError):
            optimizer.step(lambda: (FULL + REDUCED).sum())


def test_a_scaler_and_a_checkpointed_block_run():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu")
    with strict():
        with torch.autocast("cpu", torch.float16):
            loss = checkpoint(lambda x: x @ x, parameter, use_reentrant=False).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.grad is not None


def test_it_is_of_the_thread_that_entered_it():
    with strict(), ThreadPoolExecutor(1) as other:
        assert other.submit(torch.add, FULL, REDUCED).result().dtype is torch.float32


def test_a_compiled_function_runs():
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
    with strict():
        assert torch.equal(compiled(FULL), FULL.sin() * 2)
