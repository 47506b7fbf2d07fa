"""Batches that do not say how many samples they hold: one device takes them whole, several refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from modes import PROCESSES_2, SOLO, THREADS_2, Mode
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from unisono import Accelerator, DeviceLoader, ParallelLoader
from unisono.loaders.sharding import Size, measure


class Scene:
    """What a user's own collate_fn may give."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


@dataclass
class Sample:
    features: torch.Tensor


def as_object(rows: torch.Tensor) -> Any:
    return Scene(rows)


def as_sequence(rows: torch.Tensor) -> Any:
    return pack_sequence([row[: place % 2 + 1] for place, row in enumerate(rows)], enforce_sorted=False)


def as_dicts(rows: torch.Tensor) -> Any:
    return [{"features": row, "name": "a"} for row in rows]


def as_dicts_of_many_sizes(rows: torch.Tensor) -> Any:
    return [{"features": row, "boxes": torch.zeros(place, 4)} for place, row in enumerate(rows)]


def as_samples(rows: torch.Tensor) -> Any:
    return [Sample(row) for row in rows]


FORMS = [as_object, as_sequence, as_dicts, as_dicts_of_many_sizes, as_samples]
SIZES = [5, 4, 2, 4, 7]  # none of them 3, the number of features


def rows_of(batch: Any) -> torch.Tensor:
    if isinstance(batch, Scene):
        return batch.rows
    if isinstance(batch, list):
        return torch.stack([each.features if isinstance(each, Sample) else each["features"] for each in batch])
    return batch.data[:, None].expand(-1, 3)


def batches(form: Any) -> list[Any]:
    numbers = torch.arange(float(sum(SIZES)) * 3).reshape(-1, 3)
    return [form(rows) for rows in numbers.split(SIZES)]


def plain_rows(form: Any) -> list[list[list[float]]]:
    return [rows_of(batch).tolist() for batch in batches(form)]


class Stream(IterableDataset):
    """Each item is a batch."""

    def __init__(self, form: Any) -> None:
        self.form = form

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(self.form))


SOURCES = [batches, lambda form: DataLoader(Stream(form), None)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", SOURCES, ids=["list", "stream"])
def test_on_one_device_each_is_given_whole_and_nobody_knows_how_many_samples_count(form: Any, source: Any) -> None:
    accelerator, loader = Accelerator(), DeviceLoader(source(form))
    found = []
    with torch.no_grad():
        for batch in loader:
            found.append((rows_of(batch).tolist(), loader.valid_samples, loader.weight))
            rows = rows_of(batch).clone()
            assert torch.equal(accelerator.gather_for_metrics(rows), rows), "on one device every row counts"
    assert found == [(rows, None, 1.0) for rows in plain_rows(form)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mode", "options"), [(THREADS_2, {}), (PROCESSES_2, {}), (SOLO, {"fixed_batch_size": True})], ids=str
)
@pytest.mark.parametrize("source", SOURCES, ids=["list", "stream"])
def test_several_ranks_and_a_fixed_size_refuse_them(form: Any, mode: Mode, options: Any, source: Any) -> None:
    def body() -> str:
        with pytest.raises(ValueError, match="does not say how many samples it holds") as caught:
            list(DeviceLoader(source(form), **options))
        return str(caught.value)

    words = f"a batch of class {type(form(torch.zeros(4, 3))).__name__} does not say how many samples"
    assert all(words in error for error in mode.run(body))


def test_several_devices_of_one_process_refuse_them() -> None:
    with ParallelLoader(batches(as_dicts), ["cpu:0", "cpu:1"]) as loader:
        for device in loader.devices:
            with pytest.raises(ValueError, match="a batch of class list does not say"):
                next(loader.per_device_loader(device))


def test_two_views_of_a_batch_whose_size_is_known_are_still_cut() -> None:
    views = [{"x": torch.arange(4.0)}, {"x": -torch.arange(4.0)}]
    assert measure(views, 0, known=4) == Size(4, can_be_cut=True)
    assert measure(views, 0) == Size(1, False, "list")
    assert measure(tuple(views), 0) == Size(4, can_be_cut=True), "a list is what comes where nothing collates"
    assert measure([{"x": torch.zeros(2)}, {"x": torch.zeros(2)}], 0).samples == 2, "either way"
    assert measure([{"x": torch.zeros(4)}, {"y": torch.zeros(4)}], 0) == Size(4, can_be_cut=True)


@pytest.mark.parametrize("form", [as_object, as_dicts])
def test_a_loop_continues_behind_batches_that_do_not_tell(form: Any) -> None:
    loader = DeviceLoader(batches(form))
    for number, _ in enumerate(loader, 1):
        if number == 2:
            break
    later = DeviceLoader(batches(form))
    later.load_state_dict(loader.state_dict())
    assert [rows_of(batch).tolist() for batch in later] == plain_rows(form)[2:]
