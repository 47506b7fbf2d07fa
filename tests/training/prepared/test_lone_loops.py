"""A rank that loops over a prepared loader alone gets its part of the data only: that is an error, whatever follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from faults import until
from modes import PROCESSES_2, THREADS_2, Mode
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono import Accelerator
from unisono.errors import BrokenWorldError, CollectiveMismatchError

RULE = "begin the same loops between the same collectives; a prepared loader gives each rank its part of the data only"
FOLLOWS: dict[str, Callable[[Accelerator, Any], Any]] = {
    "a reduction": lambda accelerator, loader: unisono.all_reduce(torch.ones(1)),
    "a metric": lambda accelerator, loader: [accelerator.gather_for_metrics(batch + 1) for [batch] in loader],
}


def prepared() -> tuple[Accelerator, Any]:
    accelerator = Accelerator()
    return accelerator, accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), 3))


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
@pytest.mark.parametrize("follows", FOLLOWS)
def test_the_next_call_of_all_ranks_names_it(mode: Mode, follows: str) -> None:
    def body() -> None:
        accelerator, loader = prepared()
        if accelerator.is_main_process:
            next(iter(loader))
        with torch.no_grad():
            FOLLOWS[follows](accelerator, loader)

    with pytest.raises(CollectiveMismatchError, match=r"must (begin the same loops|loop over each prepared)"):
        mode.run(body)


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
@pytest.mark.parametrize("is_first", [True, False], ids=["before the other rank ends", "after it"])
def test_so_does_the_end_of_a_run(mode: Mode, is_first: bool, tmp_path: Path) -> None:
    def body() -> int:
        _, loader = prepared()
        other = unisono.all_gather(torch.tensor(psutil.Process().pid))[1].item()
        if unisono.rank() == 1:
            until(lambda: not is_first or (tmp_path / "looped").exists())
            return 0
        until(lambda: is_first or mode == THREADS_2 or not psutil.pid_exists(int(other)))
        count = sum(len(batch) for [batch] in loader)
        (tmp_path / "looped").touch()
        return count

    with pytest.raises(CollectiveMismatchError, match="a loop over a DataLoader of 12 samples, epoch 0") as caught:
        mode.run(body)
    assert RULE in str(caught.value)
    assert "leave a loop on all ranks together, by a value that all have" in str(caught.value)


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_a_save_by_one_rank_alone_is_told_that_all_ranks_take_part(mode: Mode, tmp_path: Path) -> None:
    def body() -> None:
        accelerator = Accelerator(project_dir=tmp_path)
        _model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(12, 1)), 3))
        for _ in range(2):
            for _ in loader:
                pass
            if accelerator.is_main_process:
                accelerator.save_state()

    # The other rank begins a loop, or has left by then.
    told = "call nothing that all ranks take part in, such as save_state|call on every rank what concerns all of them"
    with pytest.raises((BrokenWorldError, CollectiveMismatchError), match=told):
        mode.run(body)


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_loops_at_different_times_or_over_plain_loaders_are_not_lone_loops(mode: Mode, tmp_path: Path) -> None:
    def body() -> int:
        _, loader = prepared()
        plain = DataLoader(TensorDataset(torch.arange(12)), 3)
        until(lambda: unisono.rank() == 0 or (tmp_path / "0").exists())
        count = sum(len(batch) for _ in range(10) for [batch] in loader)
        count += sum(len(batch) for [batch] in plain) if unisono.rank() == 0 else 0
        (tmp_path / str(unisono.rank())).touch()
        return count

    assert mode.run(body) == [10 * 6 + 12, 10 * 6]


def test_one_after_many_loops_of_all_ranks_is_named_too() -> None:
    def body() -> None:
        _, loader = prepared()
        for _ in range(25 - unisono.rank()):  # what a rank announces fills a page of its notes then
            next(iter(loader))
        unisono.all_reduce(torch.ones(1))

    with pytest.raises(CollectiveMismatchError, match=r"rank 0 came to a loop .* of 12 samples, epoch 24 .*while"):
        PROCESSES_2.run(body)


def test_loops_of_other_threads_begin_at_any_time() -> None:
    def body() -> int:
        _, loader = prepared()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(len(batch) for [batch] in loader))
        for rank in range(2):
            if rank == unisono.rank():
                thread.start()
                thread.join()
            unisono.all_reduce(torch.ones(1))
        return sum(found)

    assert THREADS_2.run(body) == [6, 6]


def test_a_rank_ends_with_its_last_thread(tmp_path: Path) -> None:
    def reduce() -> None:
        done = [unisono.all_reduce(torch.ones(1)).item() for _ in range(300)]
        (tmp_path / f"{unisono.rank()}").write_text(f"{sum(done):g}")

    def body() -> None:
        thread = threading.Thread(target=reduce)
        thread.start()
        if unisono.rank() == 1:
            thread.join()

    PROCESSES_2.run(body)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["600", "600"]
