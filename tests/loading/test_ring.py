"""Small batches of loader workers go through memory that is used again, and stay what they were."""

from __future__ import annotations

import gc
import os
import pickle
from multiprocessing import resource_sharer
from typing import Any

import pytest
import torch
from epochs import Numbers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono import DeviceLoader
from unisono.errors import UnpicklableError
from unisono.loading import packing
from unisono.loading.packing import Packed

BATCHES = 40


class Filled(Numbers):
    """Sample i is `size(i)` times i."""

    def __init__(self, count: int, size: Any = lambda index: 100) -> None:
        super().__init__(count)
        self._size = size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self._size(index),), index)


def is_filled(batches: list[torch.Tensor], size: Any = lambda index: 100) -> bool:
    return all(batch.tolist() == [[index] * size(index)] for index, batch in enumerate(batches))


@pytest.mark.parametrize("options", [{"prefetch_factor": 1}, {"persistent_workers": True}], ids=str)
def test_batches_that_are_kept_stay_what_they_were(options):
    loader = DeviceLoader(DataLoader(Filled(BATCHES), num_workers=2, **options))
    kept = [list(loader) for _ in range(2)]
    assert all(map(is_filled, kept))


def test_views_and_pickled_copies_of_a_batch_outlive_it():
    loader = DeviceLoader(DataLoader(Filled(BATCHES), num_workers=2))
    views, copies = zip(*[(batch[0, 50:], pickle.dumps(batch)) for batch in loader], strict=True)
    assert all(view.tolist() == [index] * 50 for index, view in enumerate(views))
    assert is_filled([pickle.loads(each) for each in copies])


def test_a_batch_that_is_written_to_does_not_change_another():
    for index, batch in enumerate(DeviceLoader(DataLoader(Filled(BATCHES), num_workers=1))):
        assert batch.tolist() == [[index] * 100]
        batch.fill_(-1)


def test_batches_of_any_sizes_arrive_in_turn():
    def size(index: int) -> int:
        return [1, 3000, 0, 33_000, 7, 60_000, 31_000][index % 7]  # of 8 bytes; some are not small

    loader = DeviceLoader(DataLoader(Filled(BATCHES, size), num_workers=2))
    assert is_filled(list(loader), size)


def mixture(samples: list[torch.Tensor]) -> Any:
    index = int(samples[0][0])
    shared = torch.full((2, 3), index, dtype=torch.bfloat16)
    odd = {"one": torch.tensor(index), "mask": torch.ones(3, dtype=torch.bool), "none": torch.empty(0, 4)}
    turned = torch.arange(6).view(2, 3).t() + index
    many = [torch.tensor([index + place], dtype=torch.int16) for place in range(30 * (index % 2))]
    return {
        **odd,
        "shared": [shared, shared],
        "turned": turned,
        "many": many,
        "text": "a",
        "weight": torch.nn.Parameter(shared),
    }


def test_what_a_batch_consists_of_arrives_as_it_is():
    kept = list(DeviceLoader(DataLoader(Filled(BATCHES), num_workers=2, collate_fn=mixture)))
    for index, batch in enumerate(kept):
        expected = mixture([torch.tensor([index])])
        assert batch["shared"][0] is batch["shared"][1]
        for name in ("one", "mask", "none", "turned", "weight"):
            torch.testing.assert_close(batch[name], expected[name], rtol=0, atol=0)
        assert [*map(int, batch["many"])] == [*map(int, expected["many"])]
        assert all(each.data_ptr() % 64 == 0 for each in batch["shared"])


def test_small_batches_that_are_kept_need_no_open_files():
    iterator = iter(DeviceLoader(DataLoader(Filled(2 * BATCHES), num_workers=1)))
    kept = [next(iterator) for _ in range(10)]
    before = len(os.listdir("/proc/self/fd"))
    kept += iterator
    assert len(kept) == 2 * BATCHES
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_memory_is_given_back_with_the_workers():
    gc.collect()
    before = set(packing._rings)
    loader = DeviceLoader(DataLoader(Filled(BATCHES), num_workers=2))
    for _ in range(3):
        iterator = iter(loader)
        next(iterator)
        assert set(packing._rings) > before
        iterator.close()
        del iterator
    assert is_filled(list(loader))
    del loader
    gc.collect()
    assert set(packing._rings) <= before


@pytest.fixture
def own_ring():
    packing.use_ring(3)
    yield
    packing.use_ring(0)
    resource_sharer.stop()  # the thread that hands descriptors over


def sent(value: Any) -> Any:
    """What arrives of a batch."""
    return pickle.loads(pickle.dumps(Packed(value))).unwrap()


def fails_once(monkeypatch, name: str, error: Exception) -> None:
    original, left = getattr(packing, name), [error]
    monkeypatch.setattr(packing, name, lambda *args: original(*args) if not left else raise_it(left.pop()))


def raise_it(error: Exception) -> None:
    raise error


def test_what_fails_once_loses_no_later_batch(own_ring, monkeypatch):
    batches = [torch.full((size,), size) for size in (10, 20, 300, 20, 30, 2000, 40)]
    for place in (0, 2, 5):  # the first of all, and those for which the ring grows
        packing.use_ring(3)
        for index, batch in enumerate(batches):
            if index == place:
                fails_once(monkeypatch, "_shared", RuntimeError("unable to allocate shared memory"))
            assert sent(batch).equal(batch)
    packing.use_ring(3)
    fails_once(monkeypatch, "_tensor_in", RuntimeError("of a copy"))
    with pytest.raises(UnpicklableError, match="of a copy"):
        sent(batches[0])
    assert all(sent(batch).equal(batch) for batch in batches)


def test_a_ring_takes_a_small_part_of_shared_memory_or_none(own_ring, monkeypatch):
    batch = torch.arange(30_000, dtype=torch.uint8)
    for free, size, is_used in ((1 << 34, 1 << 34, True), (1 << 20, 1 << 34, False), (1 << 26, 1 << 26, False)):
        monkeypatch.setattr(packing, "_free_and_size", lambda found=(free, size): found)
        packing.use_ring(3)
        assert sent(batch).equal(batch)
        assert bool(packing._rings) is is_used
    monkeypatch.setattr(packing, "_free_and_size", lambda: (1 << 34, 1 << 34))
    packing.use_ring(1000)
    assert sent(batch).equal(batch)
    assert not packing._rings, "more than 16 MiB"


class Uneven(IterableDataset):
    """The first of its workers has all samples: it is asked for as many at once as all together."""

    def __iter__(self):
        info = get_worker_info()
        return iter([torch.full((100,), index) for index in range(BATCHES if info.id == 0 else 0)])


def test_a_stream_of_which_one_worker_has_all_arrives():
    kept = list(DeviceLoader(DataLoader(Uneven(), batch_size=1, num_workers=4, prefetch_factor=4)))
    assert is_filled(kept)
