"""Reductions that threads carry out together: the same bits whoever folds what, and nobody left when one fails."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import Rank
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm import folding
from unisono.comm.folding import SharedFold, all_reduction, fold
from unisono.comm.operations import REDUCIBLE
from unisono.comm.outcome import Outcome
from unisono.comm.threads import ThreadCommunicator
from unisono.errors import BrokenWorldError


def together(*parts: Callable[[], Any]) -> list[Outcome[Any]]:
    """Run each part in a thread of its own."""
    return [rank.ended() for rank in [Rank(part) for part in parts]]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "SHARED_BYTES", 0)
    monkeypatch.setattr(folding, "BLOCK_BYTES", 64)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return ("sum", "mean")
    if dtype == torch.bool:
        return ("min", "max")
    return ("sum", "mean", "min", "max", "product") if dtype.is_floating_point else ("sum", "min", "max", "product")


def made(dtype: torch.dtype, length: int, rank: int) -> torch.Tensor:
    numbers = torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (numbers * 3).to(dtype) if dtype != torch.uint8 else (numbers.abs() * 3).to(dtype)


@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_a_shared_fold_gives_every_rank_the_bits_of_a_fold_by_one(dtype, small_blocks):
    for op, size in itertools.product(ops_of(dtype), (1, 2, 3)):
        tensors = [made(dtype, 131, rank) for rank in range(size)]
        expected = fold(tensors, op)
        shared = SharedFold(tensors, op)
        for outcome in together(*[shared.work] * size):
            outcome.unwrap()
        assert all(torch.equal(each, expected) for each in tensors)


@given(length=st.integers(0, 300), size=st.integers(2, 4), block=st.integers(4, 400), workers=st.integers(1, 5))
def test_every_block_is_folded_once_for_any_lengths_and_worker_count(length, size, block, workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "BLOCK_BYTES", block)
        tensors = [torch.full((length,), float(rank + 1)) for rank in range(size)]
        shared = SharedFold(tensors, "sum")
        together(*[shared.work] * workers)
        assert all(each.tolist() == [sum(range(1, size + 1))] * length for each in tensors)


def test_what_is_not_one_stretch_of_memory_is_folded_by_one(small_blocks):
    strided = [torch.arange(12.0).reshape(3, 4)[:, 1::2] for _ in range(2)]
    conjugated = [torch.tensor([1 + 2j, 3j]).conj() for _ in range(2)]
    the_same = [torch.ones(8)] * 3
    whole = torch.ones(8)
    overlapping = [whole[:6], whole[2:]]
    neighbours = [whole[:4], whole[4:]]
    for tensors in (strided, conjugated, the_same, overlapping):
        assert isinstance(all_reduction(tensors, "sum"), torch.Tensor)
    assert isinstance(all_reduction(neighbours, "sum"), SharedFold)


def test_nobody_goes_on_before_all_have_done_their_part(small_blocks, monkeypatch):
    """A rank that comes back may write its tensor at once, while another one is still at work on it."""
    work, late, is_back = SharedFold.work, [], threading.Event()

    def work_late(self: SharedFold) -> None:
        if threading.current_thread() in late:
            assert not is_back.wait(0.1), "the other rank came back"
        work(self)

    monkeypatch.setattr(SharedFold, "work", work_late)

    def run(comm: ThreadCommunicator) -> Any:
        late.extend([threading.current_thread()] * comm.rank)
        tensor = comm.all_reduce(torch.full((64,), comm.rank + 1.0))
        found = tensor.unique().tolist()
        if comm.rank == 0:
            is_back.set()
            tensor.fill_(100)
        return found

    outcomes = together(*[lambda c=c: run(c) for c in ThreadCommunicator.group(2)])
    assert [outcome.unwrap() for outcome in outcomes] == [[3.0]] * 2


def test_a_rank_that_fails_amid_its_part_breaks_the_world_for_all(small_blocks, monkeypatch):
    def fail(self: SharedFold) -> None:
        if threading.current_thread() in failing:
            raise MemoryError("no more")
        work(self)

    work, failing = SharedFold.work, []
    monkeypatch.setattr(SharedFold, "work", fail)

    def run(comm: ThreadCommunicator) -> None:
        if comm.rank == 1:
            failing.append(threading.current_thread())
        comm.all_reduce(torch.ones(64))

    outcomes = together(*[lambda c=c: run(c) for c in ThreadCommunicator.group(3)])
    assert isinstance(outcomes[1].error, MemoryError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, BrokenWorldError)
        assert isinstance(outcome.error.__cause__, MemoryError)
