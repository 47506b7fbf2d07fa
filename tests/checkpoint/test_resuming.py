"""A resumed run is the run that was never stopped: the same bits on as many ranks, each sample once on any number."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, THREADS_4, Mode, fitting
from preemptions import hits_of
from resumable import Run, assert_each_once, drawn_batch, leave_after
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, current_world, spawn
from unisono.checkpoint import saver
from unisono.checkpoint.contents import read_contents
from unisono.checkpoint.folders import folder_at
from unisono.cli.main import main
from unisono.errors import CheckpointError, CheckpointMismatchError, WorkerDiedError
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
        pytest.param(PROCESSES_2, "zero1", 3, marks=pytest.mark.slow),
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
        pytest.param(PROCESSES_2, "ddp", PROCESSES_2, "zero1", 3, marks=pytest.mark.slow),
        pytest.param(PROCESSES_4, HSDP, PROCESSES_2, "fsdp", 1, marks=pytest.mark.slow),
        pytest.param(PROCESSES_2, "zero1", PROCESSES_4, HSDP, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_another_number_of_ranks_samples_count_once_and_losses_agree(
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
    [(PROCESSES_2, "zero1"), pytest.param(PROCESSES_4, HSDP, marks=pytest.mark.slow)],
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
def test_a_worker_that_is_killed_costs_no_bit_when_the_group_is_restarted(tmp_path: Path) -> None:
    ranks = 2
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
    assert hits_of(kind, 0).total() > 0


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
    _, optimizer = accelerator.prepare(network, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if way == "prepared":
        scheduler = accelerator.prepare(scheduler)
    elif way == "registered":
        accelerator.register_for_checkpointing(scheduler)
    for _ in range(2):
        accelerator.save_state()
    assert caplog.text.count("leaves out the scheduler of the Own, which was not prepared") == (way == "left out")


def keep_all(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Any:
    return accelerator.prepare(model, optimizer)


def keep_optimizer(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Any:
    return accelerator.prepare(model, optimizer)[1]


def keep_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Any:
    _, optimizer = accelerator.prepare(model, optimizer)
    return lambda: optimizer.step()


def keep_module(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Any:
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator.unwrap_model(model), optimizer


def keep_module_alone(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Any:
    return accelerator.unwrap_model(accelerator.prepare(model))


KEPT = [keep_all, keep_optimizer, keep_step, keep_module, keep_module_alone]


@pytest.mark.parametrize("mode", [SOLO, THREADS_2, PROCESSES_2], ids=str)
def test_a_model_is_saved_as_long_as_it_or_its_optimizer_lives(mode: Mode, tmp_path: Path) -> None:
    def body() -> None:
        for number, keep in enumerate(KEPT):
            accelerator, model, directory = Accelerator(), nn.Linear(2, 4), tmp_path / str(number)
            kept = keep(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
            seen: list[int] = []
            accelerator.register_save_state_pre_hook(lambda models, *_, seen=seen: seen.append(len(models)))
            saved = model.weight.detach().clone()
            accelerator.save_state(directory)
            with torch.no_grad():
                model.weight.add_(1)
            accelerator.load_state(directory)
            assert seen == [1], keep
            torch.testing.assert_close(model.weight.detach(), saved, **EXACTLY)
            del kept

    mode.run(body)


@pytest.mark.parametrize("mode", [SOLO, PROCESSES_2], ids=str)
def test_a_checkpoint_without_the_models_that_were_prepared_is_an_error(mode: Mode, tmp_path: Path) -> None:
    def train(accelerator: Accelerator) -> None:
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    def body() -> None:
        accelerator, counter = Accelerator(), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        with pytest.raises(CheckpointError, match="save nothing: nothing is prepared"):
            accelerator.save_state(tmp_path / "saved")
        train(accelerator)
        accelerator.register_for_checkpointing(counter)
        with pytest.raises(CheckpointError, match="no model: those that were prepared are gone; keep what prepare"):
            accelerator.save_state(tmp_path / "saved")
        accelerator.free_memory()
        accelerator.save_state(tmp_path / "saved")

    mode.run(body)


@pytest.mark.parametrize("mode", [SOLO, PROCESSES_2], ids=str)
def test_a_run_that_takes_nothing_of_a_checkpoint_has_not_resumed(mode: Mode, tmp_path: Path, capfd: Any) -> None:
    def save() -> None:
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.save_state(tmp_path / "saved")
        del model

    def body() -> None:
        accelerator = Accelerator()
        with pytest.raises(CheckpointMismatchError, match="holds model_0, and nothing here takes it; prepare or regis"):
            accelerator.load_state(tmp_path / "saved")
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.load_state(tmp_path / "saved")
        more = accelerator.prepare(nn.Linear(1, 1))
        with pytest.raises(CheckpointMismatchError, match="has no model_1: it holds model_0"):
            accelerator.load_state(tmp_path / "saved")
        del model, more

    mode.run(save)
    mode.run(body)
    assert capfd.readouterr().err.count("resumed from") == 1


def test_an_open_loops_loader_is_saved_but_not_an_earlier_folds_model(tmp_path: Path) -> None:
    def body() -> list[str]:
        accelerator, data = Accelerator(), TensorDataset(torch.arange(8.0).reshape(8, 1))
        for _ in range(3):
            model = nn.Linear(1, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for (batch,) in accelerator.prepare(DataLoader(data, batch_size=2)):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                break_at = accelerator.save_state(tmp_path / "saved")
        return list(read_contents(folder_at(break_at)).kinds)

    for mode in (SOLO, THREADS_2, PROCESSES_2):
        assert mode.run(body) == [["model_0", "optimizer_0", "loader_0"]] * mode.ranks


def test_reading_a_local_checkpoint_makes_no_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path, after=leave_after(1))()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert read_contents(folder_at(tmp_path / "checkpoints")).manifest.step == 1
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
