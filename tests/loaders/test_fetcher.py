"""How samples become batches, in the reader or in loader workers: errors, random numbers, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import resource
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy
import psutil
import pytest
import torch
from epochs import (
    PATIENCE_S,
    Bucketed,
    Killed,
    Numbers,
    dealt,
    is_awaiting_room,
    join_own_threads,
    loader_workers,
    ranks_of,
    take,
)
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from unisono import DeviceLoader, ParallelLoader
from unisono.errors import BusyError, UnpicklableError
from unisono.loaders import fetcher
from unisono.loaders.indexed import IndexedSource
from unisono.loaders.sharding import Rule
from unisono.loaders.shm import explain
from unisono.loaders.workers import RemoteFetcher, WorkerPool, WorkerStart

WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2])


class TwoFactsError(Exception):
    """Has two required arguments, so that its class and its text do not make it again."""

    def __init__(self, code: int, path: str) -> None:
        super().__init__(f"code {code} at {path}")
        self.code, self.path = code, path


class Failing(Numbers):
    """Sample `broken` cannot be loaded."""

    def __init__(self, count: int, broken: int, make: Callable[[], BaseException]) -> None:
        super().__init__(count)
        self.broken, self.make = broken, make

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise self.make()
        return index


class FailingAtOnce(Failing):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def failing_collate(samples: list[int]) -> torch.Tensor:
    if 21 in samples:
        raise TwoFactsError(21, "a/path")
    return torch.tensor(samples)


def two_facts() -> BaseException:
    return TwoFactsError(21, "a/path")


def stop() -> BaseException:
    return StopIteration(21)


def caught(iterator: Iterator[Any]) -> tuple[int, BaseException]:
    """How many batches came, and the error behind them."""
    count = 0
    try:
        for _ in iterator:
            count += 1
    except Exception as error:
        return count, error.with_traceback(None)
    pytest.fail("no error was raised")


# Errors.

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
            assert f"in the loader's reader, round {10 // count}" in shown
            for _ in range(2):
                with pytest.raises(TwoFactsError, match="code 21"):
                    next(iterator)


@WORKERS
def test_an_error_of_an_item_that_is_a_batch_names_it_too(num_workers):
    loader = DataLoader(Failing(40, 21, two_facts), batch_size=None, num_workers=num_workers)
    count, error = caught(iter(DeviceLoader(loader)))
    assert (count, type(error)) == (21, TwoFactsError)
    assert "in the sample with index 21" in error.__notes__


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


@pytest.mark.parametrize(
    ("thing", "name"),
    [(lambda: 1, "lambda"), (threading.Lock(), "lock"), ((n for n in ()), "generator")],
    ids=["lambda", "lock", "generator"],
)
def test_a_batch_that_cannot_leave_its_worker_is_named(thing, name):
    class Holding(Numbers):
        def __getitem__(self, index: int) -> Any:
            return thing if index == 5 else index

    num_workers = 2 if name == "lock" else 1
    loader = DataLoader(Holding(8), batch_size=2, num_workers=num_workers, collate_fn=list)
    found, error = caught(iter(DeviceLoader(loader)))
    assert (found, type(error)) == (2, UnpicklableError)
    assert "a batch of the samples with indices 4, 5 cannot be sent from a loader worker" in str(error)
    assert name in str(error)
    assert "or pass num_workers=0" in str(error)


class Exiting(Numbers):
    """Who loads sample 21 ends."""

    def __getitem__(self, index: int) -> int:
        if index == 21:
            raise SystemExit(3)
        return index


@pytest.mark.parametrize("dataset", [Killed(40), Exiting(40)], ids=["killed", "ended"])
@pytest.mark.parametrize(("num_workers", "persistent"), [(1, False), (1, True), (2, True)])
def test_a_loader_worker_that_is_gone_is_told_of(dataset, num_workers, persistent):
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers, persistent_workers=persistent)
    found, error = caught(iter(DeviceLoader(loader)))
    assert found <= 10
    assert isinstance(error, RuntimeError)
    assert "DataLoader worker" in str(error)


class Mortal(Numbers):
    """Who loads sample 5 is killed while it is dangerous."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.is_dangerous = torch.zeros(1).share_memory_()

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.is_dangerous[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_persistent_workers_that_died_are_replaced_in_the_next_pass():
    dataset = Mortal(8)
    loader = DeviceLoader(DataLoader(dataset, num_workers=2, persistent_workers=True))
    dataset.is_dangerous[0] = 1
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(loader)
    join_own_threads()
    dataset.is_dangerous[0] = 0
    for _ in range(2):
        assert [each.batch for each in take(loader)] == [[index] for index in range(8)]


@pytest.mark.parametrize("make", [two_facts, lambda: OSError("code 21")], ids=["two facts", "an error of files"])
def test_a_worker_init_fn_that_fails_is_told_of(make):
    def init(worker: int) -> None:
        raise make()

    found, error = caught(iter(DeviceLoader(DataLoader(Numbers(4), num_workers=1, worker_init_fn=init))))
    assert (found, type(error)) == (0, RuntimeError if make is two_facts else OSError)
    assert "code 21" in str(error)
    assert "raise make()" in str(error)


@WORKERS
def test_an_error_that_was_handled_holds_the_dataset_and_its_workers_no_longer(num_workers):
    dataset = Failing(40, 21, two_facts)
    gone = weakref.ref(dataset)
    gc.disable()
    try:
        with contextlib.suppress(TwoFactsError):
            list(DeviceLoader(DataLoader(dataset, batch_size=2, num_workers=num_workers)))
        del dataset
        join_own_threads()
        psutil.wait_procs(workers := loader_workers(), timeout=PATIENCE_S)
        assert not any(worker.is_running() for worker in workers)
        assert gone() is None
    finally:
        gc.enable()


# Batches of any kind.


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


@pytest.mark.parametrize("batch", [None, 0, "", [], (), {}, False], ids=repr)
def test_a_batch_may_be_nothing_from_first_to_last(batch):
    loader = DataLoader(Numbers(6), batch_size=2, collate_fn=lambda samples: batch)
    assert list(DeviceLoader(loader)) == [batch] * 3
    items = DataLoader([batch] * 3, batch_size=None, collate_fn=lambda item: item)
    assert list(DeviceLoader(items)) == [batch] * 3


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


# Workers.


class Informed(Numbers):
    """Sample i says what its worker knows of itself."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return type(info.dataset).__name__, info.dataset is self, info.id, info.num_workers, self.count, os.getpid()


def change_count(worker: int) -> None:
    info = get_worker_info()
    assert info.id == worker
    info.dataset.count += 100


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_a_worker_sees_the_users_dataset_and_its_worker_init_fn_may_change_it(context, num_workers):
    loader = DataLoader(
        Informed(4),
        num_workers=num_workers,
        collate_fn=list,
        worker_init_fn=change_count,
        multiprocessing_context=context,
    )
    facts = [sample for batch in DeviceLoader(loader) for sample in batch]
    assert [fact[:5] for fact in facts] == [
        ("Informed", True, index % num_workers, num_workers, 104) for index in range(4)
    ]
    assert len({fact[5] for fact in facts} - {os.getpid()}) == num_workers
    join_own_threads()
    gc.collect()  # what it tracks tells it when it goes, and would start it again
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # torch's queues close on their own threads, a moment later
            thread.join(PATIENCE_S)
    gc.collect()
    resource_tracker._resource_tracker._stop()  # a process that spawned ones need


def test_the_pool_keeps_the_options_of_the_users_loader():
    loader = DataLoader(
        Numbers(8),
        batch_size=2,
        num_workers=1,
        timeout=77,
        multiprocessing_context="fork",
        prefetch_factor=3,
        persistent_workers=True,
    )
    pool = WorkerPool(loader, RemoteFetcher(fetcher.Fetcher(loader)), WorkerStart(loader.dataset, None), True)
    for name in ("num_workers", "prefetch_factor", "persistent_workers"):
        assert getattr(pool._loader, name) == getattr(loader, name), name
    assert pool._timeout_s == 77
    assert pool._loader.multiprocessing_context.get_start_method() == "fork"


class Epochal(Numbers):
    """Sample i is i plus a hundred for each epoch, and the process that loads it."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index + 100 * self.epoch, os.getpid()


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (2, True)])
def test_the_dataset_is_told_each_epoch_wherever_it_is(num_workers, persistent):
    dataset = Epochal(6)
    loader = DeviceLoader(DataLoader(dataset, num_workers=num_workers, persistent_workers=persistent, collate_fn=list))
    pids = set()
    for epoch in (0, 1, 5):
        if epoch == 5:
            loader.set_epoch(5)
        found = [sample for batch in loader for sample in batch]
        assert [number for number, _ in found] == [100 * epoch + index for index in range(6)]
        pids |= {pid for _, pid in found}
    assert len(pids) == (max(num_workers, 1) * (1 if persistent or not num_workers else 3))


def test_persistent_workers_serve_epoch_after_epoch_and_after_an_early_end():
    loader = DeviceLoader(DataLoader(Epochal(12), num_workers=2, persistent_workers=True, collate_fn=list))

    def load() -> tuple[list[int], set[int]]:
        found = [sample for batch in loader for sample in batch]
        return [number for number, _ in found], {pid for _, pid in found}

    numbers, first = load()
    assert numbers == list(range(12))
    assert len(first) == 2
    assert load() == (list(range(100, 112)), first)
    for _ in range(3):
        for _batch in loader:
            break
    assert load() == (list(range(500, 512)), first)


def test_an_early_end_leaves_nothing_in_persistent_workers():
    class Large(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(1000)

    loader = DeviceLoader(DataLoader(Large(200), batch_size=2, num_workers=1, persistent_workers=True))

    def leave_early() -> int:
        for _ in loader:
            break
        join_own_threads()
        (worker,) = loader_workers()
        return worker.num_fds()

    leave_early()
    before = leave_early()
    assert [leave_early() for _ in range(6)][-1] <= before + 4


def test_persistent_workers_serve_the_pass_that_was_begun_last():
    source = IndexedSource(DataLoader(Numbers(9), num_workers=1, persistent_workers=True), None)
    first = source.begin(Rule(), lambda samples: None)
    next(first.pieces)
    second = source.begin(Rule(), lambda samples: None)
    assert [piece.batch.tolist() for (piece,) in second.pieces] == [[number] for number in range(9)]
    with pytest.raises(BusyError, match="workers have begun another loop over the same loader"):
        list(first.pieces)


class FailsOnce(Numbers):
    """Its sample 5 fails in the first pass."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.passes = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        if index == 5 and not self.passes:
            raise LookupError("five")
        return super().__getitem__(index)


def test_an_error_that_is_kept_leaves_persistent_workers_free():
    dataset = FailsOnce(12)
    loader = DeviceLoader(DataLoader(dataset, num_workers=2, persistent_workers=True))
    kept = []
    gc.disable()
    try:
        try:
            list(loader)
        except LookupError as error:
            kept.append(error)  # as a notebook does
        dataset.passes += 1
        assert [batch.tolist() for batch in loader] == [[number] for number in range(12)]
        assert len(kept) == 1
    finally:
        kept.clear()
        del loader
        gc.enable()
        gc.collect()


class Blocks(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            threading.Event().wait()  # for ever
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_the_users_time_out_names_the_worker_the_sample_and_the_line(persistent):
    data = DataLoader(Blocks(6), batch_size=2, num_workers=2, timeout=3, persistent_workers=persistent)
    loader, found = iter(DeviceLoader(data)), []
    with pytest.raises(RuntimeError) as told:
        found += [batch.tolist() for batch in loader]
    words = r"timed out after 3 seconds: loader worker 1 \(pid \d+\) is at the sample with index 3, in \(most recent .*"
    assert re.search(words + r"test_fetcher.py\", line \d+ in __getitem__$", str(told.value), re.DOTALL)


@pytest.mark.slow
def test_a_dataset_that_blocks_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr("unisono.loaders.workers._LONG_S", 1.0)
    with pytest.raises(RuntimeError, match="timed out"):
        list(DeviceLoader(DataLoader(Blocks(6), num_workers=1, timeout=3)))
    (warning,) = [each.getMessage() for each in caplog.records if "no batch has come" in each.message]
    assert "loader worker 0" in warning
    assert "the sample with index 3" in warning
    assert "in __getitem__" in warning


def test_a_pass_that_cannot_begin_does_not_keep_the_workers():
    class Broken(Bucketed):
        def __iter__(self) -> Iterator[Any]:
            raise OSError("no batches today")

    loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=True, batch_sampler=Broken([]))
    for _ in range(2):
        with pytest.raises(OSError, match="no batches today"):
            next(iter(DeviceLoader(loader)))
    assert not loader_workers()


# Random numbers.


class Augmented(Numbers):
    """Sample i with three random numbers, one of each generator."""

    def __getitem__(self, index: int) -> Any:
        return index, (random.random(), float(numpy.random.rand()), torch.rand(()).item())


class AugmentedAtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def augmentations(loaders: list[DeviceLoader], most: int | None = None) -> dict[int, Any]:
    """The numbers of each sample that counts."""
    return {index: numbers for loader in loaders for each in take(loader, most) for index, numbers in each.counted}


def augmented(num_workers: int, kind: type[Augmented] = Augmented, **options: Any) -> DataLoader:
    return DataLoader(kind(22), batch_size=3, shuffle=True, num_workers=num_workers, collate_fn=list, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_sample_is_augmented_alike_whoever_loads_it_and_anew_in_each_epoch():
    alone = ranks_of(augmented(1), 1, seed=3)
    first, second = augmentations(alone), augmentations(alone)
    assert sorted(first) == sorted(second) == list(range(22))
    drawn = [number for epoch in (first, second) for numbers in epoch.values() for number in numbers]
    assert len(set(drawn)) == 2 * 22 * 3, "no two samples, epochs or generators have a number in common"
    for num_workers, count, options in ((3, 1, {}), (2, 2, {}), (1, 3, {"split": "global"}), (1, 4, {})):
        # those that persist, so that each epoch needs no new ones
        loaders = ranks_of(augmented(num_workers, persistent_workers=count < 4), count, seed=3, **options)
        assert augmentations(loaders) == first, (num_workers, count)
        if count < 4:
            assert augmentations(loaders) == second, (num_workers, count)
    assert augmentations(ranks_of(augmented(1), 1, seed=4)) != first


def test_a_sample_is_augmented_alike_after_a_resume():
    plain = augmentations(ranks_of(augmented(2), 1, seed=3))
    loaders = ranks_of(augmented(2), 2, seed=3)
    before = augmentations(loaders, most=2)
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    (again,) = ranks_of(augmented(1), 1, seed=3)
    again.load_state_dict(states[0])
    after = augmentations([again])
    assert not set(before) & set(after)
    assert before | after == plain


def test_a_padded_sample_is_repeated_with_its_augmentation():
    for loader in ranks_of(augmented(1), 4, seed=3, tail="pad"):
        last = take(loader)[-1].batch
        assert len(last) == 3
        assert len({str(sample) for sample in last}) == len({index for index, _ in last})


def test_a_part_of_a_dataset_and_a_stack_of_them_are_augmented_sample_by_sample_too():
    def load(count: int) -> dict[int, Any]:
        part = Subset(Subset(Augmented(30), range(22)), range(22))
        loader = DataLoader(StackDataset(part, part), batch_size=3, num_workers=1, collate_fn=list)
        found = {}
        for rank in ranks_of(loader, count, seed=3):
            for each in take(rank):
                found |= {str(one[0]): (one, other) for one, other in each.counted}
        return found

    assert load(1) == load(2)
    at_once = DataLoader(Subset(AugmentedAtOnce(22), range(22)), batch_size=3, num_workers=1, collate_fn=list)
    assert fetcher.Fetcher(at_once)._fetch_many
    assert not fetcher.Fetcher(DataLoader(Subset(Augmented(22), range(22))))._fetch_many


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_dataset_that_fetches_many_is_augmented_alike_batch_by_batch():
    first = augmentations(ranks_of(augmented(1, AugmentedAtOnce), 1, seed=3))
    assert augmentations(ranks_of(augmented(3, AugmentedAtOnce), 1, seed=3)) == first
    assert len(set(first.values())) == 22


def test_the_ranks_of_a_loader_that_cuts_itself_draw_the_numbers_of_one():
    class Own(Sampler):
        num_replicas, rank = 1, 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(24))

        def __len__(self) -> int:
            return 24

    plain = DataLoader(Augmented(24), batch_size=2, sampler=Own(), num_workers=1, collate_fn=list)
    whole = augmentations(ranks_of(plain, 1))
    found: dict[int, Any] = {}
    for world in [loader._never_begun._world for loader in ranks_of([], 2)]:
        sampler = DistributedSampler(range(24), num_replicas=2, rank=world.rank, shuffle=False)
        loader = DataLoader(Augmented(24), batch_size=2, sampler=sampler, num_workers=1, collate_fn=list)
        found |= augmentations([DeviceLoader(loader, world=world)])
    assert found == whole
    assert len(set(whole.values())) == 24


class Streamed(Numbers):
    """Draws from a generator that worker_init_fn made of its worker's seed."""

    def __getitem__(self, index: int) -> float:
        return float(self.generator.random())


def own_generator(worker: int) -> None:
    info = get_worker_info()
    info.dataset.generator = random.Random(info.seed)


def test_no_two_ranks_or_epochs_have_a_workers_seed_in_common_and_a_second_run_has_them_again():
    def load() -> list[float]:
        loader = DataLoader(Streamed(8), num_workers=2, worker_init_fn=own_generator, batch_size=1, collate_fn=list)
        return [
            number for rank in ranks_of(loader, 2) for _ in range(2) for each in take(rank) for number in each.batch
        ]

    drawn = load()
    assert len(set(drawn)) == 16
    assert load() == drawn


def test_in_the_parent_the_generators_belong_to_the_loop():
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    plain = [(random.random(), float(numpy.random.rand()), torch.rand(()).item()) for _ in range(4)]
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    loader = DataLoader(Augmented(4), batch_size=2, collate_fn=list)
    assert [numbers for each in dealt_lists(loader) for _, numbers in each] == plain


def dealt_lists(loader: DataLoader) -> list[list[Any]]:
    return [piece.batch for piece in dealt(loader, 1).pieces[0]]


# What is left behind.


class Watched(Dataset):
    """Remembers, without holding them, the samples that it gave."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[torch.Tensor]] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.zeros(4)
        self.given.append(weakref.ref(sample))
        return sample


def test_a_thousand_early_ends_leave_nothing():
    dataset = Watched()
    loader = DeviceLoader(DataLoader(dataset, batch_size=None, shuffle=True), prefetch=2)
    gc.collect()
    gc.disable()
    try:
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            for _batch in loader:
                break
        del _batch
        join_own_threads()
        assert len(dataset.given) >= 1000
        assert sum(each() is not None for each in dataset.given) == 0
        assert len(os.listdir("/proc/self/fd")) == files
        assert loader.epoch == 999
    finally:
        gc.enable()


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_early_ends_with_workers_leave_nothing(persistent):
    loader = DeviceLoader(DataLoader(Numbers(1000), batch_size=2, num_workers=2, persistent_workers=persistent))

    def num_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def leave_early(loader: DeviceLoader) -> None:
        for _batch in loader:
            break
        del _batch  # it has a file of its own
        join_own_threads()

    for number in range(21 if persistent else 6):
        if number == persistent:  # persistent workers have pipes from the first loop on
            before = num_files()
        leave_early(loader)
    while num_files() > before:  # torch's queues close their pipes on threads of their own, a moment later
        threading.Event().wait(0.01)
        if persistent:
            leave_early(loader)  # torch keeps a batch that came before its turn, with its file, until the next loop
    assert len(loader_workers()) == (2 if persistent else 0)
    del loader
    gc.collect()
    assert not loader_workers()


class SeededByTorch(Numbers):
    """Makes a generator of its own from torch's seed, and draws nothing else."""

    def __getitem__(self, index: int) -> float:
        return random.Random(torch.initial_seed()).random()


def test_a_seed_that_is_asked_for_is_that_of_the_sample():
    def drawn(num_workers: int) -> list[float]:
        loader = DeviceLoader(DataLoader(SeededByTorch(24), 4, num_workers=num_workers))
        return [each for batch in loader for each in batch.tolist()]

    assert drawn(1) == drawn(2)
    assert len(set(drawn(1))) == 24


def test_rows_of_plain_tensors_are_those_that_torch_gives():
    data = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12))
    subset = Subset(data, [11, 3, 3, 7, 0])
    table, pairs = TensorDataset(data.tensors[0]), [(0, 1), (2, 1)]
    for dataset, sampler in ((table, pairs), (data, [-1, 5, -12]), (subset, [4, 0, 1])):
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        for mine, torchs in zip(DeviceLoader(loader), loader, strict=True):
            assert type(mine) is type(torchs)
            assert all(map(torch.equal, mine, torchs))


def test_batches_of_many_tensors_do_not_use_up_the_descriptors():
    class Scattered(Numbers):
        def __getitem__(self, index: int) -> list[torch.Tensor]:
            return [torch.full((1,), index) for _ in range(60)]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        loader = DeviceLoader(DataLoader(Scattered(30), batch_size=1, num_workers=1))
        iterator = iter(loader)
        first = next(iterator)
        pipeline = iterator._lane._pipeline
        while any(thread.is_alive() for thread in pipeline.threads) and not is_awaiting_room(iterator._lane.entry):
            threading.Event().wait(0.01)
        assert psutil.Process().num_fds() < 600, "what waits is in plain memory"
        assert [int(each[0]) for each in (first, *iterator)] == list(range(30))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_suffice_however_many_batches_may_wait():
    class Pair(Numbers):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((1,), index), torch.zeros(1)

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, 2 * psutil.Process().num_fds()), before[1]))
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        loader = DeviceLoader(DataLoader(Pair(limit), 1, num_workers=1), prefetch=limit)
        iterator = iter(loader)
        first = next(iterator)
        pipeline = iterator._lane._pipeline
        while any(thread.is_alive() for thread in pipeline.threads) and iterator._lane.sent < limit:
            threading.Event().wait(0.01)
        assert [int(each[0]) for each in (first, *iterator)] == list(range(limit))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
    assert [part.tolist() for batch in nested for part in batch.unbind()] == [[float(n)] * (n + 1) for n in range(12)]


def many_of(samples: list[int]) -> dict[str, Any]:
    kinds = (torch.float64, torch.bool, torch.complex64, torch.int16)
    tensors = [torch.tensor([[sample, place % 2]]).to(kinds[place % 4]) for sample in samples for place in range(80)]
    return {"first": tensors[:100], "rest": (tensors[100:], torch.empty(0, 3), torch.tensor(samples[0]), "word", None)}


def strided_of(samples: list[int]) -> list[torch.Tensor]:
    return [torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last) + sample for sample in samples * 20]


def test_many_tensors_keep_their_strides():
    (found,) = DeviceLoader(DataLoader(range(1), 1, num_workers=1, collate_fn=strided_of))
    assert len(found) == 20
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in found)


class Numbered(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(12)


@pytest.mark.parametrize("dataset", [range(12), Numbered()])
def test_many_tensors_take_few_descriptors(dataset):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 100, before[1]))
    try:
        found = list(DeviceLoader(DataLoader(dataset, 4, num_workers=1, collate_fn=many_of)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    wanted = [many_of(list(range(start, start + 4))) for start in range(0, 12, 4)]
    assert repr(found) == repr(wanted)
    found[0]["first"][0].fill_(7)
    assert repr(found[0]["first"][1:]) == repr(wanted[0]["first"][1:]), "they overlap"


def test_too_many_open_files_name_the_limit():
    error = RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)")
    explain(error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"{limit} files open (ulimit -n)" in error.__notes__[0]
