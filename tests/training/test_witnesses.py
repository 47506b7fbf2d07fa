"""Witnesses: a batch that two ranks compute shows a device that computes wrong, and changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from modes import Mode, on
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unisono import Accelerator, Accuracy, DeviceLoader, Mean, Virtual
from unisono.batches.virtual_ranks import VirtualRanks
from unisono.errors import CorruptedComputeError
from unisono.loading.sharding import Rule

V = 4
SHUFFLED = partial(DataLoader, batch_size=4, shuffle=True)


class Rows(Dataset[Any]):
    """40 rows with noise, so that the last round is not full."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> Any:
        row = torch.randn(6, generator=torch.Generator().manual_seed(place))
        return row + 0.1 * random.random() + 0.1 * torch.rand(()), place % 5


class Flip:
    """Flips a bit of a gradient, from a step on, or in the batches of one step alone; of the batches that count, if
    that is said."""

    def __init__(self, model: nn.Module, name: str, bit: int) -> None:
        self.is_on, self.bit, self.parameters = False, bit, [*model.parameters()]
        dict(model.named_parameters())[name].register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.is_on:
            gradient = gradient.clone()
            gradient.view(torch.int32).view(-1)[0] ^= 1 << self.bit
        return gradient


def train(
    count: int = V,
    witness_every: int | None = 2,
    loader: Any = SHUFFLED,
    flips: Callable[[Any, int, int], bool] = lambda *_: False,
    state: tuple[str, int] | None = None,
    epochs: int = 3,
    **options: Any,
) -> Any:
    """Train; return the digest, the numbers of batches, and what is reported. `flips` says whether a bit of the
    gradients of a batch is flipped, by the loop, the rank, and the number of steps taken."""
    directory, at = state or (None, 0)
    virtual = Virtual(count, witness_every=witness_every)
    accelerator = Accelerator(seed=3, virtual_ranks=virtual, max_grad_norm=1.0, project_dir=directory, **options)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, batches, mean, share = accelerator.prepare(model, optimizer, loader(Rows()), Mean(), Accuracy())
    flip = Flip(accelerator.unwrap_model(model), "4.weight", bit=3)
    if at < 0:
        accelerator.load_state()
    drawn = taken = counted = 0
    gathered = []
    for _ in range(batches.epoch, epochs):
        for inputs, targets in batches:
            drawn += 1
            counted += batches.valid_samples
            scores = model(inputs + 0.1 * torch.randn_like(inputs))
            loss = F.cross_entropy(scores.float(), targets)
            mean.update(loss, targets)
            share.update(scores, targets)
            gathered += accelerator.gather_for_metrics(targets).tolist()
            flip.is_on = flips(batches, accelerator.world.rank, taken)
            accelerator.backward(loss)
            before = [each.detach().clone() for each in flip.parameters]
            try:
                optimizer.step()
            except CorruptedComputeError as error:
                assert all(map(torch.equal, before, flip.parameters))
                return error, taken
            optimizer.zero_grad()
            taken += accelerator.sync_gradients
            if taken == at > 0 and accelerator.sync_gradients:
                accelerator.save_state()
                return None
    reports = mean.compute().hex(), share.compute(), gathered, counted * (accelerator.world.world_size == 1)
    return accelerator.digest(), drawn, taken, reports


def lists(rows: Any) -> DeviceLoader:
    """Batches as a list, which are cut where the last round is dealt."""
    stacks = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5
    batches = [*zip(*(each.split(6) for each in stacks), strict=True)]
    return DeviceLoader(batches, virtual_ranks=Virtual(V, witness_every=1))


# Strategies, weights, loaders and models are in test_virtual_ranks.py, whose runs on three ranks have witnesses.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "of 6": {"count": 6},
    "each step": {"witness_every": 1},
}


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    """What one rank computes."""
    return {way: on(1, partial(train, **{**options, "witness_every": None})) for way, options in WAYS.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_with_witnesses_has_the_same_bits_and_reports_as_without(ranks: int, without: dict[str, Any]) -> None:
    for way, (digest, drawn, *found) in on(
        ranks, lambda: {each: train(**options) for each, options in WAYS.items()}
    ).items():
        print(way)
        expected, _, taken, reports = without[way]
        assert reports[-1] == 3 * 40
        assert digest == expected
        assert found == [taken, (*reports[:3], reports[3] * (ranks == 1))]
        every, rounds = WAYS[way].get("witness_every", 2), -(-WAYS[way].get("count", V) // ranks)
        witnesses = drawn - taken * rounds
        assert witnesses == taken - 3 if every == 1 else witnesses >= taken // (every + 1)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 4)])
def test_a_bit_that_a_rank_flips_is_found_within_so_many_steps(ranks: int, count: int) -> None:
    begins = random.Random(count + ranks).randrange(2, 8)

    def flips(_: Any, rank: int, taken: int) -> bool:
        return rank == 1 and taken >= begins

    body = partial(train, count, witness_every=3, flips=flips, epochs=9)
    (error, taken), *others = Mode("processes", ranks).run(body)
    assert {str(each) for each, _ in others} == {str(error)}
    assert begins <= taken <= begins + 3
    assert error.step == taken + 1
    assert error.name == "4.weight"
    assert 1 in (error.rank, error.witness)
    assert error.virtual_rank % ranks == error.rank
    assert (error.rank - error.witness) % ranks == 1
    assert f"step {taken + 1} (epoch " in str(error)
    assert f"rank {error.rank} (cpu:{error.rank} of " in str(error)
    if ranks > 2:
        assert "rank 1 is one of the two each time" in str(error)


def test_one_rank_is_its_own_witness() -> None:
    state = random.Random(1)
    error, _ = on(1, partial(train, flips=lambda *_: state.random() < 0.5))
    assert (error.rank, error.witness) == (0, 0)


def test_a_part_of_a_batch_has_the_same_gradient_on_its_witness() -> None:
    assert len({on(ranks, partial(train, loader=lists))[0] for ranks in (1, 3)}) == 1


def test_a_bit_that_is_flipped_once_is_found_by_the_witness_of_that_batch() -> None:
    def flips(batches: Any, rank: int, taken: int) -> bool:
        return rank == 1 and not batches.valid_samples and taken > 3  # in the witness alone

    error, _ = on(2, partial(train, flips=flips))
    assert (error.rank, error.witness) == (0, 1)
    assert error.virtual_rank % 2 == 0
    assert "is one of the two each time" not in str(error)
    assert "the same is true of" not in str(error)


def test_no_rank_is_blamed_where_none_is_in_all_pairs() -> None:
    error, _ = on(3, partial(train, flips=lambda batches, _, taken: not batches.valid_samples and taken > 2))
    assert str(error).count("virtual rank") == 3
    assert "is one of the two each time" not in str(error)
    assert "without one of them" in str(error)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, inputs: torch.Tensor, place: int) -> Any:
        return self.parts[place](inputs)


def zeroes_in_place(witness_every: int | None = None, strategy: Any = "ddp") -> str:
    """Parameters that no pass of a step reaches have gradients of zero, on which an optimizer steps by its momenta; so
    do those that are frozen."""
    accelerator = Accelerator(seed=1, virtual_ranks=Virtual(V, witness_every=witness_every), strategy=strategy)
    model = Routed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(72, 3))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 3))
    taken = 0
    for (inputs,) in loader:
        accelerator.backward(model(inputs, taken % (3 if taken < 3 else 2)).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        taken += accelerator.sync_gradients
        if taken == 3 and accelerator.sync_gradients:
            model.module.parts[2].requires_grad_(False)
    return accelerator.digest()


def test_gradients_of_zero_are_those_of_each_batch() -> None:
    whole = on(1, zeroes_in_place)
    assert on(3, lambda: [zeroes_in_place(2), zeroes_in_place(None, "fsdp"), zeroes_in_place(2, "fsdp")]) == [whole] * 3


def test_a_run_is_resumed_in_the_middle_of_an_epoch(without: dict[str, Any], tmp_path: Path) -> None:
    on(2, partial(train, state=(str(tmp_path), 6)))
    assert on(3, partial(train, state=(str(tmp_path), -1)))[0] == without["plain"][0]


def many(zips: bool, witness_every: int | None) -> Any:
    """Two models in one loop, of one loader, or of two at once; and the batches that evaluations get."""
    accelerator = Accelerator(seed=1, virtual_ranks=Virtual(V, witness_every=witness_every))
    maker, judge = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    steps = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, judge)]
    rows = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
    loaders = [DataLoader(rows, 3, shuffle=True), DataLoader(rows, 2), DataLoader(rows, 5)]
    maker, judge, one, other, loader, second, third = accelerator.prepare(maker, judge, *steps, *loaders)
    drawn, seen = 0, 0
    for _ in range(2):
        for batch in zip(loader, second, strict=False) if zips else loader:
            (real, noise), (also, _) = batch if zips else (batch, batch)
            drawn += 1
            made = maker(noise)
            other.zero_grad()
            accelerator.backward(F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean())
            if zips:
                accelerator.backward(F.softplus(-judge(also)).mean())
            judge.requires_grad_(False)
            one.zero_grad()
            accelerator.backward(F.softplus(-judge(made)).mean())
            judge.requires_grad_(True)
            other.step()
            one.step()
        for real, _ in third:  # with gradients
            seen += 1
            with torch.no_grad():
                judge(real)
        with torch.no_grad():
            seen += sum(1 for _ in third)
    return accelerator.digest(), drawn, seen


def test_a_step_of_two_models_is_compared_unless_it_has_two_loaders() -> None:
    (digest, drawn, seen), *others = (on(1, partial(many, False, every)) for every in (None, 1, 3))
    zipped, alone = on(3, lambda: [many(True, 1), many(False, 1)])
    assert [each[0] for each in (*others, alone)] == [digest] * 3
    assert [each[1] > drawn for each in others] == [True, True]
    assert [each[2] for each in others] == [seen, seen]
    assert many(True, 1) == (expected := many(True, None))
    assert zipped[0] == expected[0]


def test_what_goes_from_batch_to_batch_is_found_and_named() -> None:
    def body() -> None:
        accelerator = Accelerator(virtual_ranks=Virtual(2, witness_every=1))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(8, 1)), 2))
        for number, (inputs,) in enumerate(loader):
            accelerator.backward(model(inputs).mean() * number)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(CorruptedComputeError, match="or the loop's Python carries something from batch to batch"):
        body()


@hypothesis.given(st.integers(1, 9), st.integers(2, 12), st.data())
def test_there_is_one_in_so_many_steps_and_each_virtual_rank_has_its_turn(
    every: int, rounds: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 8))
    virtual = VirtualRanks.carried_by(0, data.draw(st.integers(1, count)), Virtual(count))
    rule = Rule(count, virtual.own, virtual=virtual, witness_every=every)
    found = [
        (epoch * rounds + place, number)
        for epoch in range(40)
        for place in range(rounds)
        if (number := replace(rule, first=epoch * rounds).witnesses(place)) is not None
    ]
    assert all(other - one <= max(every + 1, 2) for (one, _), (other, _) in pairwise(found) if rounds > every)
    assert found[0][0] <= max(every, 1)
    assert {virtual.witness(number) for number in range(200)} == {*virtual.table[1 % len(virtual.table)]}


@pytest.mark.parametrize("name", ["count", "witness_every"])
def test_what_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=0"):
        Virtual(**{"count": 2, name: 0})
