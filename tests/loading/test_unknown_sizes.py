"""Batches that do not say how many samples they hold: each counts the same, none is cut, and metrics ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from modes import SOLO, THREADS_2, THREADS_3, Mode
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from unisono import Accelerator, DeviceLoader
from unisono.loading.sharding import Part, Size, deal, measure


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


def streamed(form: Any) -> Any:
    return DataLoader(Stream(form), None)


@pytest.mark.parametrize(
    ("form", "mode", "source"),
    [*((form, THREADS_3, batches) for form in FORMS), (as_object, SOLO, batches), (as_sequence, SOLO, streamed)],
)
def test_each_is_given_whole_once_and_nobody_knows_how_many_samples_count(form: Any, mode: Mode, source: Any) -> None:
    def body() -> tuple[list[Any], set[str], list[Any]]:
        accelerator, loader, found, told, gathered = Accelerator(), DeviceLoader(source(form)), [], set(), []
        with torch.no_grad():
            for batch in loader:
                rows, valid = rows_of(batch).clone(), loader.valid_samples
                found.append((rows.tolist(), valid, loader.weight))
                try:
                    accelerator.gather_for_metrics(rows, valid or None)
                except ValueError as error:
                    told.add(str(error))
                count = 0 if valid == 0 else len(rows)
                gathered += accelerator.gather_for_metrics(rows, valid_samples=count).tolist()
        return found, told, gathered

    ranks = mode.run(body)
    found = list(zip(*[each for each, *_ in ranks], strict=True))
    assert [rows for each in found for rows, valid, _ in each if valid != 0] == plain_rows(form)
    assert {valid for each in found for _, valid, _ in each} <= {None, 0}
    for each in found:
        counting = [weight for _, valid, weight in each if valid is None]
        assert counting == [1 / len(counting)] * len(counting), "each counts the same"
        assert sum(weight for *_, weight in each) == 1
    for _, told, gathered in ranks:
        assert all("do not say how many samples they hold" in each and "pass valid_samples" in each for each in told)
        assert bool(told) == (mode.ranks > 1)  # on one device every row counts
        assert gathered == [row for rows in plain_rows(form) for row in rows]


FIXED = {"fixed_batch_size": True}


@pytest.mark.parametrize(
    ("form", "mode", "source", "options"),
    [
        (as_object, SOLO, batches, FIXED),
        (as_dicts, THREADS_2, batches, FIXED),
        (as_sequence, THREADS_2, streamed, {}),
        (as_samples, THREADS_2, streamed, {}),
    ],
)
def test_a_fixed_size_and_a_stream_of_several_ranks_refuse_them(form, mode, source, options) -> None:
    def body() -> str:
        with pytest.raises(ValueError, match="does not say how many samples it holds") as caught:
            list(DeviceLoader(source(form), **options))
        return str(caught.value)

    words = f"a batch of class {type(form(torch.zeros(4, 3))).__name__} does not say how many samples"
    assert all(words in error for error in mode.run(body))


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_the_gradient_of_a_step_is_the_mean_over_its_batches(mode: Mode) -> None:
    """The plain twin: the mean loss of each batch, averaged over the batches of a round, whatever they hold."""

    def body() -> list[list[float]]:
        accelerator, network = Accelerator(gradient_accumulation_steps=1), nn.Linear(3, 1, bias=False).double()
        network, optimizer, loader = accelerator.prepare(
            network, torch.optim.SGD(network.parameters(), lr=0.0), DeviceLoader(batches(as_dicts))
        )
        found = []
        for batch in loader:
            accelerator.backward(network(rows_of(batch).double()).mean())
            found.append(network.weight.grad.flatten().tolist())
            optimizer.step()
            optimizer.zero_grad()
        return found

    means = [rows_of(batch).double().mean(0) for batch in batches(as_dicts)]
    rounds = [means[start : start + mode.ranks] for start in range(0, len(means), mode.ranks)]
    expected = [torch.stack(each).mean(0) for each in rounds]
    for found in mode.run(body):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), torch.stack(expected))


def test_two_views_of_a_batch_whose_size_is_known_are_still_cut() -> None:
    views = [{"x": torch.arange(4.0)}, {"x": -torch.arange(4.0)}]
    assert measure(views, 0, known=4) == Size(4, can_be_cut=True)
    assert measure(views, 0) == Size(1, False, "list")
    assert measure(tuple(views), 0) == Size(4, can_be_cut=True), "a list is what comes where nothing collates"
    assert measure([{"x": torch.zeros(2)}, {"x": torch.zeros(2)}], 0).samples == 2, "either way"
    assert measure([{"x": torch.zeros(4)}, {"y": torch.zeros(4)}], 0) == Size(4, can_be_cut=True)


def test_beside_a_batch_that_does_not_tell_all_count_as_one() -> None:
    told, unsized = Size(4), Size(1, False, "Scene")
    first, second = deal([told, unsized], 2)
    assert (first, second) == (Part(0, 0, 4, 1, 2, is_sized=False), Part(1, 0, 1, 1, 2, is_sized=False))
    assert [part.samples for part in deal([unsized, told], 5)] == [1, 0, 0, 1, 0]
    assert [part.repeated for part in deal([unsized, told], 5)] == [0, 1, 1, 0, 4]


class Samples(Dataset):
    """Each of four features, with a label."""

    def __init__(self, labels: list[Any]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)), self.labels[index]


class Streamed(Samples, IterableDataset):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


@pytest.mark.parametrize("kind", [Samples, Streamed])
@pytest.mark.parametrize("labels", [range(5), torch.arange(5), "abcde"], ids=["number", "tensor", "text"])
def test_single_samples_of_a_loader_without_batches_stay_whole(kind: Any, labels: Any) -> None:
    def body() -> list[Any]:
        loader = DeviceLoader(DataLoader(kind(list(labels)), batch_size=None))
        return [(features.tolist(), label, loader.valid_samples > 0) for features, label in loader]

    found = [each for rank in THREADS_2.run(body) for each in rank]
    assert all(features == [float(list(labels).index(label))] * 4 for features, label, _ in found)
    assert sorted(features[0] for features, _, counts in found if counts) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_dividing_batches_that_cannot_be_cut_is_said_to_speed_up_nothing(caplog: Any) -> None:
    samples = DataLoader(Samples([*range(3)]), batch_size=None)
    THREADS_2.run(lambda: [len([*DeviceLoader(samples, split=split)]) for split in ("global", "rank")])
    assert [each.getMessage().partition(" (")[0] for each in caplog.records] == ["split='global'"]
