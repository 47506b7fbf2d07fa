"""A validation that each rank counts by hand is told of, where the ranks have met for nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode, hearing
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unisono
from unisono import Accelerator, Accuracy, Mean, spawn

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
ADVICE = "nothing since it began: it has counted one rank's samples, not those of all ranks; count with"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(X, Y, strict=True)


Run = dict[str, Any]
Evaluate = Callable[[Run], Any]


def count(run: Run, loader: str = "tested") -> torch.Tensor:
    right = torch.zeros(())
    with torch.no_grad():
        for x, y in run[loader]:
            right += (run["model"].eval()(x).argmax(1) == y).sum()
    run["model"].train()
    return right


def mean(run: Run) -> None:
    metric = run["accelerator"].prepare(Mean())
    with torch.no_grad():
        for x, y in run["tested"]:
            metric.update(run["model"](x).square().mean(), y)
    metric.compute()


def accuracy(run: Run) -> None:
    metric = Accuracy(run["accelerator"].world)
    with torch.inference_mode():
        for x, y in run["tested"]:
            metric.update(run["model"](x), y)
    metric.compute()


def gather(run: Run) -> None:
    with torch.no_grad():
        for x, y in run["tested"]:
            run["accelerator"].gather_for_metrics((run["model"](x).argmax(1), y))


def reduce(run: Run) -> None:
    run["accelerator"].reduce(torch.tensor(int(count(run))), "sum")


def gather_counts(run: Run) -> None:
    unisono.all_gather_object(int(count(run)))


def of_two_sets(run: Run) -> None:
    run["accelerator"].reduce(count(run) + count(run, "streamed"), "sum")


def after_a_barrier(run: Run) -> None:
    right = count(run)
    run["accelerator"].wait_for_everyone()
    run["accelerator"].reduce(right, "sum")


def look_at_the_first(run: Run) -> None:
    with torch.no_grad():
        for _ in run["tested"]:
            break


def wait(run: Run) -> None:
    count(run)
    run["accelerator"].wait_for_everyone()


def save(run: Run) -> None:
    run["accelerator"].save_state(score=float(count(run)))


def count_beside_another_mean(run: Run) -> None:
    metric = run["accelerator"].prepare(Mean())
    metric.update(1.0, 4)  # in training
    count(run)
    metric.compute()


def count_stream(run: Run) -> None:
    count(run, "streamed")


def count_after_a_sum(run: Run) -> None:
    reduce(run)
    count(run)


def count_with_gradients(run: Run, loader: str = "tested") -> torch.Tensor:
    """As in a loop whose writer has forgotten `no_grad`."""
    right = torch.zeros(())
    for x, y in run[loader]:
        right += (run["model"](x).argmax(1) == y).sum()
    return right


def of_two_sets_with_gradients(run: Run) -> None:
    run["accelerator"].reduce(count_with_gradients(run) + count_with_gradients(run, "streamed"), "sum")


def accumulate(run: Run) -> None:
    """A loop that leaves gradients for a later step."""
    with run["accelerator"].no_sync(run["model"]):
        for x, _ in run["tested"]:
            run["accelerator"].backward(run["model"](x).square().mean())
    run["model"].zero_grad()


COUNTED: list[Evaluate] = [mean, accuracy, gather, reduce, gather_counts, of_two_sets, after_a_barrier]
COUNTED += [look_at_the_first, of_two_sets_with_gradients]
BY_HAND: list[Evaluate] = [count, wait, save, count_stream, count_after_a_sum, count_beside_another_mean]


def train(evaluate: Evaluate, directory: str = ".", at: str = "the end", **options: Any) -> list[str]:
    """What is said in two epochs, each with an evaluation at its end, or before the third batch is used."""
    accelerator = Accelerator(project_dir=directory, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    sets = [DataLoader(TensorDataset(X, Y), 4), DataLoader(TensorDataset(X, Y), 4), DataLoader(Stream(), 4)]
    run: Run = {"accelerator": accelerator}
    run["model"], optimizer, loader, run["tested"], run["streamed"] = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), *sets
    )
    with hearing("unisono") as said:
        for _ in range(2):
            for number, (x, y) in enumerate(loader):
                if number == 2 and at == "amid":
                    evaluate(run)
                accelerator.backward(nn.functional.cross_entropy(run["model"](x), y))
                optimizer.step()
                optimizer.zero_grad()
            if at == "the end":
                evaluate(run)
    return [each for each in said if "evaluat" in each or ADVICE in each]


@pytest.mark.parametrize("mode", [THREADS_2, PROCESSES_2], ids=str)
def test_an_evaluation_of_which_something_is_gathered_passes_in_silence(mode: Mode, tmp_path: Path) -> None:
    def body() -> list[str]:
        amid = [each for way in (mean, of_two_sets) for each in train(way, str(tmp_path), "amid")]
        return [each for way in COUNTED for each in train(way, str(tmp_path))] + amid

    assert mode.run(body) == [[], []]


@pytest.mark.parametrize(
    ("mode", "evaluate", "at"),
    [
        *((THREADS_2, way, "the end") for way in [*BY_HAND, count_with_gradients]),
        (THREADS_2, count, "amid"),
        pytest.param(PROCESSES_2, save, "the end", marks=pytest.mark.slow),
    ],
)
def test_one_that_each_rank_counts_by_hand_is_told_of_once_with_its_place(
    mode: Mode, evaluate: Evaluate, at: str, tmp_path: Path
) -> None:
    said, *others = mode.run(lambda: train(evaluate, str(tmp_path), at))
    assert len(said) == 1
    assert (
        f'the loop in count{"_with_gradients" if evaluate is count_with_gradients else ""} ("{__file__}", line '
        in said[0]
    )
    assert ADVICE in said[0]
    assert mode is THREADS_2 or others == [[]]


def test_a_loop_that_leaves_gradients_is_no_evaluation(tmp_path: Path) -> None:
    assert THREADS_2.run(lambda: train(accumulate, str(tmp_path))) == [[], []]


def test_on_one_device_nothing_is_said(tmp_path: Path) -> None:
    assert SOLO.run(lambda: train(count, str(tmp_path))) == [[]]


def evaluate_alone(index: int, returns_its_count: bool) -> float | None:
    accelerator = Accelerator()
    run = {"accelerator": accelerator}
    run["model"], run["tested"] = accelerator.prepare(nn.Linear(4, 2), DataLoader(TensorDataset(X, Y), 4))
    right = count(run)
    return float(right) if returns_its_count else None


def test_at_its_end_a_run_reports_an_evaluation_unless_counts_are_returned(capfd: Any) -> None:
    with hearing("unisono") as said:
        THREADS_2.run(lambda: evaluate_alone(0, True))
        assert said == []
        THREADS_2.run(lambda: evaluate_alone(0, False))
        assert len(said) == 1
    spawn(evaluate_alone, (True,), nprocs=2, backend="cpu")
    assert ADVICE not in capfd.readouterr().err
    spawn(evaluate_alone, (False,), nprocs=2, backend="cpu")
    assert capfd.readouterr().err.count(ADVICE) == 1
