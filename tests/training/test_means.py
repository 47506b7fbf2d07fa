"""`Mean` and `Accuracy`: of all ranks' samples, each once, in every mode; and across a resume on other ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import HOST, PROCESSES_2, SOLO, THREADS_2, THREADS_3
from torch.utils.data import DataLoader, TensorDataset

from unisono import Accelerator, Accuracy, Mean
from unisono.world import solo_world, use_world

MODES = [SOLO, THREADS_2, THREADS_3, PROCESSES_2]
SCORES = torch.rand(64, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 5


def loader_of(count: int, batch: int) -> DataLoader:
    return DataLoader(TensorDataset(SCORES[:count], LABELS[:count]), batch_size=batch)


def evaluate(count: int, batch: int) -> tuple[float, float, float]:
    accelerator = Accelerator()
    loader, of_batches, of_rows, accuracy = accelerator.prepare(loader_of(count, batch), Mean(), Mean(), Accuracy())
    for scores, labels in loader:
        own = loader.valid_samples
        of_batches.update(scores[:own, 0].mean(), labels)  # NaN on a rank that only repeats samples
        of_rows.update(scores[:, 0], (scores, labels))
        accuracy.update(scores, labels)
    return of_batches.compute(), of_rows.compute(), accuracy.compute()


def expected(count: int) -> tuple[float, float, float]:
    mean = SCORES[:count, 0].double().mean().item()
    return mean, mean, (SCORES[:count].argmax(1) == LABELS[:count]).double().mean().item()


@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(1, 6), st.sampled_from(MODES[:3]))
def test_they_are_those_of_one_device_at_every_tail(count: int, batch: int, mode) -> None:
    with use_world(solo_world()):
        for found in mode.run(lambda: evaluate(count, batch)):
            assert found == pytest.approx(expected(count), abs=1e-6)


@pytest.mark.parametrize(("first", "then"), [(PROCESSES_2, THREADS_3), (THREADS_3, SOLO), (SOLO, PROCESSES_2)], ids=str)
def test_a_resumed_epoch_has_the_mean_of_all_of_its_samples(tmp_path, first, then) -> None:
    def run(batches: int, resumes: bool) -> float | None:
        accelerator = Accelerator()
        loader, mean = accelerator.prepare(loader_of(30, 2), Mean())
        if resumes:
            accelerator.load_state(tmp_path)
        for number, (scores, labels) in enumerate(loader, 1):
            mean.update(scores[:, 0], labels)
            if number == batches:
                accelerator.save_state(tmp_path)
                return None
        return mean.compute()

    first.run(lambda: run(2, False))
    assert then.run(lambda: run(0, True)) == [pytest.approx(expected(30)[0], abs=1e-6)] * then.ranks


def test_one_that_is_prepared_is_saved_once_and_until_it_is_released(tmp_path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    mean = accelerator.prepare(Mean())
    with pytest.raises(ValueError, match="the Mean at position 0 is already prepared"):
        accelerator.prepare(mean)
    accelerator.free_memory()
    other = accelerator.prepare(Mean())
    other.update(2.0, 3)
    accelerator.save_state()  # while the released one is there
    later = Accelerator(project_dir=tmp_path)
    loaded = later.prepare(Mean())
    later.load_state()
    assert loaded.compute() == 2


def test_without_a_loader_of_this_package_the_rows_count() -> None:
    with use_world(solo_world()):
        accuracy = Accuracy()
        for scores, labels in loader_of(7, 3):
            accuracy.update(scores.argmax(dim=1), labels)
        assert accuracy.compute() == pytest.approx(expected(7)[2])


def test_given_numbers_of_samples_weigh_the_values() -> None:
    mean = Mean()
    mean.update(1.0, 3)
    mean.update(torch.tensor([5.0, 7.0, 100.0]), torch.tensor(0).expand(3))
    mean.reset()
    mean.update(1.0, 3)
    mean.update(torch.tensor(float("nan")), 0)
    mean.update(5.0, 1)
    assert mean.compute() == 2.0


@pytest.mark.parametrize(
    ("values", "of", "error", "words"),
    [
        (1.0, -1, ValueError, "of=-1 is no number of samples"),
        (1.0, True, TypeError, "of=True"),
        (1.0, None, TypeError, "of=None"),
        (1.0, torch.tensor(3), TypeError, r"of=tensor\(3\)"),
        (None, 3, TypeError, "values=None"),
        (torch.ones(3, 2), torch.ones(3), ValueError, r"shape \(3, 2\) for a batch of 3 rows"),
        (torch.ones(2), torch.ones(3), ValueError, r"shape \(2,\) for a batch of 3 rows"),
        ("a", torch.ones(3), TypeError, "str"),
    ],
)
def test_what_is_no_value_of_a_batch_is_refused(values, of, error, words) -> None:
    with use_world(solo_world()), pytest.raises(error, match=words):
        Mean().update(values, of)


def test_rows_of_no_batch_are_refused_while_loaders_deliver() -> None:
    with use_world(solo_world()):
        loader, mean = Accelerator(device=HOST).prepare(loader_of(6, 3), Mean())
        for _, labels in loader:
            with pytest.raises(ValueError, match="belong to no batch of a prepared loader"):
                mean.update(1.0, labels + 1)


@pytest.mark.parametrize("values", [torch.ones(3, 1), torch.ones(3)])
def test_one_score_for_two_classes_is_no_prediction(values) -> None:
    with pytest.raises(ValueError, match=r"pass integers of shape \(rows,\): \(scores > 0\).long\(\)"):
        Accuracy().update(values, torch.ones(3))


@pytest.mark.parametrize("labels", [torch.zeros(3, 1), torch.zeros(4), 3])
def test_labels_of_another_shape_are_refused(labels) -> None:
    with pytest.raises((ValueError, TypeError), match=r"labels of shape|of=3"):
        Accuracy().update(torch.zeros(3, 2), labels)


def test_a_sum_beyond_the_integers_of_float32_is_exact() -> None:
    mean = Mean()
    for _ in range(2500):
        mean.update(torch.tensor(1.0), 40001)
    assert mean.compute() == 1.0


def test_without_a_sample_there_is_no_mean() -> None:
    for told in THREADS_2.told(lambda: Mean().compute(), ValueError):
        assert "the Mean holds no sample" in told
