"""Batches ready on the device: who gets which, when, and what a loader takes."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from epochs import Numbers, join_own_threads, own_threads
from hypothesis import given
from hypothesis import strategies as st
from loops import Paced, Stream, worlds
from modes import FAMILY, devices, in_main_memory
from torch.utils.data import DataLoader

from unisono import DeviceLoader, ParallelLoader
from unisono.devices import available_devices, get_backend
from unisono.tree import take

MOST = 4 if FAMILY == "cpu" else get_backend(FAMILY).device_count()


def rounds_of(loader: Any, count: int, **options: Any) -> list[list[tuple[Any, int]]]:
    """Each device's (batch, valid_samples), the devices drained one after another; in main memory."""
    fetched = (lambda batch: batch) if FAMILY == "cpu" else in_main_memory
    with ParallelLoader(loader, devices(count), **options) as parallel:
        iterators = [parallel.per_device_loader(device) for device in devices(count)]
        return [[(fetched(batch), iterator.valid_samples) for batch in iterator] for iterator in iterators]


def batches_of(loader: Any, count: int, **options: Any) -> list[list[Any]]:
    return [[batch for batch, _ in each] for each in rounds_of(loader, count, **options)]


@pytest.mark.any_family
@given(sizes=st.lists(st.integers(1, 5), max_size=12), count=st.integers(1, MOST), dim=st.sampled_from([0, 1, -1]))
def test_the_tail_is_split_and_nothing_is_lost(sizes, count, dim):
    def batch(start: int, stop: int) -> torch.Tensor:
        row = torch.arange(start, stop)
        return row if dim == 0 else row.expand(3, -1)

    bounds = list(itertools.accumulate(sizes, initial=0))
    batches = [batch(*pair) for pair in itertools.pairwise(bounds)]
    delivered = rounds_of(batches, count, batch_dim=dim)
    assert {len(each) for each in delivered} == {-(-len(sizes) // count)}
    in_order = [take(batch, slice(valid), dim) for round_ in zip(*delivered, strict=True) for batch, valid in round_]
    found = torch.cat(in_order, dim) if in_order else batch(0, 0)
    assert torch.equal(found, batch(0, sum(sizes)))


def test_a_batch_may_be_anything():
    for batch in (None, 0, "", [], (), {}, False, "text", 3.5, b"bytes"):
        assert rounds_of([batch] * 3, 2) == [[(batch, None)] * 2, [(batch, None), (batch, 0)]]


def test_an_uncuttable_tail_goes_whole_to_one_device_and_others_repeat_it():
    boxes = (torch.arange(2), [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.ones(2, 4)}])
    assert [[samples for _, samples in lane] for lane in rounds_of([boxes], 3)] == [[2], [0], [0]]
    assert all(lane[0][0] is boxes for lane in rounds_of([boxes], 3))


def test_any_iterable_is_a_loader():
    four = [1, 2, 3, 4]
    unbatched = DataLoader(Numbers(5), batch_size=None, sampler=four)
    stream = DataLoader(Stream(5), batch_size=None, collate_fn=lambda n: n or 4)
    for source in (four, (1, 2, 3, 4), iter(four), dict.fromkeys(four).keys(), unbatched, stream):
        found = batches_of(source, 2)
        assert sorted(itertools.chain(*found))[:4] == four, source
        assert len(found[0]) == len(found[1])


def test_an_empty_loader_gives_every_device_nothing():
    for loader in ([], iter([]), DataLoader([]), DataLoader(Stream(0))):
        assert batches_of(loader, 3) == [[]] * 3


def test_the_length_is_the_number_of_rounds():
    for batches, count in ((0, 1), (1, 3), (4, 2), (6, 3)):
        parallel = ParallelLoader([0] * batches, devices(count))
        assert len(parallel) == len(parallel.per_device_loader("cpu:1" if count > 1 else "cpu")) == -(-batches // count)
        assert len(list(parallel.per_device_loader("cpu:0"))) == len(parallel)


def test_a_loader_without_length_is_iterated_and_lives_with_its_iterator():
    parallel = ParallelLoader(iter(range(50)), ["cpu"])
    iterator = parallel.per_device_loader("cpu")
    for each in (parallel, iterator, DeviceLoader(iter([]))):
        with pytest.raises(TypeError, match="has no len"):
            len(each)
    del parallel, each
    gc.collect()
    assert list(iterator) == list(range(50))


def epoch_of(batches: list[list[torch.Tensor]]) -> list[int]:
    return torch.cat([batch for round_ in zip(*batches, strict=True) for batch in round_]).tolist()


def test_passes_of_a_parallel_loader_are_the_epochs_of_a_device_loader():
    def source() -> DataLoader:
        return DataLoader(Numbers(20), batch_size=2, shuffle=True)

    parallel = ParallelLoader(source(), devices(2))
    passes = [parallel, parallel.again(), parallel.again()]
    found = [epoch_of([list(each.per_device_loader(device)) for device in devices(2)]) for each in passes]
    loader = DeviceLoader(source())
    assert found == [epoch_of([list(loader)]) for _ in range(3)]
    assert len({tuple(order) for order in found}) == 3


@pytest.mark.parametrize("count", [1, 3])
def test_a_source_that_waits_for_the_round_before_to_be_consumed_goes_on(count):
    source = Paced(free=count)
    with ParallelLoader(source, devices(count)) as parallel:
        iterators = [parallel.per_device_loader(device) for device in devices(count)]
        for round_number in range(20):
            found = [next(iterator) for iterator in iterators]
            assert found == list(range(round_number * count, (round_number + 1) * count))
            source.let(count)


def test_threads_that_ask_at_once_start_one_pass():
    for _ in range(20):
        together = threading.Barrier(2)

        def drain(device: str, parallel: ParallelLoader, together: threading.Barrier) -> list[int]:
            together.wait()
            return list(parallel.per_device_loader(device))

        parallel = ParallelLoader(range(6), devices(2))
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(drain, devices(2), [parallel] * 2, [together] * 2))
        assert found == [[0, 2, 4], [1, 3, 5]]


def test_a_device_loader_tells_the_valid_samples_of_the_running_loop():
    batches = [torch.zeros(size) for size in (3, 1)]
    loader = DeviceLoader(batches)
    assert loader.valid_samples == 0
    assert [loader.valid_samples for _ in loader] == [3, 1]
    split = DeviceLoader(DataLoader(Numbers(3), batch_size=2), world=worlds(4)[3])
    assert [split.valid_samples for _ in split] == [0]


def test_several_devices_in_a_world_of_several_ranks_are_refused():
    with pytest.raises(ValueError, match=r"devices=\['cpu:0', 'cpu:1'\] in a world of 3 ranks: each rank has one"):
        ParallelLoader([], devices(2), world=worlds(3)[0])


def refused(error: type[Exception], words: str, **arguments: Any) -> Any:
    identity = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return pytest.param(error, words, arguments, id=identity)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        refused(TypeError, "loader=5 is of type int; pass a DataLoader, or an iterable", loader=5),
        refused(TypeError, "is of type dict; pass a DataLoader", loader={"x": [1]}),
        refused(TypeError, "is of type Tensor; pass a DataLoader", loader=torch.ones(2)),
        refused(ValueError, "devices=[] is empty; pass at least one device", devices=[]),
        refused(ValueError, "devices=['cpu:0', 'cpu:0'] repeats cpu:0", devices=["cpu", "cpu:0"]),
        refused(ValueError, f"device 'foo' does not exist; there are {available_devices()[0]}", devices=["foo"]),
        refused(TypeError, "devices='cpu' is of type str; pass a list of devices", devices="cpu"),
        refused(ValueError, "prefetch=-1 is too small; pass an integer of at least 0", prefetch=-1),
        refused(TypeError, "prefetch=True is of type bool", prefetch=True),
        refused(TypeError, "seed='a' is of type str; pass an integer, or None for the loader's own", seed="a"),
        refused(TypeError, "batch_dim=False is of type bool", batch_dim=False),
    ],
)
def test_a_wrong_argument_is_refused_by_name_value_and_rule(error, words, arguments):
    join_own_threads()  # of tests before
    whole = {"loader": [], "devices": ["cpu"]} | arguments
    with pytest.raises(error, match=re.escape(words)):
        ParallelLoader(**whole)
    assert not own_threads()


def test_a_device_is_named_in_any_way_and_must_be_the_loaders():
    parallel = ParallelLoader(range(2), [torch.device("cpu"), "cpu:1"])
    assert [list(parallel.per_device_loader(device)) for device in (0, torch.device("cpu:1"))] == [[0], [1]]
    with pytest.raises(ValueError, match="device cpu:2 is not one of this loader's devices: cpu:0, cpu:1"):
        parallel.per_device_loader("cpu:2")
    with pytest.raises(TypeError, match=r"per_device_loader\(device\)"):
        iter(parallel)


@pytest.mark.parametrize("make", [DeviceLoader, lambda batches, **more: ParallelLoader(batches, ["cpu"], **more)])
def test_an_argument_that_does_not_exist_is_refused_with_the_most_similar(make):
    with pytest.raises(TypeError, match=r"Loader\(\) has no argument 'batchdim'; is it batch_dim\?"):
        make([], batchdim=1)
    with pytest.raises(TypeError, match=r"Loader\(\) has no argument 'shuffle'; there are .*batch_dim, fixed_batch"):
        make([], shuffle=True)


@pytest.mark.parametrize("make", [DeviceLoader, lambda batches: ParallelLoader(batches, ["cpu"])])
def test_copies_of_loaders_are_refused_with_the_way_out(make):
    for carry in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled: create one where it is needed"):
            carry(make([]))


def test_a_device_loader_has_what_its_loader_has_and_refuses_to_be_set():
    plain = DataLoader(torch.arange(8), batch_size=2, num_workers=1, timeout=5, persistent_workers=True)
    loader = DeviceLoader(plain)
    for name in (each for each in vars(plain) if not each.startswith("_")):
        assert getattr(loader, name) is getattr(plain, name)
        with pytest.raises(ValueError, match=f"{name} was set on a .*; make a DataLoader with the {name} that"):
            setattr(loader, name, 10)
        assert getattr(loader, name) is getattr(plain, name)
    assert {"pin_memory", "timeout", "worker_init_fn", "persistent_workers", "prefetch_factor"} <= vars(plain).keys()
    loader.name = "train"
    assert loader.name == "train"
    with pytest.raises(AttributeError, match="no attribute 'batchsize'"):
        loader.batchsize  # noqa: B018
    assert not hasattr(loader, "_iterator")
    assert DeviceLoader(type("Own", (list,), {"classes": 3})([1])).classes == 3
