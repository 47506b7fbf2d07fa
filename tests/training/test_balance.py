"""Balance: slow ranks carry fewer virtual ranks, and the bits stay the same whatever the ranks carry."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from modes import on
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Mean, Virtual, barrier, current_world, should_stop
from unisono.batches.virtual_ranks import VirtualRanks, rebalanced, sums_of
from unisono.loading import balance

V = 6


# The table, as a pure function.


def tables(draw: Any, count: int, ranks: int) -> list[list[int]]:
    carriers = [*range(ranks), *(draw(range(ranks)) for _ in range(count - ranks))]
    return [[each for each in range(count) if carriers[each] == rank] for rank in range(ranks)]


def slowest(virtual: VirtualRanks, times: list[float]) -> float:
    return max(len(own) * each for own, each in zip(virtual.table, times, strict=True))


@hypothesis.given(st.data())
def test_the_slowest_rank_needs_the_least_time_that_it_can(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 16))
    ranks = data.draw(st.integers(2, count))
    draw = random.Random(data.draw(st.integers(0, 10**6)))
    before = VirtualRanks.carried_by(0, ranks, Virtual(count, balance=True)).with_table(
        tables(draw.choice, count, ranks)
    )
    times = data.draw(st.lists(st.floats(1, 20), min_size=ranks, max_size=ranks))
    found = rebalanced(before, times)
    assert sorted(each for own in found.table for each in own) == [*range(count)]
    assert [own[0] for own in found.table] == [*range(ranks)]
    least = slowest(found, times)
    for _ in range(20):  # no other table is faster by more than what counts as a gain
        assert slowest(before.with_table(tables(draw.choice, count, ranks)), times) * 1.1 > least
    if found is not before:
        assert slowest(before, times) >= 1.1 * least
        moved = sum(len({*own} - {*known}) for own, known in zip(found.table, before.table, strict=True))
        assert moved == sum(max(len(own) - len(known), 0) for own, known in zip(found.table, before.table, strict=True))
    assert rebalanced(found, times) is found


@pytest.mark.parametrize(("count", "ranks"), [(8, 2), (16, 4), (7, 3), (32, 5)])
def test_it_stays_where_ranks_are_as_fast_but_for_noise(count: int, ranks: int) -> None:
    draw, virtual = random.Random(count), VirtualRanks.carried_by(0, ranks, Virtual(count, balance=True))
    changes = 0
    for _ in range(300):
        found = rebalanced(virtual, [draw.gauss(10, 0.15) for _ in range(ranks)])
        changes, virtual = changes + (found is not virtual), found
    assert changes <= (count % ranks > 0)


def test_a_slow_rank_carries_fewer_and_moves_whole_subtrees() -> None:
    virtual = VirtualRanks.carried_by(0, 2, Virtual(8, balance=True))
    found = rebalanced(virtual, [1, 3])
    assert [*map(len, found.table)] == [6, 2]
    assert [len(sums_of(own, 8)) for own in found.table] == [2, 1]
    assert [*map(len, rebalanced(found, [1, 1]).table)] == [4, 4]
    assert [*map(len, rebalanced(found, [1, 100]).table)] == [7, 1]


# Training.


def train(
    balances: bool,
    seed: int | None = None,
    state: tuple[str, int] | None = None,
    witness_every: int | None = None,
    slows: float = 0,
    samples: int = 160,
    epochs: int = 3,
    **options: Any,
) -> Any:
    """Train; return the digest, the mean loss, and the tables. With a seed, random tables are taken at random rounds;
    rank one is slowed by so many seconds for each batch."""
    directory, at = state or (None, 0)
    seen = []
    draw, known = random.Random(seed), rebalanced

    def table(virtual: VirtualRanks, times: list[float]) -> VirtualRanks:
        found = known(virtual, times)
        if seed is not None:
            is_kept = draw.random() < 0.4
            found = virtual if is_kept else virtual.with_table(tables(draw.choice, V, len(times)))
        seen.append([*map(len, found.table)])
        return found

    if current_world().world_size > 1:  # in a process of its own
        balance.ROUNDS, balance.rebalanced = 1 if seed is not None else 3, table  # type: ignore[attr-defined]
    virtual = Virtual(V, balance=balances, witness_every=witness_every)
    accelerator = Accelerator(seed=3, virtual_ranks=virtual, max_grad_norm=1.0, project_dir=directory)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = TensorDataset(torch.randn(samples, 6), torch.arange(samples) % 5)
    loaders = [DataLoader(rows, 4, shuffle=True, **options), DataLoader(rows, 8)]
    model, optimizer, mean, *loaders = accelerator.prepare(model, optimizer, Mean(), *loaders)
    batches, tests = loaders
    if at < 0:
        accelerator.load_state()
    taken = 0
    for _ in range(batches.epoch, epochs):
        for inputs, targets in batches:
            loss = F.cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), targets)
            mean.update(loss, targets)
            accelerator.backward(loss)
            if accelerator.world.rank == 1:
                ends = time.perf_counter() + slows
                while time.perf_counter() < ends:
                    pass
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                taken += 1
                accelerator.reduce(loss.detach())
                if taken == at:
                    accelerator.save_state()
                    return None
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(targets) for _, targets in tests]
        assert torch.cat(found).tolist() == rows.tensors[1].tolist()
        model.train()
    return (accelerator.digest(), mean.compute().hex()), taken, seen


@pytest.fixture(scope="module")
def alone() -> Any:
    """What one rank computes."""
    return on(1, partial(train, False))


@pytest.mark.parametrize(
    ("ranks", "seed", "options"),
    [(3, 1, {"witness_every": 2, "num_workers": 1}), pytest.param(2, 0, {}, marks=pytest.mark.slow)],
)
def test_random_tables_at_random_rounds_leave_the_bits(
    ranks: int, seed: int, options: dict[str, int], alone: Any
) -> None:
    whole, taken, _ = alone
    found, *others = on(ranks, partial(train, True, seed, **options))
    assert found == whole
    assert others[0] == taken
    assert len({tuple(each) for each in others[1]}) >= 3


def test_a_run_is_resumed_on_other_ranks(alone: Any, tmp_path: Path) -> None:
    on(2, partial(train, True, 1, (str(tmp_path), 10)))
    assert on(3, partial(train, True, 2, (str(tmp_path), -1)))[0] == alone[0]


def test_a_slowed_rank_is_found_and_carries_fewer() -> None:
    whole, *_ = on(1, partial(train, False, samples=480, epochs=1))
    found, _, seen = on(2, partial(train, True, slows=0.03, samples=480, epochs=1))
    assert found == whole
    assert [5, 1] in seen


# What is refused.


def refuses(act: Callable[[Accelerator, torch.Tensor], Any], ends_round: bool = False) -> None:
    accelerator = Accelerator(virtual_ranks=Virtual(6, balance=True))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(24, 1)), 2))
    for (inputs,) in loader:
        accelerator.backward(model(inputs).mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients == ends_round:
            act(accelerator, inputs)


ACTS: dict[str, Callable[[Accelerator, torch.Tensor], Any]] = {
    "gather": lambda accelerator, inputs: accelerator.gather(inputs),
    "reduce": lambda accelerator, inputs: accelerator.reduce(inputs),
    "barrier": lambda accelerator, inputs: barrier(),
    "should_stop": lambda accelerator, inputs: should_stop(False),
    "gather_for_metrics": lambda accelerator, inputs: accelerator.gather_for_metrics(inputs),
}


def test_what_ranks_do_together_for_each_batch_is_refused_in_words() -> None:
    def body() -> None:
        for name, act in ACTS.items():
            if name != "gather_for_metrics":
                refuses(act, ends_round=True)
            words = f"{name} came in the middle of a round.* accelerator.sync_gradients"
            with pytest.raises(RuntimeError, match=words):
                refuses(act)

    on(2, body)


def test_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match="does not go with balance=True and strategy='fsdp'"):
        Accelerator(virtual_ranks=Virtual(2, balance=True), strategy="fsdp")


def test_balance_is_a_bool() -> None:
    with pytest.raises(TypeError, match="pass True or False"):
        Virtual(2, balance=1)  # type: ignore[arg-type]
