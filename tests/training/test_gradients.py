"""The reduction of gradients alone: weights, gaps, types and buckets, against sums in plain code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import FAMILY, PROCESSES_2, THREADS_2, THREADS_3, Mode, each_of, scaling
from torch.utils._python_dispatch import TorchDispatchMode

import unisono
from unisono import current_world
from unisono.training import gradients
from unisono.training.gradients import reduce_gradients

pytestmark = pytest.mark.every_mode

PAIR = [0.25, 0.75]


mode = each_of(scaling(THREADS_2, THREADS_3, PROCESSES_2, workers=True))


def shares_of(ranks: int) -> list[float]:
    """They add up to 1; and two ranks count, of however many."""
    return PAIR if ranks == 2 else [0.5, 0.5, *[0.0] * (ranks - 2)]


def parameter(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


def reduced(mode: Mode, make: Callable[[int], list[torch.Tensor]], shares: list[float]) -> list[Any]:
    """Each rank's gradients after the reduction of `make(rank)`."""

    def body() -> list[torch.Tensor | None]:
        rank = unisono.rank()
        parameters = make(rank)
        reduce_gradients(parameters, current_world(), shares[rank], "a step")
        return [each.grad for each in parameters]

    return mode.run(body)


@pytest.mark.any_family
def test_a_gradient_missing_on_some_ranks_counts_as_zero_and_mispairs_none(mode):
    shares = shares_of(mode.ranks)

    def make(rank: int) -> list[torch.Tensor]:
        first, nowhere, second, everywhere = (parameter((3,)) for _ in range(4))
        (first if rank == 0 else second).grad = torch.full((3,), 8.0)
        everywhere.grad = torch.full((3,), float(rank))
        return [first, nowhere, second, everywhere]

    for first, nowhere, second, everywhere in reduced(mode, make, shares):
        assert first.tolist() == [8.0 * shares[0]] * 3
        assert nowhere is None
        assert second.tolist() == [8.0 * (1 - shares[0])] * 3
        assert everywhere.tolist() == [sum(rank * share for rank, share in enumerate(shares))] * 3


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16, torch.float32, torch.complex128]
if FAMILY == "xla":
    DTYPES.pop()  # its complex128 has no imaginary part
    DTYPES.append(torch.complex64)


@pytest.mark.any_family
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 40, 64 * 2**20])
def test_every_type_and_shape_is_reduced_in_whatever_buckets(monkeypatch, first, bucket_bytes):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    shapes: list[tuple[int, ...]] = [(2, 3), (), (0,), (5,), (2, 1, 3, 1), (7,), (1,)]

    def make(rank: int) -> list[torch.Tensor]:
        parameters = []
        for number, (shape, dtype) in enumerate(zip(shapes, [first, *DTYPES[1:]], strict=True)):
            weight = parameter(shape, dtype)
            if (number + rank) % 3:
                filled = torch.full(shape, number + 4.0 * rank + (1j if dtype.is_complex else 0), dtype=dtype)
                weight.grad = filled.to(memory_format=torch.channels_last) if len(shape) == 4 else filled
            parameters.append(weight)
        return parameters

    each_ranks = [make(rank) for rank in range(2)]
    expected = []
    for pair in zip(*each_ranks, strict=True):
        terms = [share * each.grad for share, each in zip(PAIR, pair, strict=True) if each.grad is not None]
        expected.append(sum(terms[1:], terms[0]) if terms else None)
    for found in reduced(THREADS_2, make, PAIR):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), "small multiples of a quarter are exact in every type"


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_gradients_of_a_bucket_are_written_in_place_by_one_call(mode):
    """On a GPU each call is a kernel, or more."""

    def body() -> tuple[bool, list[str]]:
        bucket = [parameter((2,)), parameter((1, 3))]
        for each in bucket:
            each.grad = torch.ones_like(each)
        before = [each.grad for each in bucket]
        with Copies() as copies:
            reduce_gradients(bucket, current_world(), 0.5, "a step")
        return all(each.grad is held for each, held in zip(bucket, before, strict=True)), copies.names

    for is_in_place, names in mode.run(body):
        assert is_in_place
        assert [each for each in names if "foreach" in each] == ["aten::_foreach_copy_"]
