"""Loader workers whose number is found while the loop runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from unisono import Accelerator, DeviceLoader, ParallelLoader
from unisono.loading import tuning
from unisono.loading.tuning import Tuner
from unisono.report.gathering import summarise

MS = 1_000_000


class Plain(Dataset):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Drawing(Plain):
    def __getitem__(self, index: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(torch.initial_seed())
        drawn = [random.random(), numpy.random.rand(), float(torch.rand(())), float(torch.rand((), generator=own))]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Late(Plain):
    """Draws when the first batches have not."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand(())) if index > 60 else 0.0])


class Slow(Plain):
    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(0.01)  # what a sample costs
        return super().__getitem__(index)


@pytest.fixture
def scripted(monkeypatch) -> Callable[[dict[int, int]], None]:
    """Let so many batches be followed by so many workers."""

    def script(numbers: dict[int, int]) -> None:
        seen: Iterator[int] = iter(range(1, 1000))

        def note(self: Tuner, now: int, waited: int) -> None:
            self.wanted = max(numbers.get(next(seen), self.wanted), self._fewest)

        monkeypatch.setattr(Tuner, "note", note)

    return script


def looped(loader: DeviceLoader) -> tuple[list[torch.Tensor], list[float]]:
    """The batches, and what the loop draws beside them."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    batches, drawn = [], []
    for batch in loader:
        batches.append(batch)
        drawn.append(float(torch.rand(())) + random.random() + numpy.random.rand())
    return batches, drawn


@pytest.mark.parametrize(
    ("kind", "numbers", "prefetch"),
    [
        (Drawing, {1: 2, 12: 1, 15: 3}, 8),
        (Drawing, {2: 1, 9: 0, 20: 1}, 0),
        (Late, {7: 4, 8: 1, 9: 2, 29: 3}, 8),
    ],
)
def test_batches_and_what_the_loop_draws_are_those_of_one_worker(scripted, kind, numbers, prefetch):
    def loader(workers: int, **options) -> DeviceLoader:
        data = DataLoader(kind(), batch_size=4, shuffle=True, num_workers=workers)
        return DeviceLoader(data, "cpu", seed=3, prefetch=prefetch, **options)

    expected, drawn = looped(loader(1))
    scripted(numbers)
    found, own = looped(loader(0, num_workers="auto"))
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert own == drawn


def test_a_pass_with_changing_workers_resumes_at_any_batch(scripted):
    def loader() -> DeviceLoader:
        return DeviceLoader(DataLoader(Plain(), 4, shuffle=True), "cpu", num_workers="auto")

    expected = [batch.tolist() for batch in loader()]
    scripted({3: 2, 9: 3})
    first, batches = loader(), []
    for batch in first:
        batches.append(batch.tolist())
        if len(batches) == 11:
            break
    second = loader()
    second.load_state_dict(first.state_dict())
    assert batches + [batch.tolist() for batch in second] == expected


def test_a_slow_dataset_gets_workers_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(tuning, "WINDOW_NS", 50 * MS)
    accelerator = Accelerator(cpu=True, num_workers="auto")
    loader = accelerator.prepare(DataLoader(Slow(), batch_size=2))
    for _ in loader:
        pass
    assert loader.tuner.wanted > 0
    (said,) = summarise(accelerator.world).workers[-1:]
    assert "loader worker" in said


# The decisions, by a model of a loop: a batch takes one worker `cost`, and the loop `step` milliseconds.


def settled(cost: float, step: float, cores: int = 1000, useful: int = 1000, begin: int = 0) -> Tuner:
    """The tuner after a minute of such a loop, on so many cores, of a dataset that so many workers can read at once."""
    clock, used = [0.0], [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_used_of_machine", lambda: (used[0], clock[0] * cores))
        tuner = Tuner(begin)
        while clock[0] < 60_000:
            number = min(tuner.wanted, useful)
            wait = cost if number == 0 else max(cost / min(number, cores) - step, 0)
            clock[0] += wait + step
            used[0] += cost if number else 0
            tuner.note(int(clock[0] * MS), int(wait * MS))
    return tuner


@pytest.mark.parametrize(
    ("cost", "step", "number"),
    [(0.1, 10, 0), (0.1, 1, 0), (40, 10, 4), (95, 100, 1), (500, 10, 49), (30, 0.4, 74)],
)
def test_the_fewest_workers_are_found_that_keep_waiting_within_2_percent(cost, step, number):
    assert settled(cost, step).wanted == number
    assert settled(cost, step, begin=20).wanted in (number, max(number, 1))


def test_no_more_workers_are_added_when_the_cores_are_used():
    tuner = settled(80, 10, cores=4)
    assert tuner.wanted == 4
    assert tuner.describe().endswith(
        "all cores are used; a loop that never waited for data would be 2.00 times as fast"
    )


def test_workers_that_make_nothing_faster_are_taken_away():
    tuner = settled(80, 10, useful=4)
    assert tuner.wanted == 4
    assert "more of them are not faster" in tuner.describe()


def test_a_loop_that_changes_gets_another_number():
    tuner = settled(40, 10)
    again = settled(80, 10, begin=tuner.wanted)
    assert again.wanted == 8


def test_other_values_and_several_devices_are_refused():
    data = DataLoader(Plain())
    with pytest.raises(ValueError, match=r"num_workers=2: pass 'auto', or leave it out; a number belongs to the Data"):
        DeviceLoader(data, num_workers=2)
    with pytest.raises(ValueError, match="num_workers=4: pass 'auto'"):
        Accelerator(cpu=True, num_workers=4)
    with pytest.raises(ValueError, match="for a loop over one device, and there are 2"):
        ParallelLoader(data, ["cpu:0", "cpu:1"], num_workers="auto")
