"""How samples become batches, in the reader or in loader workers: errors, kinds of batches."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from epochs import Numbers, join_own_threads
from failing import WORKERS, Failing, TwoFactsError, caught, two_facts
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from unisono import DeviceLoader, ParallelLoader


class FailingAtOnce(Failing):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def failing_collate(samples: list[int]) -> torch.Tensor:
    if 21 in samples:
        raise TwoFactsError(21, "a/path")
    return torch.tensor(samples)


def stop() -> BaseException:
    return StopIteration(21)


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


@pytest.mark.parametrize("where", BROKEN)
@pytest.mark.parametrize(("num_workers", "count"), [(0, 1), (1, 2), (2, 1), (0, 2)])
def test_an_error_comes_in_its_own_type_with_its_place_behind_the_rounds_before_it(where, num_workers, count):
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
            for _ in range(2):
                with pytest.raises(TwoFactsError, match="code 21"):
                    next(iterator)


@pytest.mark.parametrize(
    ("num_workers", "count"),
    [(0, 22), (0, 40), (1, 40), (2, 22)],
    ids=["0-in the last batch", "0-in the midst", "1-in the midst", "2-in the last batch"],
)
@pytest.mark.parametrize("where", ["dataset", "collate_fn"])
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


@WORKERS
def test_a_batch_of_tensors_arrays_and_texts_comes_out_as_it_was_made(num_workers):
    class Rich(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"t": torch.full((300,), index), "a": numpy.arange(index), "n": f"name {index}", "i": index}

    loader = DataLoader(Rich(5), batch_size=2, num_workers=num_workers, collate_fn=list)
    samples = [sample for batch in DeviceLoader(loader) for sample in batch]
    for index, sample in enumerate(samples):
        assert sample["t"].tolist() == [index] * 300
        assert sample["a"].tolist() == list(range(index))
        assert (sample["n"], sample["i"]) == (f"name {index}", index)
    assert len(samples) == 5


def test_rows_of_plain_tensors_are_those_that_torch_gives():
    data = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12))
    subset = Subset(data, [11, 3, 3, 7, 0])
    table, pairs = TensorDataset(data.tensors[0]), [(0, 1), (2, 1)]
    for dataset, sampler in ((table, pairs), (data, [-1, 5, -12]), (subset, [4, 0, 1])):
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        for mine, torchs in zip(DeviceLoader(loader), loader, strict=True):
            assert type(mine) is type(torchs)
            assert all(map(torch.equal, mine, torchs))


def test_a_loader_that_collates_by_its_own_method_is_garbage_when_it_is_dropped():
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sparse_and_nested_tensors_arrive(num_workers):
    sparse = list(DeviceLoader(DataLoader(range(12), 4, num_workers=num_workers, collate_fn=sparse_of)))
    assert sum(batch.to_dense() for batch in sparse).tolist() == [1.0] * 12
    nested = list(DeviceLoader(DataLoader(range(12), 4, num_workers=num_workers, collate_fn=nested_of)))
    expected = [[float(n)] * (n + 1) for n in range(12)]
    assert [part.tolist() for batch in nested for part in batch.unbind()] == expected
    again = list(DeviceLoader(iter(nested)))  # from a generator
    assert [part.tolist() for batch in again for part in batch.unbind()] == expected


def strided_of(samples: list[int]) -> list[torch.Tensor]:
    return [torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last) + sample for sample in samples * 20]


def test_many_tensors_keep_their_strides():
    (found,) = DeviceLoader(DataLoader(range(1), 1, num_workers=1, collate_fn=strided_of))
    assert len(found) == 20
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in found)
