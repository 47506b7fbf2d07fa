"""Batch sizes that are tried one after the other, on all ranks together, until none of them runs out of memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_3, Mode, fitting
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, all_reduce, current_world, find_executable_batch_size, rank
from unisono.errors import CollectiveMismatchError
from unisono.training.out_of_memory import is_out_of_memory

ALL = pytest.mark.parametrize("mode", fitting(SOLO, THREADS_3, PROCESSES_2, workers=True), ids=str)
SEVERAL = pytest.mark.parametrize("mode", fitting(THREADS_2, PROCESSES_2), ids=str)
HUGE = 1 << 50


def allocate(size: int) -> torch.Tensor:
    """So many elements, in main memory, whose allocator refuses what no machine has."""
    return torch.empty(size, dtype=torch.uint8, device="cpu")


@ALL
def test_all_ranks_try_the_same_sizes_until_the_last_of_them_has_room(mode: Mode) -> None:
    def body() -> tuple[int, list[int]]:
        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=48)
        def attempt(batch_size: int, factor: int, *, more: int) -> int:
            tried.append(batch_size)
            if batch_size > 12 and rank() == current_world().world_size - 1:
                allocate(HUGE)
            return batch_size * factor + more

        assert attempt.__name__ == "attempt"
        attempt(1, more=0)
        return attempt(10, more=1), tried

    assert mode.run(body) == [(121, [48, 24, 12] * 2)] * mode.ranks


@ALL
def test_none_left_is_an_error_that_names_the_sizes(mode: Mode) -> None:
    def body() -> None:
        def attempt(batch_size: int) -> None:
            if rank() == 0:
                allocate(HUGE)

        find_executable_batch_size(attempt, 9, lambda size: size - 4)()

    with pytest.raises(RuntimeError, match=r"No executable batch size found, reached zero: 9, 5, 1 were tried"):
        mode.run(body)


def test_a_failed_attempt_lets_go_of_what_its_calls_held() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def inner(tensor: torch.Tensor) -> None:
        own = tensor * 2
        held.append(weakref.ref(own))
        allocate(HUGE)

    @find_executable_batch_size(starting_batch_size=2)
    def attempt(batch_size: int) -> list[bool]:
        alive = [each() is not None for each in held]
        tensor = torch.ones(3, requires_grad=True)
        held.append(weakref.ref(tensor))
        if batch_size > 1:
            try:
                inner(tensor)
            except RuntimeError as error:
                raise torch.OutOfMemoryError("no more room") from error
        return alive

    assert attempt() == [False, False]


@SEVERAL
def test_a_rank_out_of_memory_is_named_to_those_waiting_in_the_attempt(mode: Mode) -> None:
    def body() -> None:
        @find_executable_batch_size(starting_batch_size=64)
        def attempt(batch_size: int) -> None:
            if rank() == 1:
                allocate(HUGE)
            all_reduce(torch.ones(3, device=current_world().device))

        attempt()

    words = r"rank 1 .*the end of an attempt with batch size 64, where a rank comes early that ran out of memory"
    with pytest.raises(CollectiveMismatchError, match=words):
        mode.run(body)


def test_ranks_that_begin_with_different_sizes_are_named() -> None:
    def body() -> None:
        find_executable_batch_size(lambda batch_size: None, 4 + rank())()

    with pytest.raises(CollectiveMismatchError, match=r"batch size 4.*batch size 5|batch size 5.*batch size 4"):
        THREADS_2.run(body)


@ALL
def test_training_that_ran_out_of_memory_mid_step_restarts_exactly(mode: Mode) -> None:
    rows = torch.arange(24.0).reshape(12, 2) / 24

    def body() -> tuple[list[float], int]:
        accelerator = Accelerator(gradient_accumulation_steps=3)

        @find_executable_batch_size(starting_batch_size=12 // mode.ranks)
        def train(batch_size: int) -> list[float]:
            accelerator.free_memory()
            accelerator.gradient_accumulation_steps = 12 // mode.ranks // batch_size
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(TensorDataset(rows), batch_size)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for _ in range(2):
                for (x,) in loader:
                    accelerator.backward(F.mse_loss(model(x), x.sum(1, keepdim=True)))
                    optimizer.step()
                    optimizer.zero_grad()
                    if batch_size * mode.ranks > 6:
                        allocate(HUGE)
            return [each.item() for each in model.weight.flatten()]

        return train(), accelerator.gradient_accumulation_steps

    torch.manual_seed(0)
    plain = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(plain(rows), rows.sum(1, keepdim=True)).backward()
        optimizer.step()
    for weights, steps in mode.run(body):
        torch.testing.assert_close(torch.tensor(weights), plain.weight.detach().flatten())
        assert steps >= 2


def test_what_is_no_number_and_sizes_that_do_not_shrink_are_refused() -> None:
    with pytest.raises(TypeError, match=r"starting_batch_size='4' is of type str"):
        find_executable_batch_size(starting_batch_size="4")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"starting_batch_size=0 is too small"):
        find_executable_batch_size(starting_batch_size=0)
    with pytest.raises(KeyError, match="mine"):
        find_executable_batch_size(lambda size: {}["mine"])()
    with pytest.raises(ValueError, match=r"reduce_batch_size_fn gave 4 after 4; it must give a smaller size"):
        find_executable_batch_size(lambda size: allocate(HUGE), 4, lambda size: size)()


@pytest.mark.parametrize(
    ("error", "is_meant"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: while running replica 0"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (CollectiveMismatchError("rank 1 came to an attempt that ran out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_a_smaller_batch_may_help(error: Exception, is_meant: bool) -> None:
    assert is_out_of_memory(error) == is_meant
