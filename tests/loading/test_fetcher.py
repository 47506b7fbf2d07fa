"""How samples become batches, in the reader or in loader workers: errors, kinds of batches."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from epochs import Numbers, join_own_threads
from failing import WORKERS, Failing, TwoFactsError, caught, two_facts
from modes import SOLO, THREADS_2
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from unisono import Accelerator, DeviceLoader, ParallelLoader


class FailingAtOnce(Failing):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def failing_collate(samples: list[int]) -> torch.Tensor:
    if 21 in samples:
        raise TwoFactsError(21, "a/path")
    return torch.tensor(samples)


def stop() -> BaseException:
    return StopIteration(21)


class Picky(Dataset[int]):
    """Numbers, some of which cannot be read."""

    def __init__(self, count: int, bad: Any) -> None:
        self._count, self._bad = count, set(bad)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if index in self._bad:
            raise KeyError(index)
        return index


BROKEN: dict[str, tuple[Callable[..., DataLoader], str, str]] = {
    "dataset": (
        lambda **options: DataLoader(Failing(40, 21, two_facts), batch_size=2, **options),
        "in the sample with index 21",
        "raise self.make()",
    ),
    "dataset that fetches many": (
        lambda **options: DataLoader(FailingAtOnce(40, 21, two_facts), batch_size=2, **options),
        "while the samples with indices 20, 21 were fetched",
        "raise self.make()",
    ),
    "collate_fn": (
        lambda **options: DataLoader(Numbers(40), batch_size=2, collate_fn=failing_collate, **options),
        "while the samples with indices 20, 21 were collated",
        'raise TwoFactsError(21, "a/path")',
    ),
}


@pytest.mark.parametrize(
    ("where", "num_workers", "count"),
    [
        ("dataset", 0, 1),
        ("dataset", 1, 2),
        ("dataset that fetches many", 2, 1),
        ("collate_fn", 0, 2),
        ("collate_fn", 2, 1),
    ],
)
def test_an_error_keeps_its_type_and_place_and_follows_the_earlier_rounds(where, num_workers, count):
    make, note, line = BROKEN[where]
    devices = [f"cpu:{index}" for index in range(count)]
    with ParallelLoader(make(num_workers=num_workers), devices) as parallel:
        for iterator in [parallel.per_device_loader(device) for device in devices]:
            shown = ""
            try:
                delivered = sum(1 for _ in zip(range(10 // count), iterator, strict=False))
                next(iterator)
            except TwoFactsError as error:
                shown = "".join(traceback.format_exception(error))
                facts = error.code, error.path, str(error)
            assert delivered == 10 // count
            assert facts == (21, "a/path", "code 21 at a/path")
            assert note in shown
            assert line in shown
            assert f"in round {10 // count} of the loader" in shown
            if count == 1:
                assert [each.tolist() for each in iterator] == [[start, start + 1] for start in range(22, 40, 2)]
                continue
            assert "this ends the loop: only on one rank, over a map-style dataset, can a loop go on after it" in shown
            for _ in range(2):
                with pytest.raises(RuntimeError, match="the loop has ended with TwoFactsError: code 21 at a/path; "):
                    next(iterator)


@pytest.mark.parametrize(  # in the last batch, and in the midst
    ("num_workers", "count", "where"),
    [(0, 22, "dataset"), (0, 40, "collate_fn"), (1, 40, "dataset"), (2, 22, "collate_fn")],
)
def test_a_stop_iteration_is_an_error_and_no_end(num_workers, count, where):
    def collate(samples: list[int]) -> list[int]:
        return next(iter([])) if 21 in samples else samples

    dataset = Failing(count, 21, stop) if where == "dataset" else Numbers(count)
    options = {"collate_fn": collate} if where == "collate_fn" else {}
    loader = DataLoader(dataset, batch_size=3, num_workers=num_workers, **options)
    found, error = caught(iter(DeviceLoader(loader)))
    assert (found, type(error)) == (7, RuntimeError)
    assert "the dataset or collate_fn raised StopIteration, which does not mark the end of the data" in str(error)
    shown = "".join(traceback.format_exception(error))
    assert ("raise self.make()" if where == "dataset" else "next(iter([]))") in shown


class Dropping(Picky):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index for index in indices if index not in self._bad]


@pytest.mark.parametrize("mode", [SOLO, THREADS_2], ids=str)
def test_a_dataset_returning_too_few_samples_is_told_to_use_a_collate_fn(mode: Any) -> None:
    def body() -> list[int]:
        with pytest.raises(ValueError, match=r"__getitems__ returned \d samples for \d indices .*in a collate_fn"):
            list(DeviceLoader(DataLoader(Dropping(12, [5, 7]), 4), split="global"))
        loader = DeviceLoader(DataLoader(Dropping(12, [5, 7]), 4, collate_fn=torch.tensor), split="global")
        return [sample for batch in loader for sample in batch[: loader.valid_samples].tolist()]

    found = [sample for each in mode.run(body) for sample in each]
    assert sorted(found) == [each for each in range(12) if each not in (5, 7)]


@WORKERS
def test_a_batch_may_be_anything(num_workers):
    kinds = [None, 0, "", [], (), {}, False, "text", b"bytes", 1.5]
    batches = [batch for batch in kinds for _ in range(3)]
    expected = list(map(repr, batches))  # 0 == False
    numbers = Numbers(2 * len(batches))
    loader = DataLoader(numbers, 2, num_workers=num_workers, collate_fn=lambda samples: batches[samples[0] // 2])
    assert list(map(repr, DeviceLoader(loader))) == expected
    items = DataLoader(batches, batch_size=None, num_workers=num_workers, collate_fn=lambda item: item)
    assert list(map(repr, DeviceLoader(items))) == expected


def test_rows_of_plain_tensors_are_those_that_torch_gives():
    data = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12))
    subset = Subset(data, [11, 3, 3, 7, 0])
    table, pairs = TensorDataset(data.tensors[0]), [(0, 1), (2, 1)]
    for dataset, sampler in ((table, pairs), (data, [-1, 5, -12]), (subset, [4, 0, 1])):
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        for mine, torchs in zip(DeviceLoader(loader), loader, strict=True):
            assert type(mine) is type(torchs)
            assert all(map(torch.equal, mine, torchs))


def test_a_dropped_loader_with_its_own_collate_method_is_freed():
    class Own(DataLoader):
        def __init__(self, dataset: Dataset) -> None:
            super().__init__(dataset, batch_size=2, collate_fn=self.collate)

        def collate(self, samples: list[int]) -> list[int]:
            return samples

    loader = Own(Numbers(6))
    assert list(DeviceLoader(loader)) == [[0, 1], [2, 3], [4, 5]]
    gone = weakref.ref(loader.dataset)
    del loader
    join_own_threads()
    gc.collect()
    assert gone() is None


def sparse_of(samples: list[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor([samples], torch.ones(len(samples)), (12,))


def nested_of(samples: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((sample + 1,), float(sample)) for sample in samples])


def strided_of(samples: list[int]) -> list[torch.Tensor]:
    return [torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last) + sample for sample in samples * 20]


@WORKERS
def test_sparse_nested_and_strided_tensors_arrive(num_workers):
    (found,) = DeviceLoader(DataLoader(range(1), 1, num_workers=num_workers, collate_fn=strided_of))
    assert [each.is_contiguous(memory_format=torch.channels_last) for each in found] == [True] * 20
    sparse = list(DeviceLoader(DataLoader(range(12), 4, num_workers=num_workers, collate_fn=sparse_of)))
    assert sum(batch.to_dense() for batch in sparse).tolist() == [1.0] * 12
    nested = list(DeviceLoader(DataLoader(range(12), 4, num_workers=num_workers, collate_fn=nested_of)))
    expected = [[float(n)] * (n + 1) for n in range(12)]
    assert [part.tolist() for batch in nested for part in batch.unbind()] == expected
    again = list(DeviceLoader(iter(nested)))  # from a generator
    assert [part.tolist() for batch in again for part in batch.unbind()] == expected


def taken(iterator: Iterator[Any], most: int = 100) -> tuple[list[Any], list[str], list[int]]:
    """The batches of a loop that catches errors and goes on, the errors, and after how many batches they came."""
    found: list[Any] = []
    errors: list[str] = []
    places: list[int] = []
    for _ in range(most):
        try:
            found.append(next(iterator))
        except StopIteration:
            return found, errors, places
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            places.append(len(found))
    raise AssertionError(f"the loop does not end: {errors[:3]}")


PERSISTENT = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize(
    ("where", "options"),
    [
        *((each, {}) for each in [*BROKEN, "the first", "the last", "all"]),
        ("collate_fn", {"num_workers": 2}),
        ("all", {"num_workers": 2}),
        ("dataset", PERSISTENT),
        ("the last", PERSISTENT),
    ],
    ids=str,
)
def test_on_one_rank_a_loop_skips_a_batch_that_fails_as_torchs_does(where: str, options: dict[str, Any]) -> None:
    def make(**more: Any) -> DataLoader[Any]:
        if where in BROKEN:
            return BROKEN[where][0](**{**options, **more})
        bad = {"the first": [0], "the last": [19], "all": range(20)}[where]
        return DataLoader(Picky(20, bad), batch_size=4, **{**options, **more})

    # Workers of torch's own that persist take seconds to end, once an error has made garbage of them.
    found, errors, places = taken(iter(make(**{name: False for name in options if name == "persistent_workers"})))
    expected = len(found), len(errors), places
    for prefetch in (8, 0):
        loader = DeviceLoader(make(), prefetch=prefetch)
        for _ in range(2):  # and the next epoch begins as after any other one
            found, errors, places = taken(iter(loader))
            assert (len(found), len(errors), places) == expected
            assert loader.state_dict()["offset"] == 0


def test_what_is_skipped_is_behind_the_state_once_a_later_batch_has_come() -> None:
    loader = DeviceLoader(DataLoader(Picky(20, [5]), batch_size=4))
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        next(iterator)
    assert loader.state_dict()["offset"] == 4  # a run that ends here has not lost it
    next(iterator)
    assert loader.state_dict()["offset"] == 12


def test_skipping_a_batch_ends_an_accumulation_only_if_it_was_the_last() -> None:
    for bad, steps in ([5], 2), ([19], 2), ([0, 19], 2), ([0, 5, 9], 1):
        accelerator, model = Accelerator(gradient_accumulation_steps=2), nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Picky(20, bad), batch_size=4)
        )
        iterator, taken_steps = iter(loader), 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except KeyError:
                continue
            model(batch.float().reshape(-1, 1)).mean().backward()
            optimizer.step()
            taken_steps += accelerator.sync_gradients
            optimizer.zero_grad()
        assert taken_steps == steps, bad
