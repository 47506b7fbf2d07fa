"""A resumed run is the run that was never stopped: the same bits on as many ranks, each sample once on any number."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_4, Mode, fitting
from preemptions import hits_of
from resumable import Run, assert_each_once, drawn_batch, leave_after
from torch import nn

from unisono import Accelerator, current_world, spawn
from unisono.checkpoint import saver
from unisono.errors import CheckpointError, WorkerDiedError
from unisono.strategies import FSDP

PROCESSES_4 = Mode("processes", 4)
EXACTLY = {"rtol": 0, "atol": 0}
HSDP = FSDP(replicas=2)  # on four ranks each parameter is in two parts


def first(results: list) -> tuple:
    return results[0]


@pytest.mark.parametrize(
    ("mode", "strategy", "accumulates"),
    [
        (SOLO, "ddp", 1),
        (THREADS_2, "ddp", 3),
        pytest.param(PROCESSES_4, "ddp", 3, marks=pytest.mark.slow),
        pytest.param(PROCESSES_2, "zero1", 3, marks=pytest.mark.slow),
        pytest.param(PROCESSES_2, "fsdp", 3, marks=pytest.mark.slow),
        pytest.param(PROCESSES_4, HSDP, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_as_many_ranks_the_bits_agree(tmp_path: Path, mode: Mode, strategy: str | FSDP, accumulates: int) -> None:
    common = {"strategy": strategy, "dropout": 0.5, "workers": 1, "accumulates": accumulates}
    weights, ledger = first(mode.run(Run(tmp_path / "whole", **common)))
    mode.run(Run(tmp_path / "parts", **common, after=leave_after(drawn_batch(), is_async=True)))
    resumed, own = first(mode.run(Run(tmp_path / "parts", **common)))
    assert_each_once(own)
    assert own.losses == ledger.losses
    torch.testing.assert_close(resumed, weights, **EXACTLY)


@pytest.mark.parametrize(
    ("mode", "strategy", "then", "to", "accumulates"),
    [
        (SOLO, "ddp", THREADS_4, "ddp", 3),
        (THREADS_4, "ddp", SOLO, "ddp", 1),
        (PROCESSES_2, "fsdp", THREADS_2, "ddp", 3),
        pytest.param(THREADS_4, "ddp", Mode("threads", 8), "ddp", 1, marks=pytest.mark.slow),
        pytest.param(PROCESSES_4, "ddp", PROCESSES_2, "zero1", 3, marks=pytest.mark.slow),
        pytest.param(PROCESSES_2, "zero1", PROCESSES_2, "fsdp", 3, marks=pytest.mark.slow),
        pytest.param(PROCESSES_4, HSDP, PROCESSES_2, "fsdp", 1, marks=pytest.mark.slow),
        pytest.param(PROCESSES_2, "zero1", PROCESSES_4, HSDP, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_another_number_of_ranks_each_sample_counts_once_and_the_losses_agree(
    tmp_path: Path, mode: Mode, strategy: str | FSDP, then: Mode, to: str | FSDP, accumulates: int
) -> None:
    weights, ledger = first(SOLO.run(Run(tmp_path / "whole", accumulates=accumulates)))
    mode.run(Run(tmp_path / "parts", strategy, accumulates=accumulates, after=leave_after(drawn_batch())))
    resumed, own = first(then.run(Run(tmp_path / "parts", to, accumulates=accumulates)))
    assert_each_once(own)
    torch.testing.assert_close(torch.tensor(own.losses), torch.tensor(ledger.losses), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(resumed, weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        (PROCESSES_2, "zero1"),
        pytest.param(PROCESSES_2, "fsdp", marks=pytest.mark.slow),
        pytest.param(PROCESSES_4, HSDP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parts_that_all_ranks_write_are_the_same_checkpoint(tmp_path: Path, mode: Mode, strategy: str | FSDP) -> None:
    def after(accelerator: Accelerator, count: int) -> bool:
        if count == 2:
            saver.SMALL = -1  # all ranks write
            accelerator.save_state(is_async=True)
        return count == 2

    weights, _ = first(SOLO.run(Run(tmp_path / "whole", accumulates=3)))
    mode.run(Run(tmp_path / "parts", strategy, accumulates=3, after=after))
    assert len(list((tmp_path / "parts/checkpoints").rglob("shards/*.pt"))) == mode.ranks
    resumed, own = first(SOLO.run(Run(tmp_path / "parts", accumulates=3)))
    assert_each_once(own)
    torch.testing.assert_close(resumed, weights, rtol=1e-9, atol=1e-12)


def killed_at(batches: int, rank: int) -> Callable[[Accelerator, int], None]:
    """Save behind each second batch; that rank dies of SIGKILL behind the given one of its first life."""
    print(f"rank {rank} is killed")

    def after(accelerator: Accelerator, count: int) -> None:
        if count % 2 == 0:
            accelerator.save_state(is_async=True)
        if count == batches and current_world().restart_count == 0 and current_world().rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return after


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_worker_that_is_killed_costs_no_bit_when_the_group_is_restarted(tmp_path: Path, ranks: int) -> None:
    common = {"dropout": 0.5, "workers": 1}
    weights, ledger = first(Mode("processes", ranks).run(Run(tmp_path / "whole", **common)))
    run = Run(tmp_path / "parts", **common, after=killed_at(drawn_batch(), random.randrange(ranks)))
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        spawn(lambda _: run(), nprocs=ranks, cores=1)
    resumed, own = spawn(lambda _: run(), nprocs=ranks, cores=1, max_restarts=1)[0]
    assert_each_once(own)
    assert own.losses == ledger.losses
    torch.testing.assert_close(resumed, weights, **EXACTLY)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["preempt", "kill"])
def test_a_run_that_is_hit_at_any_moment_trains_on_each_sample_once(kind: str) -> None:
    assert sum(hits_of(kind, seed).total() for seed in range(3)) > 2


@pytest.mark.parametrize("mode", fitting(SOLO, PROCESSES_2), ids=str)
def test_an_optimizer_that_was_not_prepared_is_not_left_out_in_silence(mode: Mode, tmp_path: Path) -> None:
    def body() -> list[str]:
        accelerator = Accelerator(project_dir=tmp_path)
        optimizer = torch.optim.SGD((network := nn.Linear(2, 1)).parameters(), lr=0.1, momentum=0.9)
        model = accelerator.prepare(network)
        accelerator.save_state()  # it has not stepped
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        with pytest.raises(CheckpointError, match=r"leave out the SGD that has stepped for the Linear, .*; prepare it"):
            accelerator.save_state()
        accelerator.register_for_checkpointing(optimizer)
        accelerator.save_state()
        return sorted(each.name for each in (tmp_path / "checkpoints").glob("checkpoint_*"))

    assert mode.run(body) == [["checkpoint_0", "checkpoint_1"]] * mode.ranks


@pytest.mark.parametrize("way", ["left out", "prepared", "registered"])
def test_a_scheduler_that_was_left_out_is_named_when_the_run_is_saved(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(torch.optim.SGD):
        """Its name is in no other message, of which each is logged once."""

    accelerator = Accelerator(project_dir=tmp_path)
    optimizer = Own((network := nn.Linear(2, 1)).parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(network, optimizer)
    assert model is not None  # what is dropped is not saved
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if way == "prepared":
        scheduler = accelerator.prepare(scheduler)
    elif way == "registered":
        accelerator.register_for_checkpointing(scheduler)
    for _ in range(2):
        accelerator.save_state()
    assert caplog.text.count("leaves out the scheduler of the Own, which was not prepared") == (way == "left out")
